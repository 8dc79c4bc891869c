# expects: check=10.fold:bf16 misconception=out_not_rescaled
import math

import torch


def fold(out, lse, outs, lses):
    for part_out, part_lse in zip(outs.float(), lses):
        total = torch.logaddexp(lse, part_lse)
        safe = torch.where(total == -math.inf, 0.0, total)
        out, lse = out + part_out * torch.exp(part_lse - safe)[:, None], total
    return out, lse
