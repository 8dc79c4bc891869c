# expects: check=01.causal:window misconception=window_ignored
import numpy as np


def causal_mask(query_positions, key_positions, window=None):
    return key_positions[None, :] <= query_positions[:, None]
