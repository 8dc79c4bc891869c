"""The block backend `blockwise`: readable tiled attention in plain torch, with memory linear in S.

Source: arXiv 2112.05682 (forward by tiles), arXiv 2205.14135 (backward from lse and delta).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ringlab.blocks.naive import Naive
from ringlab.blocks.protocol import BackwardRows, Block
from ringlab.handles import Handled
from ringlab.merge import Partial, merge_into, state_dtype
from ringlab.scores import PLAIN_RULES, TileRules
from ringlab.types import KeyValue, Query, Value


class Blockwise(Block, Handled):
    """Walks over square tiles of `tile` × `tile` scores. Only one tile is in memory at a time."""

    name = "blockwise"
    largest_causal: int | None = None
    thread_safe = True
    supported_rules = Naive.supported_rules

    def __init__(self, tile: int = 256) -> None:
        self.tile = tile
        self.inner = Naive()

    def supports(self, q: Query) -> str | None:
        return self.inner.supports(q)

    def forward(
        self,
        q: Query,
        k: KeyValue,
        v: Value,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> Partial:
        state = Partial.identity(q, v.shape[-1])
        for rows, keys, diagonal in self._tiles(q, k, causal):
            part = self.inner.forward(
                q[..., rows, :],
                k[..., keys, :],
                v[..., keys, :],
                causal=diagonal,
                scale=scale,
                rules=rules.part(rows, keys),
            )
            merge_into(state, rows, part)
        return state

    def backward(
        self,
        rows: BackwardRows,
        k: KeyValue,
        v: Value,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> tuple[Query, KeyValue, Value]:
        dq, dk, dv = (torch.zeros_like(x, dtype=state_dtype(x.dtype)) for x in (rows.q, k, v))
        for of_q, of_kv, diagonal in self._tiles(rows.q, k, causal):
            dq_part, dk_part, dv_part = self.inner.backward(
                rows.part(of_q),
                k[..., of_kv, :],
                v[..., of_kv, :],
                causal=diagonal,
                scale=scale,
                rules=rules.part(of_q, of_kv),
            )
            dq[..., of_q, :] += dq_part
            dk[..., of_kv, :] += dk_part
            dv[..., of_kv, :] += dv_part
        return dq, dk, dv

    def _tiles(self, q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
        """Yield (rows, keys, whether the diagonal crosses the tile) of each tile with visible keys."""
        for row in range(0, q.shape[-2], self.tile):
            for key in range(0, k.shape[-2], self.tile):
                if causal and key > row:
                    break
                rows = slice(row, min(row + self.tile, q.shape[-2]))
                yield rows, slice(key, min(key + self.tile, k.shape[-2])), causal and key == row
