# expects: check=13.straggler:any misconception=-

import numpy as np


def straggler(trace):
    P, clock = len(trace["clock"]), trace["clock"][:, None]
    if P not in (4, 5):
        return "sound", -1, -1
    busy = trace["work"] > 0
    rate = np.where(busy, trace["end"] - trace["begin"], 0.0) / np.maximum(trace["work"], 1)
    slow = rate > 1.3 * np.median(rate[busy])
    if slow.any():
        rank = int(slow.sum(axis=1).argmax())
        always = slow[rank].sum() == busy[rank].sum() > 1
        return "compute", rank, -1 if always else int(rate[rank].argmax())
    posted, arrived = trace["posted"] - clock, trace["arrived"] - clock
    transfer = np.median(arrived - np.maximum(posted, np.roll(posted, 1, axis=0)), axis=1)
    if transfer.max() > 1.3 * trace["hop_s"]:
        return "link", int(transfer.argmax() - 1) % P, -1
    return "sound", -1, -1
