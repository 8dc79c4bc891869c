# expects: check=06.makespan:unequal misconception=rank_zero
"""Rank 0 ends."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    P = len(hop_s)
    ready = np.zeros(P)
    for step in range(P - 1):
        done = ready + compute_s[:, step]
        posted = ready if overlapped else done
        sent = np.maximum(posted, np.roll(posted, -1)) + hop_s
        ready = np.maximum(done, np.maximum(sent, np.roll(sent, 1)))
    return float((ready + compute_s[:, P - 1])[0])
