# expects: check=06.makespan:uniform misconception=first_hop_exposed
"""Fetches a block before it begins."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    P = len(hop_s)
    ready = np.full(P, np.max(hop_s) if overlapped and P > 1 else 0.0)
    for step in range(P - 1):
        done = ready + compute_s[:, step]
        posted = ready if overlapped else done
        sent = np.maximum(posted, np.roll(posted, -1)) + hop_s
        ready = np.maximum(done, np.maximum(sent, np.roll(sent, 1)))
    return (ready + compute_s[:, P - 1]).max()
