# expects: check=08.deal:folded misconception=backward_too_far
"""The rank at a place of a backward turn is P - place."""

import numpy as np


def deal(S, P, chunk, folded=False):
    piece = np.arange(S) // chunk
    turn, place = piece // P, piece % P
    owner = np.where(turn % 2, P - place, place) if folded else place
    return [np.flatnonzero(owner == rank) for rank in range(P)]
