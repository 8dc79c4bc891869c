# expects: check=05.forward:sloped misconception=overflowing_ring
"""Sums of raw exponentials."""

import math

import torch


def nothing_yet(q):
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    return out, out.new_full(q.shape[:-1], -math.inf)


def ring_forward(ring, q, k, v):
    group = q.shape[1] // k.shape[1]
    out, total = nothing_yet(q)[0], 0.0
    for step in range(ring.world_size):
        keys, values = (x.to(out.dtype).repeat_interleave(group, dim=1) for x in (k, v))
        weights = torch.exp(q.to(out.dtype) @ keys.mT / math.sqrt(q.shape[-1]))
        out, total = out + weights @ values, total + weights.sum(-1)
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v)
    return out / total[..., None], torch.log(total)
