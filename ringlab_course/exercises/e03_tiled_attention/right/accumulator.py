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
            scores = scale * (q[..., rows, :].to(dtype) @ k[..., keys, :].to(dtype).mT)
            if causal and key == row:
                scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
            top = torch.maximum(m, scores.amax(-1))
            old, powers = torch.exp(m - top), torch.exp(scores - top[..., None])
            total = total * old + powers.sum(-1)
            acc = acc * old[..., None] + powers @ v[..., keys, :].to(dtype)
            m = top
        out[..., rows, :], lse[..., rows] = acc / total[..., None], m + torch.log(total)
    return out, lse


def tiled_backward(dout, q, k, v, out, lse, *, causal, scale, tile):
    S, dtype = q.shape[-2], torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
    delta = (dout.to(dtype) * out).sum(-1, keepdim=True)
    for row in range(0, S, tile):
        rows = slice(row, min(row + tile, S))
        q_tile, dout_tile = q[..., rows, :].to(dtype), dout[..., rows, :].to(dtype)
        for key in range(0, row + 1 if causal else S, tile):
            keys = slice(key, min(key + tile, S))
            k_tile, v_tile = k[..., keys, :].to(dtype), v[..., keys, :].to(dtype)
            scores = scale * (q_tile @ k_tile.mT)
            if causal and key == row:
                scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
            weights = torch.exp(scores - lse[..., rows, None])
            dweights = dout_tile @ v_tile.mT
            dscores = weights * (dweights - delta[..., rows, :])
            dq[..., rows, :] += scale * (dscores @ k_tile)
            dk[..., keys, :] += scale * (dscores.mT @ q_tile)
            dv[..., keys, :] += weights.mT @ dout_tile
    return dq, dk, dv
