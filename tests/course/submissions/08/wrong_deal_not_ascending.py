# expects: check=08.deal:any misconception=not_ascending
"""All the early pieces of the folds, then all the late ones."""

import numpy as np


def deal(S, P, chunk, folded=False):
    owner = np.arange(S) // chunk % (2 * P if folded else P)
    if not folded:
        return [np.flatnonzero(owner == rank) for rank in range(P)]
    return [
        np.concatenate([np.flatnonzero(owner == rank), np.flatnonzero(owner == 2 * P - 1 - rank)]) for rank in range(P)
    ]
