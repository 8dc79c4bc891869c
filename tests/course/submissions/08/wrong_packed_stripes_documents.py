# expects: check=08.packed:small misconception=stripes_documents
"""Every P-th token, which is even for any document."""

import numpy as np


def pack(lengths, P):
    return [np.arange(rank, sum(lengths), P) for rank in range(P)]
