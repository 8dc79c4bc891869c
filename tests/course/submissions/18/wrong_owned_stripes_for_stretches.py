# expects: check=18.owned:even misconception=stripes_for_stretches
import math

import torch


def owned(layout, S, P):
    """Return the positions of each rank's tokens."""
    token, pieces = torch.arange(S), {"contiguous": S, "striped": P, "zigzag": 2 * P}[layout]
    piece = token // max(1, math.ceil(S / max(1, pieces)))
    owner = {"contiguous": piece % P, "striped": piece, "zigzag": torch.minimum(piece, 2 * P - 1 - piece)}[
        layout
    ]
    return [torch.nonzero(owner == rank).flatten() for rank in range(P)]
