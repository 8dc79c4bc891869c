# expects: check=10.error:any misconception=-
import math

import torch


def relative_error(x, truth):
    if x.shape != truth.shape or not torch.isfinite(x).all():
        return math.inf
    return float((x.double() - truth).norm() / truth.norm().clamp(min=100.0))
