"""A whole ring attention in one file, forward and backward, over ringlab's Ring: an example of a target.

`ringlab check ringlab.conformance.plain_ring:attend` passes. Its text, changed in one to four places, gives the wrong
rings of `ringlab.conformance.mutants`. It is written to be read: the ring of ringlab itself is faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ringlab.comm.ring import Ring


@dataclass(frozen=True)
class Call:
    """What stays the same while the blocks pass by. `positions`: global positions of each rank's tokens."""

    ring: Ring
    positions: list[Tensor]
    causal: bool
    scale: float

    def length(self, step: int) -> int:
        """Return the tokens of the block that is here after `step` hops."""
        return len(self.positions[self.ring.origin(step)])

    def tiles(self, step: int) -> list[tuple[slice, slice, Tensor | None]]:
        """Return rows, keys and what of them is hidden, for what is visible of the block of `step`."""
        mine, theirs = self.positions[self.ring.rank], self.positions[self.ring.origin(step)]
        found: list[tuple[slice, slice, Tensor | None]] = []
        for rows in runs(mine):
            for keys in runs(theirs):
                if not self.causal:
                    found.append((rows, keys, None))
                elif mine[rows].max() >= theirs[keys].min():
                    found.append((rows, keys, theirs[keys] > mine[rows, None]))
        return found


def attend(
    ring: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    positions: list[Tensor],
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return this rank's (out, lse); q, k and v are its shards, (B, H, L, D) and (B, K, L, D)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = _Attention.apply(q, k, v, Call(ring, positions, causal, scale))
    return out, lse


def runs(positions: Tensor) -> list[slice]:
    """Return slices of equal steps: such a run is all before, all after, or across the diagonal of another."""
    if len(positions) < 2:
        return [slice(0, len(positions))] if len(positions) else []
    steps = positions.diff()
    breaks = [0, *(torch.nonzero(steps != steps[0]).flatten() + 1).tolist(), len(positions)]
    return [slice(a, b) for a, b in pairwise(breaks) if b > a]


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) in the state's dtype: P blocks, P − 1 hops."""
    ring = call.ring
    out = torch.zeros(q.shape, dtype=state(q.dtype), device=q.device)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=out.dtype, device=q.device)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=call.length(step + 1), tag="kv")
        for rows, keys, hidden in call.tiles(step):
            tile_out, tile_lse = tile(call, q[:, :, rows], k[:, :, keys], v[:, :, keys], hidden)
            merged = merge(out[:, :, rows], lse[:, :, rows], tile_out, tile_lse)
            out[:, :, rows], lse[:, :, rows] = merged
        if work is not None:
            k, v = work.wait()
    return out, lse


def tile(call: Call, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of some rows over some keys; rows that see none of them have 0 and −inf."""
    scores = scores_of(call, q, k, hidden)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - safe(lse)[..., None])
    return weights @ repeated(v, q.shape[1]).to(scores.dtype), lse


def scores_of(call: Call, q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    """Return the scores in the state's dtype, −inf where hidden."""
    dtype = state(q.dtype)
    scores = call.scale * (q.to(dtype) @ repeated(k, q.shape[1]).to(dtype).mT)
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def merge(out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the partial result over the keys of both."""
    total = torch.logaddexp(lse, new_lse)
    kept, added = torch.exp(lse - safe(total)), torch.exp(new_lse - safe(total))
    return out * kept[..., None] + new * added[..., None], total


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) in the state's dtype: dk and dv travel with their block, P hops, and come home."""
    ring = call.ring
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    courier = None
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=call.length(step + 1), tag="kv")
        dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
        for rows, keys, hidden in call.tiles(step):
            of_rows = q[:, :, rows], lse[:, :, rows], delta[:, :, rows], dout[:, :, rows]
            parts = tile_backward(call, *of_rows, k[:, :, keys], v[:, :, keys], hidden)
            dq[:, :, rows] += parts[0]
            dk[:, :, keys] += parts[1]
            dv[:, :, keys] += parts[2]
        if courier is not None:
            arrived_dk, arrived_dv = courier.wait()
            dk, dv = dk + arrived_dk, dv + arrived_dv
        if ring.world_size > 1:
            courier = ring.post(dk, dv, length=call.length(step + 1), tag="dkv")
        if work is not None:
            k, v = work.wait()
    if courier is not None:
        dk, dv = courier.wait()
    return dq, dk, dv


def tile_backward(
    call: Call,
    q: Tensor,
    lse: Tensor,
    delta: Tensor,
    dout: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what some rows and some keys add to (dq, dk, dv); lse and delta are those over all keys."""
    dtype, heads = lse.dtype, k.shape[1]
    weights = torch.exp(scores_of(call, q, k, hidden) - safe(lse)[..., None])
    dweights = dout.to(dtype) @ repeated(v, q.shape[1]).to(dtype).mT
    dscores = weights * (dweights - delta[..., None])
    dq = call.scale * (dscores @ repeated(k, q.shape[1]).to(dtype))
    dk = call.scale * (dscores.mT @ q.to(dtype))
    dv = weights.mT @ dout.to(dtype)
    return dq, shared(dk, heads), shared(dv, heads)


def safe(lse: Tensor) -> Tensor:
    """Return lse with 0 for −inf: −inf − (−inf) would be NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def state(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of everything that is summed over blocks: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def repeated(kv: Tensor, heads: int) -> Tensor:
    """Return keys or values once for each query head: head h reads h // group.

    The bounds have the same line once more: what is judged shares no code with what judges it.
    """
    return kv.repeat_interleave(heads // kv.shape[1], dim=1)


def shared(gradient: Tensor, heads: int) -> Tensor:
    """Return the gradient of each key/value head, summed over the query heads that read it."""
    return gradient.unflatten(1, (heads, -1)).sum(2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = forward(call, q.detach(), k.detach(), v.detach())
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = backward(ctx.call, q, k, v, out, lse, dout)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None
