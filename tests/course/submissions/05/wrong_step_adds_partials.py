# expects: check=05.step:merge misconception=adds_partials
"""The sum of the two outputs."""

import math

import torch


def ring_step(q, k, v, out, lse, mask=None):
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.to(out.dtype) for x in (q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    here = torch.logsumexp(scores, dim=-1)
    block = torch.exp(scores - here[..., None]).nan_to_num() @ v
    total = torch.logaddexp(lse, here)
    return out + block, total
