"""From two ranks' runs to tiles: which query rows meet which keys, and how.

Rows i of one run meet keys j of another with the same step where start_q + step·i ≥
start_k + step·j, that is where j ≤ i + d with d = floor((start_q − start_k) / step). So a pair of
runs is skipped (nothing visible), full (all visible), causal (d = 0), or causal after cutting d
keys (seen by all) or d rows (seeing nothing) off; the layouts of `ringlab.layout` need no cut of
more than one. A block backend needs to know no more than `causal: bool`, and causal tiles are
square.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ringlab.errors import LayoutError
from ringlab.layout import Layout, Run


@dataclass(frozen=True)
class Tile:
    """Local query rows [q_start, q_stop) × local keys [k_start, k_stop).

    With `causal`, row i of the tile sees keys 0..i of the tile, which is square; without, all keys.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool

    @property
    def rows(self) -> slice:
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        return slice(self.k_start, self.k_stop)

    @property
    def scores(self) -> int:
        """Return the number of visible (query, key) pairs."""
        rows, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        return rows * (rows + 1) // 2 if self.causal else rows * keys


@lru_cache(maxsize=65536)
def tiles(
    layout: Layout, rank: int, origin: int, causal: bool = True, largest_causal: int | None = None
) -> tuple[Tile, ...]:
    """Return the tiles in which queries of `rank` meet keys of `origin`: each visible pair once.

    Tiles never hold a row that sees none of their keys. They come in ascending order of rows,
    then keys; neighbours that can be one tile are one. Causal tiles of more than `largest_causal`
    rows are cut into smaller ones and full ones beside them.
    Raises: LayoutError where the runs have different steps.
    """
    n_rows, n_keys = layout.length(rank), layout.length(origin)
    if n_rows == 0 or n_keys == 0:
        return ()
    if not causal:
        return (Tile(0, n_rows, 0, n_keys, False),)
    if rank == origin and _ascending(layout.positions(rank)):
        return tuple(_cut(Tile(0, n_rows, 0, n_keys, True), largest_causal))
    full: list[Tile] = []
    diagonal: list[Tile] = []
    for q_start, q_run in _placed(layout.runs(rank)):
        for k_start, k_run in _placed(layout.runs(origin)):
            for tile in _pair(q_start, q_run, k_start, k_run, layout.step):
                (diagonal if tile.causal else full).append(tile)
    joined = _join_rows(_join_keys(full)) + [part for tile in diagonal for part in _cut(tile, largest_causal)]
    return tuple(sorted(joined, key=lambda tile: (tile.q_start, tile.k_start)))


def work(layout: Layout, rank: int, origin: int, causal: bool = True) -> int:
    """Return how many score elements `rank` computes against the keys of `origin`."""
    return sum(tile.scores for tile in tiles(layout, rank, origin, causal))


def _ascending(positions: np.ndarray) -> bool:
    return bool((np.diff(positions) > 0).all())


def _placed(runs: tuple[Run, ...]) -> list[tuple[int, Run]]:
    """The runs with the local index at which each begins."""
    starts = np.cumsum([0, *(run.length for run in runs)])
    return [(int(start), run) for start, run in zip(starts, runs, strict=False)]


def _pair(q0: int, q: Run, k0: int, k: Run, step: int) -> list[Tile]:
    """The tiles of one query run, at local index q0, and one key run, at k0."""
    if (q.length > 1 and q.step != step) or (k.length > 1 and k.step != step):
        raise LayoutError(f"runs of step {step}", f"steps {q.step} and {k.step}")
    shift = (q.start - k.start) // step
    if shift <= -q.length:
        return []
    if shift >= k.length - 1:
        return [Tile(q0, q0 + q.length, k0, k0 + k.length, False)]
    first, last = max(0, -shift), min(q.length, k.length - shift)
    parts = [Tile(q0 + first, q0 + last, k0 + first + shift, k0 + last + shift, True)]
    if first + shift > 0:
        parts.append(Tile(q0 + first, q0 + last, k0, k0 + first + shift, False))
    if last < q.length:
        parts.append(Tile(q0 + last, q0 + q.length, k0, k0 + k.length, False))
    return parts


def _cut(tile: Tile, largest: int | None) -> Iterator[Tile]:
    """A causal tile as two of about half the rows and a full one beside, again and again."""
    rows = tile.q_stop - tile.q_start
    if largest is None or rows <= largest:
        yield tile
        return
    half = largest
    while 2 * half < rows:
        half *= 2
    row, key = tile.q_start + half, tile.k_start + half
    yield from _cut(Tile(tile.q_start, row, tile.k_start, key, True), largest)
    yield Tile(row, tile.q_stop, tile.k_start, key, False)
    yield from _cut(Tile(row, tile.q_stop, key, tile.k_stop, True), largest)


def _join_keys(tiles: list[Tile]) -> list[Tile]:
    """Full tiles of the same rows whose keys touch become one."""
    joined: list[Tile] = []
    for tile in sorted(tiles, key=lambda t: (t.q_start, t.q_stop, t.k_start)):
        last = joined[-1] if joined else None
        if last and (last.q_start, last.q_stop, last.k_stop) == (tile.q_start, tile.q_stop, tile.k_start):
            joined[-1] = Tile(last.q_start, last.q_stop, last.k_start, tile.k_stop, False)
        else:
            joined.append(tile)
    return joined


def _join_rows(tiles: list[Tile]) -> list[Tile]:
    """Full tiles of the same keys whose rows touch become one."""
    joined: list[Tile] = []
    for tile in sorted(tiles, key=lambda t: (t.k_start, t.k_stop, t.q_start)):
        last = joined[-1] if joined else None
        if last and (last.k_start, last.k_stop, last.q_stop) == (tile.k_start, tile.k_stop, tile.q_start):
            joined[-1] = Tile(last.q_start, tile.q_stop, last.k_start, last.k_stop, False)
        else:
            joined.append(tile)
    return joined
