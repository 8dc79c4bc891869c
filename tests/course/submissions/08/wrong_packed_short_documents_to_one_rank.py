# expects: check=08.packed:many misconception=uneven_tokens
"""What cannot be cut into 2P pieces goes to rank 0 as it is."""

import numpy as np


def pack(lengths, P):
    shares = [[] for _ in range(P)]
    begin = 0
    for n in lengths:
        if n < 2 * P:
            shares[0].append(np.arange(begin, begin + n))
        else:
            cuts = [begin + i * n // (2 * P) for i in range(2 * P + 1)]
            for rank in range(P):
                for piece in (rank, 2 * P - 1 - rank):
                    shares[rank].append(np.arange(cuts[piece], cuts[piece + 1]))
        begin += n
    return [np.concatenate([np.zeros(0, np.int64), *parts]) for parts in shares]
