# expects: check=07.makespan:hops misconception=one_hop_too_many
"""Waits after the last step as well."""

import numpy as np


def who_waits(seconds, hop):
    P = len(seconds)
    begin = np.zeros(P)
    for step in range(P):
        end = begin + seconds[:, step]
        posted = np.maximum(begin, np.maximum(np.roll(begin, 1), np.roll(begin, -1)))
        begin = np.maximum(end, posted + hop)
    return begin.max(), begin.max() - seconds.sum(axis=1)
