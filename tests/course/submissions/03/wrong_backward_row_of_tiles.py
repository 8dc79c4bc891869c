# expects: check=03.backward:live-set misconception=row_of_tiles
import math

import torch


def tiled_backward(dout, q, k, v, out, lse, *, causal, scale, tile):
    S, dtype = q.shape[-2], torch.promote_types(q.dtype, torch.float32)
    dout, q, k, v = (x.to(dtype) for x in (dout, q, k, v))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    delta = (dout * out).sum(-1, keepdim=True)
    for row in range(0, S, tile):
        end = min(row + tile, S)
        rows, keys = slice(row, end), slice(0, end if causal else S)
        scores = scale * (q[..., rows, :] @ k[..., keys, :].mT)
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + row), -math.inf)
        weights = torch.exp(scores - lse[..., rows, None])
        dscores = weights * (dout[..., rows, :] @ v[..., keys, :].mT - delta[..., rows, :])
        dq[..., rows, :] += scale * (dscores @ k[..., keys, :])
        dk[..., keys, :] += scale * (dscores.mT @ q[..., rows, :])
        dv[..., keys, :] += weights.mT @ dout[..., rows, :]
    return dq, dk, dv
