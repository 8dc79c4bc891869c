"""Ring steps made of single tiles, for blocks that compute one tile at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ringlab.blocks.protocol import Block, Gradient
from ringlab.merge import Partial, merge_into, state_dtype
from ringlab.scores import TileScores
from ringlab.tile import Tile


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


class TilewiseForward:
    """The forward of `q`: a partial of each tile, merged into a running one."""

    def __init__(self, block: Block, q: Tensor, scale: float) -> None:
        self.block, self.q, self.scale = block, q, scale
        self.state = RunningPartial(q)

    def take(self, tiles: tuple[Tile, ...], k: Tensor, v: Tensor, how: TileScores | None = None) -> None:
        for tile in tiles:
            of_q, of_kv = _along(tile)
            part = self.block.forward(
                of_q(self.q), of_kv(k), of_kv(v), causal=tile.causal, scale=self.scale, **_told(how, tile)
            )
            if tile.mirrored:
                part = Partial(part.out.flip(-2), part.lse.flip(-1))
            self.state.add(tile.rows, part)

    def result(self) -> Partial:
        return self.state.value()


class TilewiseBackward:
    """The backward of `q`: gradients of each tile, those of q summed here."""

    def __init__(
        self,
        block: Block,
        dout: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        delta: Tensor,
        scale: float,
    ) -> None:
        self.block, self.scale = block, scale
        self.dout, self.q, self.out, self.lse, self.delta = dout, q, out, lse, delta
        self.dq = RowSum(q)

    def take(
        self, tiles: tuple[Tile, ...], k: Tensor, v: Tensor, how: TileScores | None = None
    ) -> list[Gradient]:
        gradients = []
        for tile in tiles:
            of_q, of_kv = _along(tile)
            found = self.block.backward(
                of_q(self.dout),
                of_q(self.q),
                of_kv(k),
                of_kv(v),
                of_q(self.out),
                of_q(self.lse, -1),
                of_q(self.delta, -1),
                causal=tile.causal,
                scale=self.scale,
                **_told(how, tile),
            )
            dq, dk, dv = (x.flip(-2) for x in found) if tile.mirrored else found
            self.dq.add(tile.rows, dq)
            gradients.append(Gradient(tile.keys, dk, dv))
        return gradients

    def result(self) -> Tensor:
        return self.dq.value()


def _told(how: TileScores | None, tile: Tile) -> dict[str, TileScores]:
    """What a `ScoringBlock` is told besides about a tile; nothing where nothing but scale and mask is asked for."""
    if how is None:
        return {}
    part = how.part(tile.rows, tile.keys)
    return {"how": part.backwards() if tile.mirrored else part}


def _along(tile: Tile) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """How to take the tile's rows, and its keys, out of an axis of tokens; counted backwards where it is mirrored."""

    def taker(part: slice) -> Callable[..., Tensor]:
        def take(x: Tensor, dim: int = -2) -> Tensor:
            found = x.narrow(dim, part.start, part.stop - part.start)
            return found.flip(dim) if tile.mirrored else found

        return take

    return taker(tile.rows), taker(tile.keys)
