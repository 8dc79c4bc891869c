# expects: check=06.makespan:uniform misconception=adds_instead_of_max
"""Double buffering changes nothing."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    P = len(hop_s)
    ready = np.zeros(P)
    for step in range(P - 1):
        done = ready + compute_s[:, step]
        posted = done
        sent = np.maximum(posted, np.roll(posted, -1)) + hop_s
        ready = np.maximum(done, np.maximum(sent, np.roll(sent, 1)))
    return (ready + compute_s[:, P - 1]).max()
