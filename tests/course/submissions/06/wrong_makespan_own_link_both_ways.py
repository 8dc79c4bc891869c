# expects: check=06.makespan:links misconception=own_link_both_ways
"""The same link for what leaves and what arrives."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    P = len(hop_s)
    ready = np.zeros(P)
    for step in range(P - 1):
        done = ready + compute_s[:, step]
        posted = ready if overlapped else done
        sent = np.maximum(posted, np.roll(posted, -1))
        ready = np.maximum(done, np.maximum(sent, np.roll(sent, 1)) + hop_s)
    return (ready + compute_s[:, P - 1]).max()
