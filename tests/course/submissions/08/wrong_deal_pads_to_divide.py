# expects: check=08.deal:ragged misconception=pads_to_divide
"""The length is rounded up to whole turns."""

import numpy as np


def deal(S, P, chunk, folded=False):
    period = 2 * P if folded else P
    padded = -(-S // (chunk * period)) * chunk * period
    turn = np.arange(padded) // chunk % period
    owner = np.minimum(turn, period - 1 - turn) if folded else turn
    return [np.flatnonzero(owner == rank) for rank in range(P)]
