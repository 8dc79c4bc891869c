# expects: check=07.makespan:hops misconception=computes_then_sends
"""Sends when it has computed."""

import numpy as np


def who_waits(seconds, hop):
    P = len(seconds)
    begin = np.zeros(P)
    for step in range(P):
        end = begin + seconds[:, step]
        done = np.maximum(end, np.maximum(np.roll(end, 1), np.roll(end, -1)))
        begin = done + hop
    return end.max(), end.max() - seconds.sum(axis=1)
