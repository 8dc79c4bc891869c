"""Attention to a K/V block tile by tile, for block backends that compute one tile at a time.

Tensors that a backend returns are never written into, because other code may keep them. A selective
checkpoint, for example, keeps an operator's result and returns it again in backward.

`AttentionCall.begin_forward` and `AttentionCall.begin_backward` choose these classes unless the backend has
its own.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.blocks.protocol import BackwardRows, Block, Gradient
from ringlab.merge import Partial, merge_into, state_dtype
from ringlab.scores import PLAIN_RULES, TileRules
from ringlab.tile import Tile
from ringlab.types import KeyValue, Query, Value


class RunningSum:
    """A sum over slices of a token axis, in the state dtype.

    total: the sum so far, in memory that may be written into. If the first part covers the whole axis, it is
    kept without a copy, and copied once another part is added.
    """

    def __init__(
        self, like: Float[Tensor, "B heads L D"], total: Float[Tensor, "B heads L D"] | None = None
    ) -> None:
        self.like, self.total = like, total
        self.first: Tensor | None = None

    def add(self, tokens: slice, part: Float[Tensor, "B heads _ D"]) -> None:
        """Add `part` to these `tokens`."""
        if self.total is None and self.first is None and part.shape == self.like.shape:
            self.first = part
            return
        self.copy_first()
        if self.total is None:
            dtype = state_dtype(self.like.dtype)
            self.total = torch.zeros(self.like.shape, dtype=dtype, device=self.like.device)
        self.total[..., tokens, :] += part

    def copy_first(self) -> None:
        """Copy a first part that was kept without a copy.

        This happens before the next part is computed; otherwise there would be three tensors in memory.
        """
        if self.first is not None:
            self.total = torch.empty_like(self.first, dtype=state_dtype(self.like.dtype)).copy_(self.first)
            self.first = None

    def value(self) -> Float[Tensor, "B heads L D"]:
        """Return the sum, which must not be written into; zeros if nothing was added."""
        dtype = state_dtype(self.like.dtype)
        if self.first is not None:
            return self.first.to(dtype)
        return torch.zeros_like(self.like, dtype=dtype) if self.total is None else self.total


def add_gradients(sums: tuple[RunningSum, RunningSum], gradients: list[Gradient]) -> None:
    """Add the gradients for some keys of a block to the sums of the block's dk and dv."""
    for gradient in gradients:
        for total, part in zip(sums, (gradient.dk, gradient.dv), strict=True):
            total.add(gradient.keys, part)


class RunningPartial:
    """The partial of queries over the keys so far; value_dim is the head dim of v.

    Rows from `touched` on have seen no key. Their memory is uninitialised, and their first partial is copied
    there. If the first part covers all rows, it is kept without a copy, and copied once another part is
    merged.
    """

    def __init__(self, q: Query, value_dim: int) -> None:
        self.q = q
        self.shape = (*q.shape[:-1], value_dim)
        self.touched = 0
        self.first: Partial | None = None
        self.partial: Partial | None = None

    def add(self, rows: slice, part: Partial) -> None:
        """Merge `part` into `rows`."""
        if self.partial is None and self.first is None and part.out.shape == self.shape:
            self.first = part
            return
        self.copy_first()
        if self.partial is None:
            out = torch.empty(self.shape, dtype=state_dtype(self.q.dtype), device=self.q.device)
            self.partial = Partial(out, out.new_empty(self.q.shape[:-1]))
        state = self.partial
        if rows.start >= self.touched:
            self._fill_with_identity(slice(self.touched, rows.start))
            state.out[..., rows, :] = part.out
            state.lse[..., rows] = part.lse
        else:
            self._fill_with_identity(slice(self.touched, rows.stop))
            merge_into(state, rows, part)
        self.touched = max(self.touched, rows.stop)

    def value(self) -> Partial:
        """Return the partial, which must not be written into; rows without a part have the identity."""
        if self.first is not None:
            return Partial(self.first.out.to(state_dtype(self.q.dtype)), self.first.lse)
        if self.partial is None:
            return Partial.identity(self.q, self.shape[-1])
        self._fill_with_identity(slice(self.touched, self.q.shape[-2]))
        self.touched = self.q.shape[-2]
        return self.partial

    def copy_first(self) -> None:
        """Copy a first part that was kept without a copy.

        This happens before the next part is computed; otherwise there would be three outs in memory.
        """
        # The copy must have the same strides, on which some bits of the result depend.
        if self.first is not None:
            out = torch.empty_like(self.first.out, dtype=state_dtype(self.q.dtype)).copy_(self.first.out)
            self.partial = Partial(out, torch.empty_like(self.first.lse).copy_(self.first.lse))
            self.first, self.touched = None, self.q.shape[-2]

    def _fill_with_identity(self, rows: slice) -> None:
        assert self.partial is not None
        if rows.start >= rows.stop:
            return
        self.partial.out[..., rows, :] = 0.0
        self.partial.lse[..., rows] = -math.inf


class TilewiseForward:
    """`ForwardSteps` tile by tile: the partial of each tile is merged into a running partial."""

    def __init__(self, block: Block, q: Query, scale: float) -> None:
        self.block, self.q, self.scale = block, q, scale
        self.state: RunningPartial | None = None

    def attend(self, tiles: tuple[Tile, ...], k: KeyValue, v: Value, rules: TileRules = PLAIN_RULES) -> None:
        """Attend to the next block."""
        state = self.running(v)
        for tile in tiles:
            state.copy_first()
            state.add(tile.rows, self._tile_partial(tile, k, v, rules))

    def running(self, v: Value) -> RunningPartial:
        """Return the partial so far. The first call creates it, because `v` determines the width of out."""
        if self.state is None:
            self.state = RunningPartial(self.q, v.shape[-1])
        return self.state

    def _tile_partial(self, tile: Tile, k: Tensor, v: Tensor, rules: TileRules) -> Partial:
        q, k, v = _tokens(self.q, tile.rows), _tokens(k, tile.keys), _tokens(v, tile.keys)
        rules = rules.part(tile.rows, tile.keys)
        if not tile.mirrored:
            return self.block.forward(q, k, v, causal=tile.causal, scale=self.scale, rules=rules)
        q, k, v = q.flip(-2), k.flip(-2), v.flip(-2)
        part = self.block.forward(q, k, v, causal=tile.causal, scale=self.scale, rules=rules.reversed())
        return Partial(part.out.flip(-2), part.lse.flip(-1))

    def partial(self) -> Partial:
        """Return the partial over all blocks so far. There must be at least one."""
        assert self.state is not None
        return self.state.value()


class TilewiseBackward:
    """`BackwardSteps` tile by tile: dq is summed over tiles, and dk and dv of each tile are returned."""

    def __init__(self, block: Block, rows: BackwardRows, scale: float) -> None:
        self.block, self.rows, self.scale = block, rows, scale
        self.dq = RunningSum(rows.q)

    def differentiate(
        self, tiles: tuple[Tile, ...], k: KeyValue, v: Value, rules: TileRules = PLAIN_RULES
    ) -> list[Gradient]:
        """Return these rows' contribution to the gradients of the next block, one entry for each tile."""
        gradients = []
        for tile in tiles:
            self.dq.copy_first()
            dq, dk, dv = self._tile_gradients(tile, k, v, rules)
            self.dq.add(tile.rows, dq)
            gradients.append(Gradient(tile.keys, dk, dv))
        return gradients

    def _tile_gradients(
        self, tile: Tile, k: Tensor, v: Tensor, rules: TileRules
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, k, v = self.rows.part(tile.rows), _tokens(k, tile.keys), _tokens(v, tile.keys)
        rules = rules.part(tile.rows, tile.keys)
        if not tile.mirrored:
            return self.block.backward(rows, k, v, causal=tile.causal, scale=self.scale, rules=rules)
        rows, k, v, rules = rows.reversed(), k.flip(-2), v.flip(-2), rules.reversed()
        dq, dk, dv = self.block.backward(rows, k, v, causal=tile.causal, scale=self.scale, rules=rules)
        return dq.flip(-2), dk.flip(-2), dv.flip(-2)

    def query_gradient(self) -> Query:
        """Return dq over all blocks so far."""
        return self.dq.value()


def _tokens(x: Tensor, part: slice) -> Tensor:
    """Return a view of these tokens of x (B, H, L, D)."""
    return x.narrow(-2, part.start, part.stop - part.start)
