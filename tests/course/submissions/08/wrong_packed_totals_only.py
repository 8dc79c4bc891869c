# expects: check=08.packed:mixes misconception=totals_only
"""P stretches of equal work."""

import numpy as np


def pack(lengths, P):
    seen = np.concatenate([np.arange(1, n + 1) for n in lengths])
    before = np.cumsum(seen) - seen
    rank = np.minimum(P - 1, (before + seen / 2) * P // seen.sum())
    return [np.flatnonzero(rank == r) for r in range(P)]
