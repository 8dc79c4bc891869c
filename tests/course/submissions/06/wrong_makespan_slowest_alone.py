# expects: check=06.makespan:unequal misconception=slowest_alone
"""Each rank by itself, as if nobody waited."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    P, totals = len(hop_s), []
    for rank in range(P):
        clock = 0.0
        for step in range(P - 1):
            times = compute_s[rank, step], hop_s[rank]
            clock += max(times) if overlapped else sum(times)
        totals.append(clock + compute_s[rank, P - 1])
    return np.max(totals)
