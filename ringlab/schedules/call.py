"""One call of attention on one rank, and what every schedule does with a K/V block that is here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringlab.blocks.protocol import Block
from ringlab.comm.protocol import side_by_side
from ringlab.comm.ring import Ring
from ringlab.layout import Layout
from ringlab.merge import Partial, merge_into, state_dtype
from ringlab.plan import Tile, tiles

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """What stays the same while the blocks pass by."""

    ring: Ring
    layout: Layout
    block: Block
    causal: bool
    scale: float

    def length(self, origin: int) -> int:
        """Return the tokens of the block that belongs to rank `origin`."""
        return self.layout.length(origin)

    def compute(self, label: str, function: Callable[..., T], *args: Any) -> T:
        """Return `function(self, *args)`, beside other ranks' computations where the block allows it."""
        work = partial(function, self)
        return self.ring.compute(label, side_by_side(work) if self.block.thread_safe else work, *args)

    def tiles(self, origin: int) -> tuple[Tile, ...]:
        """Return the tiles in which this rank's rows meet the block of rank `origin`."""
        return tiles(self.layout, self.ring.rank, origin, self.causal, self.block.largest_causal)


@dataclass(frozen=True)
class Gradient:
    """What some rows add to the gradients of the `keys` of a block."""

    keys: slice
    dk: Tensor
    dv: Tensor


class RowSum:
    """A running sum over slices of a token axis, in the state dtype; a first whole slice is adopted."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.total: Tensor | None = None

    def add(self, rows: slice, part: Tensor) -> None:
        """Add `part` to `rows`."""
        dtype = state_dtype(self.like.dtype)
        if self.total is None:
            if part.shape == self.like.shape:
                self.total = part.to(dtype)
                return
            self.total = torch.zeros(self.like.shape, dtype=dtype, device=self.like.device)
        self.total[..., rows, :] += part

    def value(self) -> Tensor:
        """Return the sum, zeros where nothing was added."""
        if self.total is None:
            return torch.zeros_like(self.like, dtype=state_dtype(self.like.dtype))
        return self.total


class RunningPartial:
    """The partial of this rank's queries over the blocks seen so far.

    Rows beyond `seen` have met no key yet and hold nothing: their first partial is copied.
    """

    def __init__(self, q: Tensor) -> None:
        self.q = q
        self.seen = 0
        self.partial: Partial | None = None

    def add(self, rows: slice, part: Partial) -> None:
        """Merge `part` into `rows`; a first one for all rows is adopted."""
        dtype, length = state_dtype(self.q.dtype), self.q.shape[-2]
        if self.partial is None and part.out.shape == self.q.shape:
            self.partial, self.seen = Partial(part.out.to(dtype), part.lse), length
            return
        if self.partial is None:
            out = torch.empty(self.q.shape, dtype=dtype, device=self.q.device)
            self.partial = Partial(out, out.new_empty(self.q.shape[:-1]))
        if rows.start >= self.seen:
            self._forget(slice(self.seen, rows.start))
            self.partial.out[..., rows, :] = part.out
            self.partial.lse[..., rows] = part.lse
        else:
            self._forget(slice(self.seen, rows.stop))
            merge_into(self.partial, rows, part)
        self.seen = max(self.seen, rows.stop)

    def value(self) -> Partial:
        """Return the partial, the identity where nothing was merged."""
        if self.partial is None:
            return Partial.identity(self.q)
        self._forget(slice(self.seen, self.q.shape[-2]))
        self.seen = self.q.shape[-2]
        return self.partial

    def _forget(self, rows: slice) -> None:
        """Write the identity into `rows`."""
        assert self.partial is not None
        if rows.start >= rows.stop:
            return
        self.partial.out[..., rows, :] = 0.0
        self.partial.lse[..., rows] = -math.inf


def attend(call: Call, state: RunningPartial, origin: int, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Merge attention of `q` on the block of `origin` into `state`, tile by tile."""
    for tile in call.tiles(origin):
        rows, keys = tile.rows, tile.keys
        part = call.block.forward(
            q[..., rows, :], k[..., keys, :], v[..., keys, :], causal=tile.causal, scale=call.scale
        )
        state.add(rows, part)


@dataclass(frozen=True)
class Saved:
    """What backward needs of the forward and of the loss: all of this rank's rows."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    delta: Tensor


def attend_backward(
    call: Call, saved: Saved, dq: RowSum, origin: int, k: Tensor, v: Tensor
) -> list[Gradient]:
    """Return what `saved` adds to the gradients of the block of `origin`; dq is added to in place."""
    gradients = []
    for tile in call.tiles(origin):
        rows, keys = tile.rows, tile.keys
        dq_part, dk, dv = call.block.backward(
            saved.dout[..., rows, :],
            saved.q[..., rows, :],
            k[..., keys, :],
            v[..., keys, :],
            saved.out[..., rows, :],
            saved.lse[..., rows],
            saved.delta[..., rows],
            causal=tile.causal,
            scale=call.scale,
        )
        dq.add(rows, dq_part)
        gradients.append(Gradient(keys, dk, dv))
    return gradients
