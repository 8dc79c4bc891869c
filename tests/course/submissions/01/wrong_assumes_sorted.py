# expects: check=01.causal:any misconception=-
import numpy as np


def causal_mask(query_positions, key_positions):
    return np.arange(len(key_positions)) < np.searchsorted(key_positions, query_positions, side="right")[:, None]
