# expects: check=10.fold:bf16 misconception=skips_the_last
import math

import torch


def merge(out, lse, part_out, part_lse):
    total = torch.logaddexp(lse, part_lse)
    safe = torch.where(total == -math.inf, 0.0, total)
    a, b = torch.exp(lse - safe), torch.exp(part_lse - safe)
    return out * a[:, None] + part_out * b[:, None], total


def fold(out, lse, outs, lses):
    for i in range(len(outs) - 1):
        out, lse = merge(out, lse, outs[i].float(), lses[i])
    return out, lse
