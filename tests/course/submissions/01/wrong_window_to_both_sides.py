# expects: check=01.causal:window misconception=window_to_both_sides
import numpy as np


def causal_mask(query_positions, key_positions, window=None):
    back = query_positions[:, None] - key_positions[None, :]
    return back >= 0 if window is None else abs(back) < window
