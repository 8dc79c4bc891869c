# expects: check=01.softmax:masked misconception=adds_to_the_sum
import numpy as np


def softmax(scores):
    top = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isinf(top), np.float32(0), top))
    total = powers.sum(-1, keepdims=True) + 1e-9
    return powers / total, (np.where(np.isinf(top), np.float32(0), top) + np.log(total))[..., 0]
