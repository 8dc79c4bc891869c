# expects: check=10.fold:resumable misconception=wider_inside
import math

import torch


def fold(out, lse, outs, lses):
    out, lse = out.double(), lse.double()
    for part_out, part_lse in zip(outs.double(), lses.double()):
        total = torch.logaddexp(lse, part_lse)
        safe = torch.where(total == -math.inf, 0.0, total)
        out = out * torch.exp(lse - safe)[:, None] + part_out * torch.exp(part_lse - safe)[:, None]
        lse = total
    return out.float(), lse.float()
