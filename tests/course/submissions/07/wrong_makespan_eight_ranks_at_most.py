# expects: check=07.makespan:chance misconception=-
"""Loops over eight steps."""

import numpy as np


def who_waits(seconds, hop):
    P = len(seconds)
    begin = np.zeros(P)
    for step in range(min(P, 8)):
        end = begin + seconds[:, step]
        posted = np.maximum(begin, np.maximum(np.roll(begin, 1), np.roll(begin, -1)))
        begin = np.maximum(end, posted + hop)
    return end.max(), end.max() - seconds.sum(axis=1)
