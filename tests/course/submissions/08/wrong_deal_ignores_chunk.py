# expects: check=08.deal:round_robin misconception=ignores_chunk
"""Striped, whatever the chunk."""

import numpy as np


def deal(S, P, chunk, folded=False):
    turn = np.arange(S) % (2 * P if folded else P)
    owner = np.minimum(turn, 2 * P - 1 - turn) if folded else turn
    return [np.flatnonzero(owner == rank) for rank in range(P)]
