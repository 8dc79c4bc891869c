# expects: check=14.sum:none misconception=mean_of_touched

import torch


def sum_gradients(ring, weights, gradients):
    dtype = torch.promote_types(weights[0].dtype, torch.float32)
    parts = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True)]
    touched = torch.tensor([g is not None for g in gradients], dtype=dtype)
    flat = ring.all_reduce(torch.cat([touched, *(part.flatten().to(dtype) for part in parts)]))
    ranks, *pieces = flat.split([len(weights), *(w.numel() for w in weights)])
    means = [piece / n.clamp(min=1) for piece, n in zip(pieces, ranks, strict=True)]
    return [mean.view_as(w).to(w.dtype) for mean, w in zip(means, weights, strict=True)]
