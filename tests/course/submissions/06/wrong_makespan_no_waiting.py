# expects: check=06.makespan:uniform misconception=no_waiting
"""The busiest rank, and no waiting at all."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    return np.asarray(compute_s).sum(axis=1).max()
