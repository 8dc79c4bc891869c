# expects: check=02.merge:worked misconception=-
import math

import torch


def merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.exp(lse_a - lse).masked_fill(lse_a == -math.inf, 0.0)
    weight_b = torch.exp(lse_b - lse).masked_fill(lse_b == -math.inf, 0.0)
    return out_a * weight_a[..., None] + out_b * weight_b[..., None], lse
