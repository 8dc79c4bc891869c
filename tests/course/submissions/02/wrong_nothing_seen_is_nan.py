# expects: check=02.update:hidden misconception=nothing_seen_is_nan
import torch


def update(maximum, total, acc, scores, values):
    new = torch.maximum(maximum, scores.max(dim=-1).values)
    factor = torch.exp(maximum - new)
    powers = torch.exp(scores - new[:, None])
    return new, total * factor + powers.sum(-1), acc * factor[:, None] + powers @ values
