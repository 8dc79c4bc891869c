# expects: check=02.update:fall misconception=maximum_of_the_block
import torch


def update(maximum, total, acc, scores, values):
    new = scores.max(dim=-1).values
    factor = torch.exp(maximum - new)
    powers = torch.exp(scores - new[:, None])
    return new, total * factor + powers.sum(-1), acc * factor[:, None] + powers @ values
