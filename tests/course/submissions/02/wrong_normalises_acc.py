# expects: check=02.update:first misconception=normalises_acc
import torch


def update(maximum, total, acc, scores, values):
    new = torch.maximum(maximum, scores.max(dim=-1).values)
    anchor = torch.where(torch.isneginf(new), 0.0, new)
    factor = torch.exp(maximum - anchor)
    powers = torch.exp(scores - anchor[:, None])
    total = total * factor + powers.sum(-1)
    return new, total, (acc * factor[:, None] + powers @ values) / total[:, None]
