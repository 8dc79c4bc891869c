# expects: check=06.makespan:unequal misconception=closed_form
"""The uniform ring's formula, with the longest of each."""

import numpy as np


def makespan(compute_s, hop_s, overlapped):
    P, block, hop = len(hop_s), np.max(compute_s), np.max(hop_s)
    return (P - 1) * (max(block, hop) if overlapped else block + hop) + block
