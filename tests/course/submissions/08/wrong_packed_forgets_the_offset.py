# expects: check=08.packed:small misconception=forgets_the_offset
"""Every document begins at 0."""

import numpy as np


def pack(lengths, P):
    shares = [[] for _ in range(P)]
    for n in lengths:
        cuts = [i * n // (2 * P) for i in range(2 * P + 1)]
        for rank in range(P):
            for piece in (rank, 2 * P - 1 - rank):
                shares[rank].append(np.arange(cuts[piece], cuts[piece + 1]))
    return [np.concatenate(parts) for parts in shares]
