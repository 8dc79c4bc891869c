# expects: check=15.decode:bytes misconception=gathers_the_scores

import math

import torch


def decode_step(ring, q, k, v):
    dtype = torch.promote_types(q.dtype, torch.float32)
    lengths = [int(n) for n in ring.all_gather(torch.tensor([k.shape[2]]))]
    B, K, _, D = k.shape
    rows = q.to(dtype).view(B, K, -1, D)
    scores = rows @ k.to(dtype).mT / math.sqrt(D)
    every = ring.all_gather(scores, [(*scores.shape[:-1], n) for n in lengths])
    weights = torch.cat(every, dim=-1).softmax(-1).split(lengths, dim=-1)[ring.rank]
    return ring.all_reduce(weights @ v.to(dtype)).view(q.shape).to(q.dtype)
