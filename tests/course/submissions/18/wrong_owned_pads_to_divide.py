# expects: check=18.owned:ragged misconception=pads_to_divide
import math

import torch


def owned(layout, S, P):
    """Return the positions of each rank's tokens."""
    whole = 2 * P if layout == "zigzag" else P
    S = math.ceil(S / whole) * whole
    token, pieces = torch.arange(S), {"contiguous": P, "striped": S, "zigzag": 2 * P}[layout]
    piece = token // max(1, math.ceil(S / max(1, pieces)))
    owner = {"contiguous": piece, "striped": piece % P, "zigzag": torch.minimum(piece, 2 * P - 1 - piece)}[
        layout
    ]
    return [torch.nonzero(owner == rank).flatten() for rank in range(P)]
