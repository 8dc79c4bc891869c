# expects: check=15.decode:large misconception=underflows

import math

import torch


def decode_step(ring, q, k, v):
    dtype = torch.promote_types(q.dtype, torch.float32)
    B, H, _, D = q.shape
    K, L = k.shape[1], k.shape[2]
    rows = q.to(dtype).view(B, K, H // K, D)  # query heads that share a K/V head, side by side
    scores = rows @ k.to(dtype).mT / math.sqrt(D)
    own = scores.amax(-1, keepdim=True) if L else scores.new_zeros((B, K, H // K, 1))
    weights = (scores - ring.all_reduce(own, op="max")).exp()
    sums = torch.cat([weights @ v.to(dtype), weights.sum(-1, keepdim=True)], dim=-1)
    sums = ring.all_reduce(sums)
    return (sums[..., :-1] / sums[..., -1:]).view(B, H, 1, D).to(q.dtype)
