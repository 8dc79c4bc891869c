# expects: check=06.makespan:random misconception=-
"""Written for four ranks."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    P = min(4, len(hop_s))
    ready = np.zeros(P)
    for step in range(P - 1):
        done = ready + compute_s[:P, step]
        posted = ready if overlapped else done
        sent = np.maximum(posted, np.roll(posted, -1)) + hop_s[:P]
        ready = np.maximum(done, np.maximum(sent, np.roll(sent, 1)))
    return (ready + compute_s[:P, P - 1]).max()
