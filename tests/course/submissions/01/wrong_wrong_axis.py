# expects: check=01.softmax:small misconception=wrong_axis
import numpy as np


def softmax(scores):
    powers = np.exp(scores - scores.max(-2, keepdims=True))
    lse = np.log(np.exp(scores.astype(float)).sum(-1))
    return powers / powers.sum(-2, keepdims=True), lse
