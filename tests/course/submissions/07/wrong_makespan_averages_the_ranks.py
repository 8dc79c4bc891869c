# expects: check=07.makespan:free misconception=averages_the_ranks
"""Divides the work by the ranks."""

import numpy as np


def who_waits(seconds, hop):
    total = np.maximum(seconds.mean(axis=0)[:-1], hop).sum() + seconds[:, -1].mean()
    return total, total - seconds.sum(axis=1)
