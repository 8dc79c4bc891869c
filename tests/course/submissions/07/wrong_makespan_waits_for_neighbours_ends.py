# expects: check=07.makespan:free misconception=waits_for_neighbours_ends
"""Waits until its neighbours have computed."""

import numpy as np


def who_waits(seconds, hop):
    P = len(seconds)
    begin = np.zeros(P)
    for step in range(P):
        end = begin + seconds[:, step]
        posted = np.maximum(begin, np.maximum(np.roll(begin, 1), np.roll(begin, -1)))
        done = np.maximum(end, np.maximum(np.roll(end, 1), np.roll(end, -1)))
        begin = np.maximum(done, posted + hop)
    return end.max(), end.max() - seconds.sum(axis=1)
