# expects: check=08.packed:mixes misconception=pads_the_documents
"""Pieces of n / 2P tokens, rounded up."""

import numpy as np


def pack(lengths, P):
    shares = [[] for _ in range(P)]
    begin = 0
    for n in lengths:
        chunk = -(-n // (2 * P))
        for rank in range(P):
            for piece in (rank, 2 * P - 1 - rank):
                shares[rank].append(begin + np.arange(piece * chunk, (piece + 1) * chunk))
        begin += n
    return [np.concatenate(parts) for parts in shares]
