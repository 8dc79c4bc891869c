# expects: check=11.lost:other_errors misconception=swallows_a_mismatch
"""Whatever the exchange raises is taken for a death."""

import math

import torch


def nothing_seen(q):
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    return out, out.new_full(q.shape[:-1], -math.inf)


def attend(q, k, v, out, lse):
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(out.dtype).repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.to(out.dtype) @ k.mT / math.sqrt(q.shape[-1])
    total = torch.logaddexp(lse, torch.logsumexp(scores, dim=-1))
    safe = total.masked_fill(total == -math.inf, 0.0)[..., None]
    return out * torch.exp(lse[..., None] - safe) + torch.exp(scores - safe) @ v, total


def ring_with_losses(ring, q, k, v):
    (out, lse), seen = nothing_seen(q), []
    for step in range(ring.world_size):
        out, lse = attend(q, k, v, out, lse)
        seen.append(ring.origin(step))
        if step < ring.world_size - 1:
            try:
                k, v = ring.shift(k, v)
            except Exception:
                break
    return out, lse, seen
