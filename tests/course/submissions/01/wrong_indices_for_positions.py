# expects: check=01.causal:positions misconception=indices_for_positions
import numpy as np


def causal_mask(query_positions, key_positions):
    return np.tri(len(query_positions), len(key_positions), dtype=bool)
