# expects: check=10.error:shape misconception=broadcasts
import math

import torch


def relative_error(x, truth):
    x = x.double()
    if x.isnan().any():
        return math.inf
    finite = torch.isfinite(truth)
    return float((x - truth)[finite].norm() / (truth[finite].norm() if truth.any() else 1.0))
