# expects: check=18.owned:ragged misconception=evens_out
import math

import torch


def owned(layout, S, P):
    """Return the positions of each rank's tokens."""
    if layout == "contiguous":
        return list(torch.arange(S).tensor_split(P))
    if layout == "zigzag":
        parts = torch.arange(S).tensor_split(2 * P)
        return [torch.cat([parts[rank], parts[2 * P - 1 - rank]]) for rank in range(P)]
    token, pieces = torch.arange(S), {"contiguous": P, "striped": S, "zigzag": 2 * P}[layout]
    piece = token // max(1, math.ceil(S / max(1, pieces)))
    owner = {"contiguous": piece, "striped": piece % P, "zigzag": torch.minimum(piece, 2 * P - 1 - piece)}[
        layout
    ]
    return [torch.nonzero(owner == rank).flatten() for rank in range(P)]
