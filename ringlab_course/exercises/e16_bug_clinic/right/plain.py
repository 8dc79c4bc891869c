"""The charts and the smallest change to each patient."""

import math

import torch

from ringlab_course.clinic.bedside import attend, block_backward, nothing_seen, receive, scores_of, sees, send


CHARTS = {
    "ash": {"fault": "blind rows", "check": "blind rows", "case": {"ranks": 2, "tokens": 2, "layout": "striped"}, "matters": ["layout", "causal"]},
    "birch": {"fault": "lost sum", "check": "forward", "case": {"ranks": 3, "tokens": 1}, "matters": []},
    "cedar": {"fault": "masks by rank", "check": "masks", "case": {"ranks": 2, "tokens": 2, "layout": "striped"}, "matters": ["layout", "causal"]},
    "elm": {"fault": "one hop too many", "check": "bytes", "case": {"ranks": 2, "tokens": 1}, "matters": []},
    "fir": {"fault": "keys as values", "check": "forward", "case": {"ranks": 2, "tokens": 1, "causal": False}, "matters": ["causal"]},
    "hazel": {"fault": "couriers backwards", "check": "dk", "case": {"ranks": 3, "tokens": 1}, "matters": []},
    "larch": {"fault": "shared memory", "check": "dq", "case": {"ranks": 2, "tokens": 1}, "matters": ["dtype"]},
    "oak": {"fault": "first block", "check": "dq", "case": {"ranks": 2, "tokens": 1}, "matters": []},
}


def chart(patient):
    return CHARTS.get(patient)


def ash(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse)."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        if visible.any():
            scores = scores_of(q, k, visible)
            top = scores.amax(-1, keepdim=True)
            top = top.masked_fill(top == -math.inf, 0.0)  # a row that sees no key here: e^(−∞ − 0) is 0
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True)
            block_lse = (top + total.log())[..., 0]
            merged = torch.logaddexp(lse, block_lse)
            safe = merged.masked_fill(merged == -math.inf, 0.0)
            old, new = torch.exp(lse - safe)[..., None], torch.exp(block_lse - safe)[..., None]
            block_out = weights @ v.to(out.dtype) / total.masked_fill(total == 0, 1.0)
            out, lse = out * old + block_out * new, merged
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse


def birch(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse)."""
    out, top = nothing_seen(q)
    total = torch.zeros_like(top)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        if k.shape[-2]:
            scores = scores_of(q, k, sees(positions, ring.rank, ring.origin(step), causal))
            new_top = torch.maximum(top, scores.amax(-1))
            safe = new_top.masked_fill(new_top == -math.inf, 0.0)
            kept, weights = total * torch.exp(top - safe), torch.exp(scores - safe[..., None])
            total = kept + weights.sum(-1)
            out = out * kept[..., None] + weights @ v.to(out.dtype)
            out = out / total.masked_fill(total == 0, 1.0)[..., None]
            top = new_top
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), top + total.log()


def cedar(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse)."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        if visible.any():
            out, lse = attend(q, k, v, visible, out, lse)
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse


def elm(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse)."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v, length=len(positions[ring.origin(step + 1)]))
    return out.to(q.dtype), lse


def fir(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse)."""
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
            k, v = receive(ring, k, length), receive(ring, v, length)
        else:
            next_k, next_v = receive(ring, k, length), receive(ring, v, length)
            send(ring, k)
            send(ring, v)
            k, v = next_k, next_v
    return out.to(q.dtype), lse


def hazel(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv)."""
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        length = len(positions[ring.origin(step + 1)])
        if P > 1:
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
        if step < P - 1:
            k, v = ring.shift(k, v, length=length, tag="kv")
    return dq, dk, dv


def larch(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv)."""
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    scratch = torch.empty_like(q)
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        scratch.copy_(part[0])
        dq += scratch.to(lse.dtype)
        dk, dv = dk + part[1], dv + part[2]
        length = len(positions[ring.origin(step + 1)])
        if P > 1:
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
        if step < P - 1:
            k, v = ring.shift(k, v, length=length, tag="kv")
    return dq, dk, dv


def oak(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv)."""
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for step in range(P):
        length = len(positions[ring.origin(step + 1)])
        work = ring.post(k, v, length=length, tag="kv") if step < P - 1 else None
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        if P > 1:
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
        if work is not None:
            k, v = work.wait()
    return dq, dk, dv
