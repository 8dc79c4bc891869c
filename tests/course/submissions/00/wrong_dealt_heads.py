# expects: check=00.axes:one-sequence misconception=dealt_heads
import numpy as np


def split_heads(x, heads):
    return np.stack([x[..., h::heads] for h in range(heads)], axis=1)
