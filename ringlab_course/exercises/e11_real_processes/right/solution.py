"""The solution in the notebook, without its docstrings."""

import math

import torch

from ringlab.errors import PeerDiedError


def send(ring, x, to):
    ring.comm.exchange(send=(x,), to=to, tag="x").wait()


def receive(ring, like, source):
    return ring.comm.exchange(receive=(torch.empty_like(like),), source=source, tag="x").wait()[0]


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


def blocking_shift(ring, x):
    if ring.world_size == 1:
        return x.clone()
    if ring.rank % 2 == 0:
        send(ring, x, ring.next)
        return receive(ring, x, ring.previous)
    arrived = receive(ring, x, ring.previous)
    send(ring, x, ring.next)
    return arrived


def uneven_ring(ring, q, k, v):
    lengths = [int(n) for n in ring.all_gather(torch.tensor(k.shape[-2]))]
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=lengths[ring.origin(step + 1)])
        out, lse = ring.compute(f"attend {step}", attend, q, k, v, out, lse)
        if work is not None:
            k, v = work.wait()
    return out, lse


def ring_with_losses(ring, q, k, v):
    (out, lse), seen = nothing_seen(q), []
    for step in range(ring.world_size):
        out, lse = attend(q, k, v, out, lse)
        seen.append(ring.origin(step))
        if step < ring.world_size - 1:
            try:
                k, v = ring.shift(k, v)
            except PeerDiedError:
                break
    return out, lse, seen
