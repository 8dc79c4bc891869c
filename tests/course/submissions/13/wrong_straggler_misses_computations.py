# expects: check=13.straggler:compute misconception=misses_computations

import numpy as np


def straggler(trace):
    P, clock = len(trace["clock"]), trace["clock"][:, None]
    posted, arrived = trace["posted"] - clock, trace["arrived"] - clock
    transfer = np.median(arrived - np.maximum(posted, np.roll(posted, 1, axis=0)), axis=1)
    if transfer.max() > 1.3 * trace["hop_s"]:
        return "link", int(transfer.argmax() - 1) % P, -1
    return "sound", -1, -1
