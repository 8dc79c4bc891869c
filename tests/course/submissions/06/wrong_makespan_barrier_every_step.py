# expects: check=06.makespan:unequal misconception=barrier_every_step
"""The slowest rank of every step."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    slowest, hop = compute_s.max(axis=0), hop_s.max()
    steps = np.maximum(slowest, hop) if overlapped else slowest + hop
    return steps[:-1].sum() + slowest[-1]
