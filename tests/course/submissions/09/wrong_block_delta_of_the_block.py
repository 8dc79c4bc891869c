# expects: check=09.block:values misconception=delta_of_the_block
"""The softmax backward of the keys that are here."""

import math

import torch


def block_backward(dout, q, k, v, lse, delta, mask=None):
    scale, group = q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    dout, q, k, v = (x.to(lse.dtype) for x in (dout, q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = scale * (q @ k.mT)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    safe = lse.masked_fill(lse == -math.inf, math.inf)[..., None]
    weights = torch.exp(scores - safe)
    dweights = dout @ v.mT
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
    dq, dk, dv = scale * dscores @ k, scale * dscores.mT @ q, weights.mT @ dout
    return dq, dk.unflatten(1, (-1, group)).sum(2), dv.unflatten(1, (-1, group)).sum(2)
