# expects: check=10.fold:resumable misconception=sorts_the_parts
import math

import torch


def merge(out, lse, part_out, part_lse):
    total = torch.logaddexp(lse, part_lse)
    safe = torch.where(total == -math.inf, 0.0, total)
    a, b = torch.exp(lse - safe), torch.exp(part_lse - safe)
    return out * a[:, None] + part_out * b[:, None], total


def fold(out, lse, outs, lses):
    order = torch.argsort(lses[:, 0], descending=True)
    for part in zip(outs[order].float(), lses[order]):
        out, lse = merge(out, lse, *part)
    return out, lse
