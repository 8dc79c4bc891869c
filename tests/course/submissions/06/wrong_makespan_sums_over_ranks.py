# expects: check=06.makespan:uniform misconception=sums_over_ranks
"""All that is done, by all ranks."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    P = len(hop_s)
    total = 0.0
    for rank in range(P):
        total += sum(compute_s[rank])
        if not overlapped:
            total += (P - 1) * hop_s[rank]
    return total
