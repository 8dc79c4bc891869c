# expects: check=10.fold:large misconception=masses
import math

import torch


def fold(out, lse, outs, lses):
    for part_out, part_lse in zip(outs.float(), lses):
        a, b = lse.exp(), part_lse.exp()
        out = (out * a[:, None] + part_out * b[:, None]) / (a + b)[:, None]
        lse = (a + b).log()
    return out, lse
