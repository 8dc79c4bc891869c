# expects: check=01.softmax:masked misconception=masked_row_is_uniform
import numpy as np


def softmax(scores):
    scores = np.maximum(scores, np.float32(-1e9))
    top = scores.max(-1, keepdims=True)
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    return powers / total, (top + np.log(total))[..., 0]
