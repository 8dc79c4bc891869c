# expects: check=08.packed:many misconception=same_ranks_first
"""Rank 0 begins at every document."""

import numpy as np


def pack(lengths, P):
    shares = [[] for _ in range(P)]
    begin = 0
    for n in lengths:
        at = [i * n // (2 * P) for i in range(2 * P + 1)]
        for rank in range(P):
            for piece in (rank, 2 * P - 1 - rank):
                shares[rank].append(begin + np.arange(at[piece], at[piece + 1]))
        begin += n
    return [np.concatenate(parts) for parts in shares]
