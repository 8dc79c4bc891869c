# expects: check=08.packed:small misconception=p_pieces
"""P pieces of every document."""

import numpy as np


def pack(lengths, P):
    shares = [[] for _ in range(P)]
    begin = 0
    for n in lengths:
        for rank, piece in enumerate(np.array_split(np.arange(begin, begin + n), P)):
            shares[rank].append(piece)
        begin += n
    return [np.concatenate(parts) for parts in shares]
