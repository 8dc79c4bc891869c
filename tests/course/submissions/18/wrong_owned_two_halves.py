# expects: check=18.owned:even misconception=two_halves
import math

import torch


def owned(layout, S, P):
    """Return the positions of each rank's tokens."""
    token, pieces = torch.arange(S), {"contiguous": P, "striped": S, "zigzag": 2 * P}[layout]
    piece = token // max(1, math.ceil(S / max(1, pieces)))
    owner = {"contiguous": piece, "striped": piece % P, "zigzag": piece % P}[
        layout
    ]
    return [torch.nonzero(owner == rank).flatten() for rank in range(P)]
