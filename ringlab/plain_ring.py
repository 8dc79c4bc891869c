"""Ring attention in one file, forward and backward. Read it first, from top to bottom.

Each of P ranks owns some tokens of a long sequence: their queries, keys and values. Queries stay on their
rank. Blocks of keys and values travel around the ring, one hop per step, so every query meets every key and
no rank holds all of them. `ringlab.attention` is the same algorithm, faster; `ringlab.conformance` tests
both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringlab.comm.ring import Ring
from ringlab.types import KeyValue, Query, RowState

Hidden: TypeAlias = Bool[Tensor, "Lq Lk"] | None  # True where a row may not see a key; None hides no key


def attend(
    ring: Ring,
    q: Query,
    k: KeyValue,
    v: KeyValue,
    *,
    causal: bool,
    positions: list[Int[Tensor, " _"]],
    scale: float | None = None,
) -> tuple[Query, RowState]:
    """Return this rank's (out, lse) over all keys. positions: those of each rank's tokens, in its order."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = _Attention.apply(q, k, v, Call(ring, positions, causal, scale))
    return out, lse


class _Attention(torch.autograd.Function):
    """Saves out and lse, but not the weights: backward computes them again, as e^(score − lse)."""

    @staticmethod
    def forward(ctx: Any, q: Query, k: KeyValue, v: KeyValue, call: Call) -> tuple[Query, RowState]:
        with torch.autocast(q.device.type, enabled=False):  # it would round products of float32 tensors
            out, lse = forward(call, q.detach(), k.detach(), v.detach())
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable  # autograd would record this, but not the messages, and second derivatives would be wrong
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = backward(ctx.call, q, k, v, out, lse, dout)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def forward(call: Call, q: Query, k: KeyValue, v: KeyValue) -> tuple[Query, RowState]:
    """Return (out, lse) after P steps and P − 1 hops. After the last step no rank needs another block."""
    ring = call.ring
    out = torch.zeros(q.shape, dtype=state_dtype(q.dtype), device=q.device)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=out.dtype, device=q.device)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        kv_work = None if last else ring.post(k, v, length=call.length(step + 1), tag="kv")
        for rows, keys, hidden in call.tiles(step):
            tile_out, tile_lse = tile_forward(call, q[:, :, rows], k[:, :, keys], v[:, :, keys], hidden)
            out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], tile_out, tile_lse)
        # The next block was posted before the tiles were computed: it travelled meanwhile.
        if kv_work is not None:
            k, v = kv_work.wait()
    return out, lse


def tile_forward(call: Call, q: Query, k: KeyValue, v: KeyValue, hidden: Hidden) -> tuple[Query, RowState]:
    """Return (out, lse) of some rows over some keys. Rows that see none of these keys get 0 and −inf."""
    scores = tile_scores(call, q, k, hidden)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - safe(lse)[..., None])
    return weights @ expand_heads(v, q.shape[1]).to(scores.dtype), lse


def tile_scores(call: Call, q: Query, k: KeyValue, hidden: Hidden) -> Float[Tensor, "B H Lq Lk"]:
    """Return the scaled scores, −inf where hidden."""
    dtype = state_dtype(q.dtype)
    scores = call.scale * (q.to(dtype) @ expand_heads(k, q.shape[1]).to(dtype).mT)
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def merge(out: Query, lse: RowState, new: Query, new_lse: RowState) -> tuple[Query, RowState]:
    """Return (out, lse) over the keys of both partial results."""
    # Each out was divided by its own sum of e^score, whose log is lse. e^(lse − total) is this sum's share of
    # the sum over all these keys. With these shares as weights, the outs add up to exactly one softmax.
    total = torch.logaddexp(lse, new_lse)
    kept, added = torch.exp(lse - safe(total)), torch.exp(new_lse - safe(total))
    return out * kept[..., None] + new * added[..., None], total


def backward(
    call: Call, q: Query, k: KeyValue, v: KeyValue, out: Query, lse: RowState, dout: Query
) -> tuple[Query, KeyValue, KeyValue]:
    """Return (dq, dk, dv). Keys and values travel again, with their dk and dv: each rank adds its part."""
    ring = call.ring
    # dscore = weight · (dweight − delta), where delta = Σ weight · dweight over all keys = dout · out.
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    dkv_work = None
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        kv_work = None if last else ring.post(k, v, length=call.length(step + 1), tag="kv")
        dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
        for rows, keys, hidden in call.tiles(step):
            of_rows = q[:, :, rows], lse[:, :, rows], delta[:, :, rows], dout[:, :, rows]
            parts = tile_backward(call, *of_rows, k[:, :, keys], v[:, :, keys], hidden)
            dq[:, :, rows] += parts[0]
            dk[:, :, keys] += parts[1]
            dv[:, :, keys] += parts[2]
        if dkv_work is not None:
            arrived_dk, arrived_dv = dkv_work.wait()
            dk, dv = dk + arrived_dk, dv + arrived_dv
        # After the last step the block is one hop from its owner. The gradients make that hop too: P in all,
        # against P − 1 for K and V.
        if ring.world_size > 1:
            dkv_work = ring.post(dk, dv, length=call.length(step + 1), tag="dkv")
        if kv_work is not None:
            k, v = kv_work.wait()
    if dkv_work is not None:
        dk, dv = dkv_work.wait()
    return dq, dk, dv


def tile_backward(
    call: Call, q: Query, lse: RowState, delta: RowState, dout: Query, k: KeyValue, v: KeyValue, hidden: Hidden
) -> tuple[Query, KeyValue, KeyValue]:  # fmt: skip
    """Return the contribution of some rows and keys to (dq, dk, dv). lse and delta are sums over all keys."""
    dtype, heads = lse.dtype, k.shape[1]
    weights = torch.exp(tile_scores(call, q, k, hidden) - safe(lse)[..., None])
    dweights = dout.to(dtype) @ expand_heads(v, q.shape[1]).to(dtype).mT
    dscores = weights * (dweights - delta[..., None])
    dq = call.scale * (dscores @ expand_heads(k, q.shape[1]).to(dtype))
    dk = call.scale * (dscores.mT @ q.to(dtype))
    dv = weights.mT @ dout.to(dtype)
    return dq, sum_heads(dk, heads), sum_heads(dv, heads)


@dataclass(frozen=True)
class Call:
    """The arguments of a call, which stay the same while blocks travel."""

    ring: Ring
    positions: list[Int[Tensor, " _"]]
    causal: bool
    scale: float

    def length(self, step: int) -> int:
        """Return the number of tokens of the block that this rank holds after `step` hops."""
        return len(self.positions[self.ring.origin(step)])

    def tiles(self, step: int) -> list[tuple[slice, slice, Hidden]]:
        """Return (rows, keys, hidden) of each tile of this step in which some row sees some key."""
        # A key is hidden from rows that precede it in the sequence. Only global positions show which rows do,
        # because an index in a shard is not a position in the sequence.
        mine, theirs = self.positions[self.ring.rank], self.positions[self.ring.origin(step)]
        found: list[tuple[slice, slice, Hidden]] = []
        for rows in runs(mine):
            for keys in runs(theirs):
                if not self.causal:
                    found.append((rows, keys, None))
                elif mine[rows].max() >= theirs[keys].min():
                    found.append((rows, keys, theirs[keys] > mine[rows, None]))
        return found


def runs(positions: Int[Tensor, " L"]) -> list[slice]:
    """Return slices of positions, cut where their step changes, as between the halves of a zig-zag shard."""
    steps = positions.diff()
    breaks = [0, *(torch.nonzero(steps != steps[:1]).flatten() + 1).tolist(), len(positions)]
    return [slice(a, b) for a, b in pairwise(breaks) if b > a]


def safe(lse: RowState) -> RowState:
    """Return lse with 0 in place of −inf, because −inf − (−inf) is NaN, but e^(−inf − 0) is 0."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over blocks, at least float32: bfloat16 would round them at every step."""
    return torch.promote_types(dtype, torch.float32)


def expand_heads(kv: KeyValue, heads: int) -> Float[Tensor, "B H Lk D"]:
    """Return keys or values once for each query head: head h reads h // group."""
    return kv.repeat_interleave(heads // kv.shape[1], dim=1)


def sum_heads(gradient: Float[Tensor, "B H Lk D"], heads: int) -> KeyValue:
    """Return the gradient of each key/value head, summed over the query heads that read it."""
    return gradient.unflatten(1, (heads, -1)).sum(2)
