# expects: check=08.deal:folded misconception=ignores_folded
"""Round-robin always."""

import numpy as np


def deal(S, P, chunk, folded=False):
    owner = np.arange(S) // chunk % P
    return [np.flatnonzero(owner == rank) for rank in range(P)]
