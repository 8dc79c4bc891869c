"""Patients whose backward is wrong. Do not mend them: the clinic of lesson 16 lives on what they have."""

from __future__ import annotations

import torch

from ringlab.course.clinic.bedside import block_backward, sees


def hazel(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv): blocks go forward; gradients go back to where they came from."""
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        length = len(positions[ring.origin(step + 1)])
        if P > 1:
            room = tuple(x.new_empty((*x.shape[:-2], length, x.shape[-1])) for x in (dk, dv))
            back = ring.comm.exchange(
                send=(dk, dv), to=ring.previous, receive=room, source=ring.next, tag="dkv"
            )
            dk, dv = back.wait()
        if step < P - 1:
            k, v = ring.shift(k, v, length=length, tag="kv")
    return dq, dk, dv


def larch(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv): each block's dq goes into one scratch tensor, as a kernel writes it."""
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (k, v))
    scratch, dq = torch.empty_like(q), None
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        scratch.copy_(part[0])
        if dq is None:
            dq = scratch.to(lse.dtype)
        else:
            dq += scratch.to(lse.dtype)
        dk, dv = dk + part[1], dv + part[2]
        length = len(positions[ring.origin(step + 1)])
        if P > 1:
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
        if step < P - 1:
            k, v = ring.shift(k, v, length=length, tag="kv")
    return dq, dk, dv


def oak(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv): the next block is under way while this one is computed."""
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
            block = work.wait()
    return dq, dk, dv


def rowan(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv): blocks and their gradients travel together."""

    def passed(*tensors, length, tag):
        """Return what arrived, and behind it what was sent."""
        return *ring.post(*tensors, length=length, tag=tag).wait(), *tensors

    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        length = len(positions[ring.origin(step + 1)])
        if P > 1:
            dk, _, _, dv = passed(dk, dv, length=length, tag="dkv")
        if step < P - 1:
            k, v, _, _ = passed(k, v, length=length, tag="kv")
    return dq, dk, dv


def willow(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv): sums in the state's dtype, dq handed back as the kernel writes it."""
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
    return dq.to(torch.bfloat16), dk, dv
