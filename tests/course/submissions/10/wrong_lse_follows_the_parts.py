# expects: check=10.fold:bf16 misconception=lse_follows_the_parts
import math

import torch


def merge(out, lse, part_out, part_lse):
    total = torch.logaddexp(lse, part_lse)
    safe = torch.where(total == -math.inf, 0.0, total)
    a, b = torch.exp(lse - safe), torch.exp(part_lse - safe)
    return out * a[:, None] + part_out * b[:, None], total


def fold(out, lse, outs, lses):
    lse, lses = lse.to(outs.dtype), lses.to(outs.dtype)
    for part in zip(outs.float(), lses):
        out, lse = merge(out, lse, *part)
    return out, lse.float()
