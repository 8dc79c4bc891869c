# expects: check=07.makespan:free misconception=waits_for_all_posts
"""Waits until every rank has posted."""

import numpy as np


def who_waits(seconds, hop):
    P = len(seconds)
    begin = np.zeros(P)
    for step in range(P):
        end = begin + seconds[:, step]
        posted = begin.max()
        begin = np.maximum(end, posted + hop)
    return end.max(), end.max() - seconds.sum(axis=1)
