# expects: check=15.decode:bytes misconception=gathers_the_cache

import math

import torch


def decode_step(ring, q, k, v):
    dtype = torch.promote_types(q.dtype, torch.float32)
    lengths = [int(n) for n in ring.all_gather(torch.tensor([k.shape[2]]))]
    B, K, _, D = k.shape
    shapes = [(B, K, n, D) for n in lengths]
    k, v = (torch.cat(ring.all_gather(x, shapes), dim=2).to(dtype) for x in (k, v))
    rows = q.to(dtype).view(B, K, -1, D)
    scores = rows @ k.mT / math.sqrt(D)
    return (scores.softmax(-1) @ v).view(q.shape).to(q.dtype)
