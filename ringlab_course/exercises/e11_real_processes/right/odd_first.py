"""Odd ranks send first; lengths go ahead of their block, one hop at a time; the block in hand is merged after the error."""

import math

import torch

from ringlab.errors import PeerDiedError


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


def send(ring, x, to):
    ring.comm.exchange(send=(x,), to=to, tag="x").wait()


def receive(ring, like, source):
    return ring.comm.exchange(receive=(torch.empty_like(like),), source=source, tag="x").wait()[0]


def blocking_shift(ring, x):
    if ring.world_size == 1:
        return x.clone()
    sends_first = ring.rank % 2 == 1
    if sends_first:
        send(ring, x, ring.next)
    arrived = receive(ring, x, ring.previous)
    if not sends_first:
        send(ring, x, ring.next)
    return arrived


def uneven_ring(ring, q, k, v):
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        work = None
        if step < ring.world_size - 1:
            coming = ring.shift(torch.tensor([k.shape[-2]]), tag="length").item()
            work = ring.post(k, v, length=coming)
        out, lse = ring.compute(f"block {step}", attend, q, k, v, out, lse)
        if work:
            k, v = work.wait()
    return out, lse


def ring_with_losses(ring, q, k, v):
    (out, lse), seen = nothing_seen(q), []
    for step in range(ring.world_size):
        alive, here = True, (k, v)
        if step < ring.world_size - 1:
            try:
                k, v = ring.shift(k, v)
            except PeerDiedError:
                alive = False
        out, lse = attend(q, *here, out, lse)
        seen.append(ring.origin(step))
        if not alive:
            break
    return out, lse, tuple(seen)
