# expects: check=06.makespan:uniform misconception=p_hops
"""Exchanges after the last step as well."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    ready = np.zeros(len(hop_s))
    for step in range(len(hop_s)):
        done = ready + compute_s[:, step]
        posted = ready if overlapped else done
        sent = np.maximum(posted, np.roll(posted, -1)) + hop_s
        ready = np.maximum(done, np.maximum(sent, np.roll(sent, 1)))
    return ready.max()
