# expects: check=02.update:first misconception=rows_share_a_maximum
import torch


def update(maximum, total, acc, scores, values):
    new = torch.maximum(maximum, scores.max())
    anchor = torch.where(torch.isneginf(new), 0.0, new)
    factor = torch.exp(maximum - anchor)
    powers = torch.exp(scores - anchor[:, None])
    return new, total * factor + powers.sum(-1), acc * factor[:, None] + powers @ values
