# expects: check=05.step:large misconception=overflows
"""exp of raw scores."""

import math

import torch


def ring_step(q, k, v, out, lse, mask=None):
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.to(out.dtype) for x in (q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = torch.exp(scores)
    before, here = torch.exp(lse), weights.sum(-1)
    total = before + here
    safe = total.masked_fill(total == 0, 1.0)[..., None]
    return (before[..., None] * out + weights @ v) / safe, torch.log(total)
