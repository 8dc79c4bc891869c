# expects: check=05.step:first_block misconception=forgets_the_scale
"""No 1/√D."""

import math

import torch


def ring_step(q, k, v, out, lse, mask=None):
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.to(out.dtype) for x in (q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    total = torch.logaddexp(lse, torch.logsumexp(scores, dim=-1))
    safe = total.masked_fill(total == -math.inf, 0.0)[..., None]
    return out * torch.exp(lse[..., None] - safe) + torch.exp(scores - safe) @ v, total
