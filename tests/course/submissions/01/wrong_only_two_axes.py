# expects: check=01.softmax:mixed misconception=-
import numpy as np


def softmax(scores):
    top = scores.reshape(-1, scores.shape[-1]).max(-1).reshape(*scores.shape[:3][:-1], -1)
    top = np.where(np.isinf(top), np.float32(0), top)
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return powers / np.maximum(total, np.finfo(total.dtype).tiny), lse
