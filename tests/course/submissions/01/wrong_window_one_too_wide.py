# expects: check=01.causal:window misconception=window_one_too_wide
import numpy as np


def causal_mask(query_positions, key_positions, window=None):
    back = query_positions[:, None] - key_positions[None, :]
    return (back >= 0) & (back <= (back.max() if window is None else window))
