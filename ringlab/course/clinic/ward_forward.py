"""Patients whose forward is wrong. Do not mend them: the clinic of lesson 16 lives on what they have."""

from __future__ import annotations

import math

import torch

from ringlab.course.clinic.bedside import attend, nothing_seen, receive, scores_of, sees, send


def ash(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse): the softmax of each block, merged by lse; hidden blocks are skipped."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        if visible.any():
            scores = scores_of(q, k, visible)
            top = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True)
            block_lse = (top + total.log())[..., 0]
            merged = torch.logaddexp(lse, block_lse)
            old, new = torch.exp(lse - merged)[..., None], torch.exp(block_lse - merged)[..., None]
            out, lse = out * old + weights @ v.to(out.dtype) / total * new, merged
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse


def birch(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse): running maximum, running sum, and out normalised after every block."""
    out, top = nothing_seen(q)
    total = torch.zeros_like(top)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        if k.shape[-2]:
            scores = scores_of(q, k, sees(positions, ring.rank, ring.origin(step), causal))
            new_top = torch.maximum(top, scores.amax(-1))
            safe = new_top.masked_fill(new_top == -math.inf, 0.0)
            kept, weights = torch.exp(top - safe), torch.exp(scores - safe[..., None])
            total = total * kept + weights.sum(-1)
            out = out * kept[..., None] + weights @ v.to(out.dtype)
            out = out / total.masked_fill(total == 0, 1.0)[..., None]
            top = new_top
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), top + total.log()


def cedar(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse): own block triangular, blocks of earlier ranks full, later ones skipped."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last, origin = step == ring.world_size - 1, ring.origin(step)
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
        if causal and origin == ring.rank:
            visible = visible.tril()
        if origin <= ring.rank or not causal:
            out, lse = attend(q, k, v, visible, out, lse)
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse


def elm(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse): attend, shift, attend, shift."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if ring.world_size > 1:
            k, v = ring.shift(k, v, length=len(positions[ring.origin(step + 1)]))
    return out.to(q.dtype), lse


def fir(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse): even ranks send first, odd ranks receive first, so that nobody deadlocks."""
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
            send(ring, v)
            send(ring, k)
            k, v = next_k, next_v
    return out.to(q.dtype), lse


def yew(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse): every rank sends its block, then receives the next one."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if step < ring.world_size - 1:
            length = len(positions[ring.origin(step + 1)])
            send(ring, k)
            send(ring, v)
            k, v = receive(ring, k, length), receive(ring, v, length)
    return out.to(q.dtype), lse
