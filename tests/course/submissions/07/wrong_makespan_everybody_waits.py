# expects: check=07.makespan:free misconception=everybody_waits
"""The slowest rank of every step."""

import numpy as np


def who_waits(seconds, hop):
    total = np.maximum(seconds.max(axis=0)[:-1], hop).sum() + seconds[:, -1].max()
    return total, total - seconds.sum(axis=1)
