# expects: check=02.update:blocks misconception=-
import torch


def update(maximum, total, acc, scores, values):
    new = torch.maximum(maximum, scores.max(dim=-1).values.clamp(max=80))
    anchor = torch.where(torch.isneginf(new), 0.0, new)
    factor = torch.exp(maximum - anchor)
    powers = torch.exp(scores - anchor[:, None])
    return new, total * factor + powers.sum(-1), acc * factor[:, None] + powers @ values
