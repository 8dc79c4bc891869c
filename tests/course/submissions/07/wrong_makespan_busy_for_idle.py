# expects: check=07.makespan:free misconception=busy_for_idle
"""Returns what is busy."""

import numpy as np


def who_waits(seconds, hop):
    P = len(seconds)
    begin = np.zeros(P)
    for step in range(P):
        end = begin + seconds[:, step]
        posted = np.maximum(begin, np.maximum(np.roll(begin, 1), np.roll(begin, -1)))
        begin = np.maximum(end, posted + hop)
    return end.max(), seconds.sum(axis=1)
