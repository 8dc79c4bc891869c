# expects: check=03.backward:memory misconception=materialises
import math

import torch


def _forward(q, k, v, *, causal, scale, tile):
    S, dtype = q.shape[-2], torch.promote_types(q.dtype, torch.float32)
    done = []
    for row in range(0, S, tile):
        rows = slice(row, min(row + tile, S))
        m = torch.full(q[..., rows, 0].shape, -math.inf, dtype=dtype)
        total, acc = torch.zeros_like(m), torch.zeros(q[..., rows, :].shape, dtype=dtype)
        for key in range(0, row + 1 if causal else S, tile):
            keys = slice(key, min(key + tile, S))
            scores = scale * (q[..., rows, :].to(dtype) @ k[..., keys, :].to(dtype).mT)
            if causal and key == row:
                scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
            top = torch.maximum(m, scores.amax(-1))
            old, powers = torch.exp(m - top), torch.exp(scores - top[..., None])
            total = total * old + powers.sum(-1)
            acc = acc * old[..., None] + powers @ v[..., keys, :].to(dtype)
            m = top
        done.append(acc / total[..., None])
    return torch.cat(done, dim=-2)


def tiled_backward(dout, q, k, v, out, lse, *, causal, scale, tile):
    dtype = torch.promote_types(q.dtype, torch.float32)
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    again = _forward(*leaves, causal=causal, scale=scale, tile=tile)
    return torch.autograd.grad(again, leaves, dout.to(dtype))
