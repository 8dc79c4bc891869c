# expects: check=07.makespan:free misconception=previous_rank_only
"""Waits for the rank that sends."""

import numpy as np


def who_waits(seconds, hop):
    P = len(seconds)
    begin = np.zeros(P)
    for step in range(P):
        end = begin + seconds[:, step]
        posted = np.maximum(begin, np.roll(begin, 1))
        begin = np.maximum(end, posted + hop)
    return end.max(), end.max() - seconds.sum(axis=1)
