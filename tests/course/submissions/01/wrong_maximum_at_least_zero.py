# expects: check=01.softmax:large misconception=maximum_at_least_zero
import numpy as np


def softmax(scores):
    top = scores.max(-1, keepdims=True, initial=0)
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return powers / np.maximum(total, np.finfo(total.dtype).tiny), lse
