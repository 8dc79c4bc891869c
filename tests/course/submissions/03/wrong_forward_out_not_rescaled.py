# expects: check=03.forward:values misconception=out_not_rescaled
import math

import torch


def tiled_forward(q, k, v, *, causal, scale, tile):
    S, dtype = q.shape[-2], torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=dtype)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=dtype)
    for row in range(0, S, tile):
        rows = slice(row, min(row + tile, S))
        for key in range(0, row + 1 if causal else S, tile):
            keys = slice(key, min(key + tile, S))
            scores = scale * (q[..., rows, :].to(dtype) @ k[..., keys, :].to(dtype).mT)
            if causal and key == row:
                scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
            total = torch.logaddexp(lse[..., rows], scores.logsumexp(-1))
            out[..., rows, :] += torch.exp(scores - total[..., None]) @ v[..., keys, :].to(dtype)
            lse[..., rows] = total
    return out, lse
