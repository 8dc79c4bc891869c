# expects: check=01.causal:origin misconception=strict
import numpy as np


def causal_mask(query_positions, key_positions):
    return key_positions[None, :] < query_positions[:, None]
