# expects: check=15.decode:empty misconception=empty_part_counts

import math

import torch


def decode_step(ring, q, k, v):
    dtype = torch.promote_types(q.dtype, torch.float32)
    B, H, _, D = q.shape
    K, L = k.shape[1], k.shape[2]
    if not L:
        out, lse = q.new_zeros(B, H, 1, D, dtype=dtype), q.new_zeros(B, H, 1, dtype=dtype)
    else:
        rows = q.to(dtype).view(B, K, H // K, D)
        scores = rows @ k.to(dtype).mT / math.sqrt(D)
        lse = scores.logsumexp(-1).view(B, H, 1)
        out = (scores.softmax(-1) @ v.to(dtype)).view(B, H, 1, D)
    top = ring.all_reduce(lse, op="max")
    weight = (lse - top).exp()[..., None]
    total = ring.all_reduce(weight)
    return (ring.all_reduce(weight * out) / total).to(q.dtype)
