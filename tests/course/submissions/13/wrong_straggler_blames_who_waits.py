# expects: check=13.straggler:compute misconception=blames_who_waits

import numpy as np


def straggler(trace):
    clock = trace["clock"][:, None]
    waits = (trace["done"] - trace["end"][:, :-1]).sum(axis=1)
    busy = trace["work"] > 0
    rate = np.where(busy, trace["end"] - trace["begin"], 0.0) / np.maximum(trace["work"], 1)
    posted, arrived = trace["posted"] - clock, trace["arrived"] - clock
    transfer = np.median(arrived - np.maximum(posted, np.roll(posted, 1, axis=0)), axis=1)
    if rate.max() < 1.3 * np.median(rate[busy]) and transfer.max() < 1.3 * trace["hop_s"]:
        return "sound", -1, -1
    return "compute", int(waits.argmax()), -1
