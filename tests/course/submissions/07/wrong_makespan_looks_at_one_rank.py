# expects: check=07.makespan:free misconception=looks_at_one_rank
"""Rank 0 speaks for all."""

import numpy as np


def who_waits(seconds, hop):
    P = len(seconds)
    begin = np.zeros(P)
    for step in range(P):
        end = begin + seconds[:, step]
        posted = np.maximum(begin, np.maximum(np.roll(begin, 1), np.roll(begin, -1)))
        begin = np.maximum(end, posted + hop)
    return end[0], end[0] - seconds.sum(axis=1)
