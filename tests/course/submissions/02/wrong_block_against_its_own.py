# expects: check=02.update:fall misconception=block_against_its_own
import torch


def update(maximum, total, acc, scores, values):
    block = scores.max(dim=-1).values
    new = torch.maximum(maximum, block)
    factor = torch.exp(maximum - new)
    powers = torch.exp(scores - block[:, None])
    return new, total * factor + powers.sum(-1), acc * factor[:, None] + powers @ values
