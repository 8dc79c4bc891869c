# expects: check=00.axes:batch misconception=one_sequence
import numpy as np


def split_heads(x, heads):
    B, S, width = x.shape
    first = x[0].reshape(S, heads, width // heads).swapaxes(0, 1)
    return np.stack([first] * B)
