# expects: check=08.packed:small misconception=document_major
"""Folds every document, then cuts the stream into P stretches."""

import numpy as np


def pack(lengths, P):
    stream, begin = [], 0
    for n in lengths:
        pieces = np.array_split(begin + np.arange(n), 2 * P)
        for rank in range(P):
            stream += [pieces[rank], pieces[2 * P - 1 - rank]]
        begin += n
    return np.array_split(np.concatenate(stream), P)
