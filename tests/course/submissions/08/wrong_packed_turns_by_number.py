# expects: check=08.packed:many misconception=turns_by_number
"""The next rank begins at every document, whatever its length."""

import numpy as np


def pack(lengths, P):
    shares = [[] for _ in range(P)]
    begin = 0
    for number, n in enumerate(lengths):
        at = [i * n // (2 * P) for i in range(2 * P + 1)]
        for rank in range(P):
            for piece in (rank, 2 * P - 1 - rank):
                shares[(rank + number) % P].append(begin + np.arange(at[piece], at[piece + 1]))
        begin += n
    return [np.concatenate(parts) for parts in shares]
