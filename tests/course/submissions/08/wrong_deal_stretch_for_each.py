# expects: check=08.deal:round_robin misconception=stretch_for_each
"""The contiguous layout."""

import numpy as np


def deal(S, P, chunk, folded=False):
    return np.array_split(np.arange(S), P)
