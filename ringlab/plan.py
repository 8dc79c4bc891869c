"""From two ranks' runs to tiles: which query rows meet which keys, and how.

Rows i of one run meet keys j of another with the same step where start_q + step·i ≥
start_k + step·j, that is where j ≤ i + d with d = floor((start_q − start_k) / step). So a pair of
runs is skipped (nothing visible), full (all visible), causal (d = 0), or causal after cutting d
keys (seen by all) or d rows (seeing nothing) off; the layouts of `ringlab.layout` need no cut of
more than one. A block backend needs to know no more than `causal: bool`, and causal tiles are
square. Under a `ringlab.mask.Mask` runs are cut at the bounds of documents and prefixes first, and a
sliding window gives a band of visible pairs (`ringlab.tile`).
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Protocol, cast

import numpy as np

from ringlab.layout import Layout, Run
from ringlab.mask import Mask, as_mask
from ringlab.pieces import Piece, check_steps, meet, pieces, placed
from ringlab.tile import Tile, cut, right_edge

_FEW_RUNS = 8
"""Ranks of more runs are met one by one: there are few such ranks, and what tells pairs apart is long."""

_PAIRS_AT_ONCE = 1 << 20


def tiles(
    layout: Layout, rank: int, origin: int, causal: bool | Mask = True, largest_causal: int | None = None
) -> tuple[Tile, ...]:
    """Return the tiles in which queries of `rank` meet keys of `origin`: each visible pair once.

    Tiles never hold a row that sees none of their keys. They come in ascending order of rows,
    then keys; neighbours that can be one tile are one. Causal tiles of more than `largest_causal`
    rows are cut into smaller ones and full ones beside them.
    Raises: LayoutError where the runs have different steps; MaskError where documents do not add up to S.
    """
    return plan(layout, causal, largest_causal).of(rank, origin)


def plan(layout: Layout, causal: bool | Mask = True, largest_causal: int | None = None) -> Plan:
    """Return the tiles of all pairs of ranks: `plan(…).of(rank, origin)` is `tiles(…, rank, origin, …)`."""
    return _plan(layout, as_mask(causal), largest_causal)


@lru_cache(maxsize=32)
def _plan(layout: Layout, mask: Mask, largest: int | None) -> Plan:
    return Plan(layout, mask, largest)


class Row(Protocol):
    """The tiles of one rank, by the rank whose keys they meet."""

    def __getitem__(self, origin: int, /) -> tuple[Tile, ...]: ...


class Plan:
    """The tiles of all pairs of ranks; pairs that meet in the same way share one tuple.

    How two ranks meet is told by the lengths of their runs and, for each pair of runs, by d as far
    as it makes a difference. Of the million pairs of 1,024 ranks few are different, so a rank's row
    of pairs is told apart at once, and tiles are made for those that are new.
    """

    def __init__(self, layout: Layout, mask: Mask, largest: int | None) -> None:
        self.layout, self.mask, self.largest = layout, mask.of_length(layout.S), largest
        self._rows: dict[int, Row] = {}
        self._known: dict[Any, tuple[Tile, ...]] = {}
        self._pieces: dict[int, dict[int, list[Piece]]] = {}
        self._most_runs = max(1, *map(len, layout.ranks))

    def of(self, rank: int, origin: int) -> tuple[Tile, ...]:
        """Return the tiles of one pair. Raises: WorldSizeError for what is no rank."""
        self.layout.length(origin)
        return self.row(rank)[origin]

    def row(self, rank: int) -> Row:
        """Return the tiles of `rank`, by origin. Raises: WorldSizeError for what is no rank."""
        row = self._rows.get(rank)
        if row is None:
            self.layout.length(rank)
            if not self.mask.plain:
                row = _MaskedRow(self, rank)
            else:
                many = self.mask.causal and self._most_runs > _FEW_RUNS
                row = _LongRow(self, rank) if many else self._row(rank)
            self._rows[rank] = row
        return row

    @cached_property
    def distances(self) -> tuple[int, ...]:
        """Return how many ranks on K/V blocks are seen by anybody's rows, ascending; 0 first, at home."""
        P = self.layout.P
        if self.mask.plain:
            return tuple(range(P))
        seen = (d for d in range(1, P) if any(self.row(rank)[(rank - d) % P] for rank in range(P)))
        return (0, *seen)

    def _row(self, rank: int) -> list[tuple[Tile, ...]]:
        layout, known = self.layout, self._known
        if not self.mask.causal:
            n_rows = layout.length(rank)
            return [known.setdefault((n_rows, n), _whole(n_rows, n)) for n in layout.lengths]
        ways = self._meetings(rank)
        row = [known.get(way) for way in ways]
        found = _meet(layout, rank, rank, self.largest)  # itself it meets in one tile, where it can
        row[rank] = known.setdefault(found, found)
        if None in row:
            for origin, way in enumerate(ways):
                if row[origin] is None:
                    row[origin] = known.setdefault(way, _meet(layout, rank, origin, self.largest))
        return row  # type: ignore[return-value]

    def _meetings(self, rank: int) -> list[bytes]:
        """For every origin what tells how `rank` meets it."""
        starts, lengths = self._runs
        q_starts, q_lengths = starts[rank, :, None], lengths[rank, :, None]
        shifts = (q_starts - starts[:, None, :]) // self.layout.step
        shifts = np.clip(shifts, -q_lengths, np.maximum(lengths[:, None, :] - 1, -q_lengths))
        shifts *= (q_lengths > 0) & (lengths[:, None, :] > 0)  # what fills up tells nothing
        own = np.broadcast_to(lengths[rank], lengths.shape)
        told = np.concatenate([shifts.reshape(self.layout.P, -1), own, lengths], axis=1)
        way = np.dtype((np.void, told.itemsize * told.shape[1]))
        return cast(list[bytes], told.view(way).ravel().tolist())

    def pieces(self, rank: int) -> dict[int, list[Piece]]:
        """Return `pieces` of `rank`, worked out once."""
        if rank not in self._pieces:
            self._pieces[rank] = pieces(self.layout, self.mask, rank)
        return self._pieces[rank]

    @cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts and lengths of the runs of every rank, (P, most runs), filled up with runs of nothing."""
        filled = [[*runs, *[Run(0, 1, 0)] * (self._most_runs - len(runs))] for runs in self.layout.ranks]
        shape = self.layout.P, self._most_runs
        starts = np.array([[run.start for run in runs] for runs in filled], np.int64).reshape(shape)
        return starts, np.array([[run.length for run in runs] for runs in filled], np.int64).reshape(shape)


class _LongRow:
    """The row of a rank where ranks have many runs: pair by pair, when asked for."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank

    def __getitem__(self, origin: int, /) -> tuple[Tile, ...]:
        return _meet(self.plan.layout, self.rank, origin, self.plan.largest)


class _MaskedRow:
    """The row of a rank under a mask that is more than causal: pair by pair, when first asked for."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self._known: dict[int, tuple[Tile, ...]] = {}

    def __getitem__(self, origin: int, /) -> tuple[Tile, ...]:
        if origin not in self._known:
            self._known[origin] = _meet_masked(self.plan, self.rank, origin)
        return self._known[origin]


def _meet_masked(plan: Plan, rank: int, origin: int) -> tuple[Tile, ...]:
    """The tiles of one pair of ranks under any mask."""
    full: list[Tile] = []
    edges: list[Tile] = []
    theirs = plan.pieces(origin)
    for document, queries in plan.pieces(rank).items():
        for query in queries:
            for key in theirs.get(document, ()):
                for tile in meet(plan.mask, query, key, plan.layout.step):
                    (edges if tile.causal else full).append(tile.moved(query.at, key.at))
    return _sorted(_join_rows(_join_keys(full)), edges, plan.largest)


def _whole(n_rows: int, n_keys: int) -> tuple[Tile, ...]:
    return (Tile(0, n_rows, 0, n_keys, False),) if n_rows and n_keys else ()


def _meet(layout: Layout, rank: int, origin: int, largest: int | None) -> tuple[Tile, ...]:
    """The tiles of one pair of ranks under the causal mask."""
    n_rows, n_keys = layout.length(rank), layout.length(origin)
    if n_rows == 0 or n_keys == 0:
        return ()
    if rank == origin and _ascending(layout.runs(rank)):
        return tuple(cut(Tile(0, n_rows, 0, n_keys, True), largest))
    q_runs, k_runs = layout.runs(rank), layout.runs(origin)
    if len(q_runs) * len(k_runs) > _FEW_RUNS**2:
        return _meet_many(layout, rank, origin, largest)
    full: list[Tile] = []
    diagonal: list[Tile] = []
    for q_start, q_run in placed(q_runs):
        for k_start, k_run in placed(k_runs):
            for tile in _pair(q_start, q_run, k_start, k_run, layout.step):
                (diagonal if tile.causal else full).append(tile)
    return _sorted(_join_rows(_join_keys(full)), diagonal, largest)


def _sorted(full: list[Tile], diagonal: list[Tile], largest: int | None) -> tuple[Tile, ...]:
    parts = full + [part for tile in diagonal for part in cut(tile, largest)]
    return tuple(sorted(parts, key=lambda tile: (tile.q_start, tile.k_start)))


@lru_cache(maxsize=4096)
def _meet_many(layout: Layout, rank: int, origin: int, largest: int | None) -> tuple[Tile, ...]:
    """The same for ranks of many runs, all pairs of them at once; the last few thousand are kept."""
    q_runs, k_runs = layout.runs(rank), layout.runs(origin)
    step = layout.step
    q_length, k_length = (np.array([run.length for run in runs]) for runs in (q_runs, k_runs))
    q_start, k_start = (np.cumsum(length) - length for length in (q_length, k_length))
    q_at, k_at = (np.array([run.start for run in runs]) for runs in (q_runs, k_runs))
    full: list[np.ndarray] = []
    diagonal: list[Tile] = []
    rows = max(1, _PAIRS_AT_ONCE // len(k_runs))
    for some in (slice(first, first + rows) for first in range(0, len(q_runs), rows)):
        shift = (q_at[some, None] - k_at) // step
        whole = shift >= k_length - 1
        q, k = np.nonzero(whole)
        q += some.start
        full.append(np.stack([q_start[q], q_start[q] + q_length[q], k_start[k], k_start[k] + k_length[k]], 1))
        partly = np.argwhere(~whole & (shift > -q_length[some, None]))
        parts = [
            part
            for q, k in partly.tolist()
            for part in _pair(
                int(q_start[q + some.start]), q_runs[q + some.start], int(k_start[k]), k_runs[k], step
            )
        ]
        diagonal += [part for part in parts if part.causal]
        beside = [(p.q_start, p.q_stop, p.k_start, p.k_stop) for p in parts if not p.causal]
        full.append(np.array(beside, np.int64).reshape(-1, 4))
    joined = _join(_join(np.concatenate(full), 0, 2), 2, 0)
    return _sorted([Tile(a, b, c, d, False) for a, b, c, d in joined.tolist()], diagonal, largest)


def _join(tiles: np.ndarray, same: int, along: int) -> np.ndarray:
    """Tiles (q_start, q_stop, k_start, k_stop) that agree in columns `same` and touch `along` become one."""
    tiles = tiles[np.lexsort((tiles[:, along], tiles[:, same + 1], tiles[:, same]))]
    before, after = tiles[:-1], tiles[1:]
    touch = (before[:, same] == after[:, same]) & (before[:, same + 1] == after[:, same + 1])
    touch &= before[:, along + 1] == after[:, along]
    first = np.flatnonzero(np.concatenate([np.ones(min(1, len(tiles)), bool), ~touch]))
    joined = tiles[first].copy()
    joined[:, along + 1] = tiles[np.append(first[1:], len(tiles)) - 1, along + 1] if len(tiles) else []
    return joined


def work(layout: Layout, rank: int, origin: int, causal: bool | Mask = True) -> int:
    """Return how many score elements `rank` computes against the keys of `origin`."""
    return sum(tile.scores for tile in tiles(layout, rank, origin, causal))


def _ascending(runs: tuple[Run, ...]) -> bool:
    """Whether positions grow in local order."""
    there = [run for run in runs if run.length > 0]
    inside = all(run.step > 0 or run.length == 1 for run in there)
    return inside and all(before.last < after.start for before, after in pairwise(there))


def _pair(q0: int, q: Run, k0: int, k: Run, step: int) -> list[Tile]:
    """The tiles of one query run, at local index q0, and one key run, at k0."""
    check_steps(q, k, step)
    found = right_edge(q.length, k.length, (q.start - k.start) // step)
    return [tile.moved(q0, k0) for tile in found]


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
