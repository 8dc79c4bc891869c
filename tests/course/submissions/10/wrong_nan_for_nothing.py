# expects: check=10.fold:empty misconception=nan_for_nothing
import math

import torch


def fold(out, lse, outs, lses):
    for part_out, part_lse in zip(outs.float(), lses):
        total = torch.logaddexp(lse, part_lse)
        out = out * torch.exp(lse - total)[:, None] + part_out * torch.exp(part_lse - total)[:, None]
        lse = total
    return out, lse
