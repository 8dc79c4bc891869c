# expects: check=14.sum:none misconception=leaves_out_none

import torch


def sum_gradients(ring, weights, gradients):
    dtype = torch.promote_types(weights[0].dtype, torch.float32)
    here = [n for n, g in enumerate(gradients) if g is not None]
    flat = ring.all_reduce(torch.cat([gradients[n].flatten().to(dtype) for n in here]))
    pieces = dict(zip(here, flat.split([weights[n].numel() for n in here]), strict=True))
    return [pieces.get(n, torch.zeros_like(w)).view_as(w).to(w.dtype) for n, w in enumerate(weights)]
