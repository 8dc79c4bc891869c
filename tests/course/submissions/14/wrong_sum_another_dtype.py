# expects: check=14.sum:bfloat16 misconception=another_dtype

import torch


def sum_gradients(ring, weights, gradients):
    dtype = torch.promote_types(weights[0].dtype, torch.float32)
    parts = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True)]
    flat = ring.all_reduce(torch.cat([part.flatten().to(dtype) for part in parts]))
    pieces = flat.split([w.numel() for w in weights])
    return [piece.view_as(w) for piece, w in zip(pieces, weights, strict=True)]
