# expects: check=06.makespan:unequal misconception=mean_rank
"""The mean rank instead of every rank."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    P = len(hop_s)
    mean = compute_s.mean(axis=0)
    ready = np.zeros(P)
    for step in range(P - 1):
        done = ready + mean[step]
        posted = ready if overlapped else done
        sent = np.maximum(posted, np.roll(posted, -1)) + hop_s
        ready = np.maximum(done, np.maximum(sent, np.roll(sent, 1)))
    return (ready + mean[-1]).max()
