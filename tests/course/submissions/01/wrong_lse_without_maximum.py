# expects: check=01.softmax:small misconception=lse_without_maximum
import numpy as np


def softmax(scores):
    top = scores.max(-1, keepdims=True)
    top = np.where(np.isinf(top), np.float32(0), top)
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total)[..., 0]
    return powers / np.maximum(total, np.finfo(total.dtype).tiny), lse
