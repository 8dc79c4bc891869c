# expects: check=03.forward:memory misconception=materialises
import math

import torch


def tiled_forward(q, k, v, *, causal, scale, tile):
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    S = q.shape[-2]
    scores = scale * (q @ k.mT)
    if causal:
        scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
    return torch.softmax(scores, dim=-1) @ v, scores.logsumexp(-1)
