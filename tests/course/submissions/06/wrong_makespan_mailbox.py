# expects: check=06.makespan:unequal misconception=mailbox
"""Messages wait in the receiver's mailbox."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    P = len(hop_s)
    ready = np.zeros(P)
    for step in range(P - 1):
        done = ready + compute_s[:, step]
        posted = ready if overlapped else done
        sent = posted + hop_s
        ready = np.maximum(done, np.roll(sent, 1))
    return (ready + compute_s[:, P - 1]).max()
