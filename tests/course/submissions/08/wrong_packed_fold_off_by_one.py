# expects: check=08.packed:small misconception=fold_off_by_one
"""Pieces r and 2P - 2 - r."""

import numpy as np


def pack(lengths, P):
    shares = [[] for _ in range(P)]
    begin = 0
    for n in lengths:
        cuts = [begin + i * n // (2 * P) for i in range(2 * P + 1)]
        for rank in range(P):
            for piece in (rank, 2 * P - 2 - rank):
                shares[rank].append(np.arange(cuts[piece], cuts[piece + 1]))
        begin += n
    return [np.concatenate(parts) for parts in shares]
