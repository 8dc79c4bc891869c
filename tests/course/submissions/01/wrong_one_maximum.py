# expects: check=01.softmax:spread misconception=one_maximum_for_all
import numpy as np


def softmax(scores):
    top = scores.max()
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    return powers / total, (top + np.log(total))[..., 0]
