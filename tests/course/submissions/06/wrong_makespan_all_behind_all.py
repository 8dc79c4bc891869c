# expects: check=06.makespan:uniform misconception=all_behind_all
"""All hops behind all computations, in one go."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    P = len(hop_s)
    if overlapped:
        return max(np.sum(compute_s, axis=1).max(), (P - 1) * np.max(hop_s))
    ready = np.zeros(P)
    for step in range(P):
        done = ready + compute_s[:, step]
        sent = np.maximum(done, np.roll(done, -1)) + hop_s
        ready = np.maximum(sent, np.roll(sent, 1)) if step < P - 1 else done
    return ready.max()
