# expects: check=14.sum:values misconception=counts_itself_twice

import torch


def sum_gradients(ring, weights, gradients):
    dtype = torch.promote_types(weights[0].dtype, torch.float32)
    parts = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True)]
    mine = torch.cat([part.flatten().to(dtype) for part in parts])
    flat = mine + ring.all_reduce(mine)
    pieces = flat.split([w.numel() for w in weights])
    return [piece.view_as(w).to(w.dtype) for piece, w in zip(pieces, weights, strict=True)]
