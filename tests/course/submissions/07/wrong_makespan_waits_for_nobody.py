# expects: check=07.makespan:hops misconception=waits_for_nobody
"""Blocks come by themselves."""

import numpy as np


def who_waits(seconds, hop):
    P = len(seconds)
    begin = np.zeros(P)
    for step in range(P):
        end = begin + seconds[:, step]
        begin = np.maximum(end, begin + hop)
    return end.max(), end.max() - seconds.sum(axis=1)
