# expects: check=08.packed:many misconception=rounds_pieces_up
"""Pieces of n / 2P tokens, rounded up, so that the last ones are short or empty."""

import numpy as np


def pack(lengths, P):
    shares = [[] for _ in range(P)]
    begin = 0
    for n in lengths:
        chunk = -(-n // (2 * P))
        for rank in range(P):
            for piece in (rank, 2 * P - 1 - rank):
                shares[rank].append(begin + np.arange(min(n, piece * chunk), min(n, (piece + 1) * chunk)))
        begin += n
    return [np.concatenate(parts) for parts in shares]
