# expects: check=09.block:grouped misconception=mixes_the_groups
"""Heads tiled on the way in, and summed as if they had been repeated."""

import math

import torch


def block_backward(dout, q, k, v, lse, delta, mask=None):
    scale, group = q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    dout, q, k, v = (x.to(lse.dtype) for x in (dout, q, k, v))
    k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)
    scores = scale * (q @ k.mT)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    safe = lse.masked_fill(lse == -math.inf, math.inf)[..., None]
    weights = torch.exp(scores - safe)
    dscores = weights * (dout @ v.mT - delta[..., None])
    dq, dk, dv = scale * dscores @ k, scale * dscores.mT @ q, weights.mT @ dout
    return dq, dk.unflatten(1, (-1, group)).sum(2), dv.unflatten(1, (-1, group)).sum(2)
