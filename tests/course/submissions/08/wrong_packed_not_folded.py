# expects: check=08.packed:small misconception=not_folded
"""Pieces r and r + P."""

import numpy as np


def pack(lengths, P):
    shares = [[] for _ in range(P)]
    begin = 0
    for n in lengths:
        cuts = [begin + i * n // (2 * P) for i in range(2 * P + 1)]
        for rank in range(P):
            for piece in (rank, rank + P):
                shares[rank].append(np.arange(cuts[piece], cuts[piece + 1]))
        begin += n
    return [np.concatenate(parts) for parts in shares]
