# expects: check=02.update:rise misconception=rescales_upside_down
import torch


def update(maximum, total, acc, scores, values):
    new = torch.maximum(maximum, scores.max(dim=-1).values)
    powers = torch.exp(scores - new[:, None])
    factor = torch.where(torch.isneginf(maximum), 0.0, torch.exp(new - maximum))
    return new, total * factor + powers.sum(-1), acc * factor[:, None] + powers @ values
