# expects: check=10.fold:any misconception=-
import math

import torch


def merge(out, lse, part_out, part_lse):
    total = torch.logaddexp(lse, part_lse)
    safe = torch.where(total == -math.inf, 0.0, total)
    a, b = torch.exp(lse - safe), torch.exp(part_lse - safe)
    return out * a[:, None] + part_out * b[:, None], total


def fold(out, lse, outs, lses):
    for part_out, part_lse in zip(outs.float(), lses):
        new_out, new_lse = merge(out, lse, part_out, part_lse)
        light = part_lse < lse - 7
        out = torch.where(light[:, None], out, new_out)
        lse = torch.where(light, lse, new_lse)
    return out, lse
