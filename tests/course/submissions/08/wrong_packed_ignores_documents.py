# expects: check=08.packed:small misconception=ignores_documents
"""A zig-zag over everything."""

import numpy as np


def pack(lengths, P):
    pieces = np.array_split(np.arange(sum(lengths)), 2 * P)
    return [np.concatenate([pieces[rank], pieces[2 * P - 1 - rank]]) for rank in range(P)]
