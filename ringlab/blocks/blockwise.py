"""Tiled attention in plain torch: memory linear in the sequence, made to be read.

Source: arXiv 2112.05682 (forward by tiles), arXiv 2205.14135 (backward from lse and delta).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ringlab.blocks.naive import Naive
from ringlab.merge import Partial, merge_into, state_dtype
from ringlab.scores import TileScores
from ringlab.types import KeyValue, Query, RowState


class Blockwise:
    """Walks over square tiles of `tile` × `tile` scores; only one of them exists at a time."""

    name = "blockwise"
    largest_causal: int | None = None
    thread_safe = True
    offers = Naive.offers

    def __init__(self, tile: int = 256) -> None:
        self.tile = tile
        self.inner = Naive()

    def supports(self, q: Query) -> str | None:
        return self.inner.supports(q)

    def forward(
        self,
        q: Query,
        k: KeyValue,
        v: KeyValue,
        *,
        causal: bool,
        scale: float,
        how: TileScores | None = None,
    ) -> Partial:
        state = Partial.identity(q)
        for rows, keys, diagonal in self._tiles(q, k, causal):
            part = self.inner.forward(
                q[..., rows, :],
                k[..., keys, :],
                v[..., keys, :],
                causal=diagonal,
                scale=scale,
                how=how and how.part(rows, keys),
            )
            merge_into(state, rows, part)
        return state

    def backward(
        self,
        dout: Query,
        q: Query,
        k: KeyValue,
        v: KeyValue,
        out: Query,
        lse: RowState,
        delta: RowState,
        *,
        causal: bool,
        scale: float,
        how: TileScores | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.zeros_like(x, dtype=state_dtype(x.dtype)) for x in (q, k, v))
        for rows, keys, diagonal in self._tiles(q, k, causal):
            dq_part, dk_part, dv_part = self.inner.backward(
                dout[..., rows, :],
                q[..., rows, :],
                k[..., keys, :],
                v[..., keys, :],
                out[..., rows, :],
                lse[..., rows],
                delta[..., rows],
                causal=diagonal,
                scale=scale,
                how=how and how.part(rows, keys),
            )
            dq[..., rows, :] += dq_part
            dk[..., keys, :] += dk_part
            dv[..., keys, :] += dv_part
        return dq, dk, dv

    def _tiles(self, q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
        """The tiles to visit; the flag says whether the diagonal runs through one."""
        for row in range(0, q.shape[-2], self.tile):
            for key in range(0, k.shape[-2], self.tile):
                if causal and key > row:
                    break
                rows = slice(row, min(row + self.tile, q.shape[-2]))
                yield rows, slice(key, min(key + self.tile, k.shape[-2])), causal and key == row
