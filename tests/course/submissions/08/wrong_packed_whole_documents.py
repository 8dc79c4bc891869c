# expects: check=08.packed:small misconception=whole_documents
"""The longest document goes to whoever has least to do."""

import numpy as np


def pack(lengths, P):
    begins = np.cumsum([0, *lengths[:-1]])
    work, shares = [0] * P, [[np.zeros(0, np.int64)] for _ in range(P)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = work.index(min(work))
        work[rank] += lengths[i] * (lengths[i] + 1) // 2
        shares[rank].append(np.arange(begins[i], begins[i] + lengths[i]))
    return [np.concatenate(parts) for parts in shares]
