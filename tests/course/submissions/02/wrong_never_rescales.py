# expects: check=02.update:rise misconception=never_rescales
import torch


def update(maximum, total, acc, scores, values):
    new = torch.maximum(maximum, scores.max(dim=-1).values)
    powers = torch.exp(scores - new[:, None])
    return new, total + powers.sum(-1), acc + powers @ values
