# expects: check=10.error:zero misconception=zero_truth
import math

import torch


def relative_error(x, truth):
    if not truth.any():
        return math.inf if x.any() else 0.0
    return float((x.double() - truth).norm() / truth.norm())
