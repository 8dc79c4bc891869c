"""The sound parts that all patients' programs share: masks, scores, one block's backward, messages.

Exercise 16 shows the same text in its first cell, so that a patient's source runs where it is pasted.
"""

from __future__ import annotations

import math

import torch


def sees(positions, rank, origin, causal=True):
    """True where a query of `rank` sees a key of `origin`, by global positions, (Lq, Lk)."""
    return (positions[rank][:, None] >= positions[origin][None, :]) | (not causal)


def scores_of(q, k, visible):
    """Scaled scores, float32 at least, −inf where a key is not visible."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype) @ k.to(dtype).mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~visible, -math.inf)


def nothing_seen(q):
    """The state (out, lse) of queries that have seen no key yet."""
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    return out, out.new_full(q.shape[:-1], -math.inf)


def attend(q, k, v, visible, out, lse):
    """(out, lse) after this block as well."""
    scores = scores_of(q, k, visible)
    total = torch.logaddexp(lse, torch.logsumexp(scores, dim=-1))
    safe = total.masked_fill(total == -math.inf, 0.0)[..., None]  # −inf − (−inf) would be NaN
    return out * torch.exp(lse[..., None] - safe) + torch.exp(scores - safe) @ v.to(out.dtype), total


def block_backward(dout, q, k, v, lse, delta, visible):
    """What this block adds to (dq, dk, dv), in the dtype of lse; lse and delta are those of whole rows."""
    final = lse.masked_fill(lse == -math.inf, math.inf)
    weights = torch.exp(scores_of(q, k, visible) - final[..., None])
    dout, q, k, v = (x.to(lse.dtype) for x in (dout, q, k, v))
    dscores = weights * (dout @ v.mT - delta[..., None]) * q.shape[-1] ** -0.5
    return dscores @ k, dscores.mT @ q, weights.mT @ dout


def send(ring, x):
    """Send x to the next rank; return once it has received it."""
    ring.comm.exchange(send=(x,), to=ring.next, tag="kv").wait()


def receive(ring, like, length):
    """Return what the previous rank sends: `length` tokens, otherwise as `like`."""
    room = like.new_empty((*like.shape[:-2], length, like.shape[-1]))
    return ring.comm.exchange(receive=(room,), source=ring.previous, tag="kv").wait()[0]
