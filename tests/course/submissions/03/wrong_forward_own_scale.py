# expects: check=03.forward:values misconception=own_scale
import math

import torch


def tiled_forward(q, k, v, *, causal, scale, tile):
    S, dtype = q.shape[-2], torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=dtype)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=dtype)
    for row in range(0, S, tile):
        rows = slice(row, min(row + tile, S))
        m = torch.full_like(lse[..., rows], -math.inf)
        total, acc = torch.zeros_like(m), torch.zeros_like(out[..., rows, :])
        for key in range(0, row + 1 if causal else S, tile):
            keys = slice(key, min(key + tile, S))
            scores = q.shape[-1] ** -0.5 * (q[..., rows, :].to(dtype) @ k[..., keys, :].to(dtype).mT)
            if causal and key == row:
                scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
            top = torch.maximum(m, scores.amax(-1))
            old, powers = torch.exp(m - top), torch.exp(scores - top[..., None])
            total = total * old + powers.sum(-1)
            acc = acc * old[..., None] + powers @ v[..., keys, :].to(dtype)
            m = top
        out[..., rows, :], lse[..., rows] = acc / total[..., None], m + torch.log(total)
    return out, lse
