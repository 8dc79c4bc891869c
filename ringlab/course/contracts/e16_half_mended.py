"""Half-mended patients: what comes out if one cures the symptom. Checks of exercise 16 imitate them to name the mistake.

tests/course/submissions/16 hands each of them in.
"""

from __future__ import annotations

import math

import torch

from ringlab.course.clinic.bedside import attend, block_backward, nothing_seen, receive, scores_of, sees, send


def ash(ring, q, k, v, positions, causal=True):
    """−10,000 in place of −∞: no NaN, and wrong where true scores are lower."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        if visible.any():
            scores = scores_of(q, k, visible).masked_fill(~visible, -1e4)
            block_lse = torch.logsumexp(scores, -1)
            merged = torch.logaddexp(lse, block_lse)
            out = out * torch.exp(lse - merged)[..., None] + torch.exp(scores - merged[..., None]) @ v.to(
                out.dtype
            )
            lse = merged
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse


def birch(ring, q, k, v, positions, causal=True):
    """The old sum is back, but it is no longer measured against the new maximum."""
    out, top = nothing_seen(q)
    total = torch.zeros_like(top)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        if k.shape[-2]:
            scores = scores_of(q, k, sees(positions, ring.rank, ring.origin(step), causal))
            new_top = torch.maximum(top, scores.amax(-1))
            safe = new_top.masked_fill(new_top == -math.inf, 0.0)
            weights = torch.exp(scores - safe[..., None])
            out = out * total[..., None] + weights @ v.to(out.dtype)
            total = total + weights.sum(-1)
            out = out / total.masked_fill(total == 0, 1.0)[..., None]
            top = new_top
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), top + total.log()


def cedar(ring, q, k, v, positions, causal=True):
    """Positions as the striped layout has them, whatever the layout."""
    P = ring.world_size
    positions = [torch.arange(len(own)) * P + rank for rank, own in enumerate(positions)]
    out, lse = nothing_seen(q)
    for step in range(P):
        work = None if step == P - 1 else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse


def elm(ring, q, k, v, positions, causal=True):
    """One turn fewer of the whole loop: the last block is not attended to."""
    out, lse = nothing_seen(q)
    for step in range(max(1, ring.world_size - 1)):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if ring.world_size > 1:
            k, v = ring.shift(k, v, length=len(positions[ring.origin(step + 1)]))
    return out.to(q.dtype), lse


def fir(ring, q, k, v, positions, causal=True):
    """Even ranks expect V first: right while all neighbours are odd."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if step == ring.world_size - 1:
            break
        length = len(positions[ring.origin(step + 1)])
        if ring.rank % 2 == 0:
            send(ring, k)
            send(ring, v)
            next_v = receive(ring, v, length)
            k, v = receive(ring, k, length), next_v
        else:
            next_k, next_v = receive(ring, k, length), receive(ring, v, length)
            send(ring, v)
            send(ring, k)
            k, v = next_k, next_v
    return out.to(q.dtype), lse


def hazel(ring, dout, q, k, v, out, lse, positions, causal=True):
    """With the blocks, and as far as the blocks: everything ends on the neighbour."""
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        if step < P - 1:
            length = len(positions[ring.origin(step + 1)])
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
            k, v = ring.shift(k, v, length=length, tag="kv")
    return dq, dk, dv


def larch(ring, dout, q, k, v, out, lse, positions, causal=True):
    """A sum of its own, but float32 whatever comes in."""
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (k, v))
    dq = torch.zeros(q.shape, dtype=torch.float32)
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq += part[0].float()
        dk, dv = dk + part[1], dv + part[2]
        length = len(positions[ring.origin(step + 1)])
        if P > 1:
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
        if step < P - 1:
            k, v = ring.shift(k, v, length=length, tag="kv")
    return dq, dk, dv


def oak(ring, dout, q, k, v, out, lse, positions, causal=True):
    """What arrives is used, one step too late."""
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    block = k, v
    for step in range(P):
        length = len(positions[ring.origin(step + 1)])
        work = ring.post(*block, length=length, tag="kv") if step < P - 1 else None
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        if P > 1:
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
        if work is not None:
            k, v = block
            block = work.wait()
    return dq, dk, dv
