# expects: check=08.deal:ragged misconception=drops_the_tail
"""Whole pieces only."""

import numpy as np


def deal(S, P, chunk, folded=False):
    period = 2 * P if folded else P
    pieces = np.arange(S // chunk * chunk).reshape(-1, chunk)
    turn = np.arange(len(pieces)) % period
    owner = np.minimum(turn, period - 1 - turn) if folded else turn
    return [pieces[owner == rank].ravel() for rank in range(P)]
