# expects: check=06.makespan:unequal misconception=own_send_only
"""Nobody waits for what it is due."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    P = len(hop_s)
    ready = np.zeros(P)
    for step in range(P - 1):
        done = ready + compute_s[:, step]
        posted = ready if overlapped else done
        sent = np.maximum(posted, np.roll(posted, -1)) + hop_s
        ready = np.maximum(done, sent)
    return float((ready + compute_s[:, P - 1]).max())
