# expects: check=10.error:zero misconception=zero_truth_is_inf
import math


def relative_error(x, truth):
    x, truth = x.double(), truth.double()
    if truth.norm() == 0:
        return math.inf
    return ((x - truth).norm() / truth.norm()).item()
