# expects: check=07.makespan:free misconception=columns_by_origin
"""Looks up the owner of the block."""

import numpy as np


def who_waits(seconds, hop):
    P = len(seconds)
    begin = np.zeros(P)
    for step in range(P):
        end = begin + np.array([seconds[rank, (rank - step) % P] for rank in range(P)])
        posted = np.maximum(begin, np.maximum(np.roll(begin, 1), np.roll(begin, -1)))
        begin = np.maximum(end, posted + hop)
    return end.max(), end.max() - seconds.sum(axis=1)
