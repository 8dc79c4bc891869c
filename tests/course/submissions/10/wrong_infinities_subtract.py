# expects: check=10.error:empty_rows misconception=infinities_subtract
import math

import torch


def relative_error(x, truth):
    error = float((x.double() - truth).norm() / (truth.norm() if truth.any() else 1.0))
    return error if math.isfinite(error) else math.inf
