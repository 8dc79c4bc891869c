"""A sound ring, the standard for all patients.

A patient's program has the same text as `forward` or `backward`, except for the lines that patients.md
changes.
"""

from __future__ import annotations

import torch

from ringlab_course.clinic.bedside import attend, block_backward, nothing_seen, sees


def forward(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse)."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse


def backward(ring, dout, q, k, v, out, lse, positions, causal=True):
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
