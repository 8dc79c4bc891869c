# expects: check=08.deal:folded misconception=backwards_first
"""The first turn runs from the last rank down."""

import numpy as np


def deal(S, P, chunk, folded=False):
    turn = np.arange(S) // chunk % (2 * P if folded else P)
    owner = np.where(turn < P, P - 1 - turn, turn - P) if folded else turn
    return [np.flatnonzero(owner == rank) for rank in range(P)]
