# expects: check=15.decode:empty misconception=empty_is_not_a_number

import math

import torch


def decode_step(ring, q, k, v):
    dtype = torch.promote_types(q.dtype, torch.float32)
    B, H, _, D = q.shape
    K, L = k.shape[1], k.shape[2]
    rows = q.to(dtype).view(B, K, H // K, D)
    scores = rows @ k.to(dtype).mT / math.sqrt(D)
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True)
    lse = total.log().view(B, H, 1)
    out = (weights @ v.to(dtype) / total).view(B, H, 1, D)
    top = ring.all_reduce(lse, op="max")
    weight = (lse - top).exp()[..., None]
    total = ring.all_reduce(weight)
    return (ring.all_reduce(weight * out) / total).to(q.dtype)
