# expects: check=10.fold:parts misconception=lse_is_the_largest
import math

import torch


def merge(out, lse, part_out, part_lse):
    total = torch.logaddexp(lse, part_lse)
    safe = torch.where(total == -math.inf, 0.0, total)
    a, b = torch.exp(lse - safe), torch.exp(part_lse - safe)
    return out * a[:, None] + part_out * b[:, None], total


def fold(out, lse, outs, lses):
    for part_out, part_lse in zip(outs.float(), lses):
        out, _ = merge(out, lse, part_out, part_lse)
        lse = torch.maximum(lse, part_lse)
    return out, lse
