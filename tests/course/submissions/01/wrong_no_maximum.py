# expects: check=01.softmax:large misconception=no_maximum
import numpy as np


def softmax(scores):
    powers = np.exp(scores)
    total = powers.sum(-1, keepdims=True)
    return powers / total, np.log(total)[..., 0]
