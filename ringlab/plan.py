"""The tile plan: which query rows of one rank see which keys of another, as tiles.

`AttentionCall.tiles` looks up the tiles in this plan whenever a K/V block arrives.

Take a run of queries and a run of keys with the same step. Row i sees key j where start_q + step·i ≥ start_k
+ step·j, that is where j ≤ i + d with d = floor((start_q − start_k) / step). Two runs are therefore skipped (no key
is visible), full (every key is visible to every row), causal (d = 0), or causal after a cut. For d > 0 the cut
removes d keys that every row sees, for d < 0 it removes −d rows that see no key. The layouts of `ringlab.layout` need at most one such cut. A block
backend needs no mask beyond `causal: bool`, and causal tiles are square. If a `ringlab.mask.Mask` has other
rules, the runs are first cut at the bounds of documents and prefixes, so that one simple rule describes each
pair of runs. With a sliding window the visible pairs are a band (`ringlab.tile`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Protocol, cast

import numpy as np

from ringlab.errors import LayoutError
from ringlab.layout import Layout, Run
from ringlab.mask import Mask, as_mask
from ringlab.tile import Tile, band, cut, right_edge

_FEW_RUNS = 8
"""If ranks have more runs, pairs of ranks are planned one by one, because relations would be long."""

_PAIRS_AT_ONCE = 1 << 20
"""Pairs of runs that `_many_runs_tiles` compares in one NumPy expression, which bounds its memory."""


def tiles(
    layout: Layout, rank: int, origin: int, causal: bool | Mask = True, largest_causal: int | None = None
) -> tuple[Tile, ...]:
    """Return the tiles in which queries of `rank` see keys of `origin`. They contain each visible pair once.

    Every row of a tile sees at least one of its keys. Tiles are sorted by rows, then by keys, and neighbours
    are merged where one tile can cover both. Causal tiles of more than `largest_causal` rows are cut into
    smaller causal tiles and the full tiles between them.
    Raises: LayoutError for runs of different steps; MaskError for documents that do not add up to S tokens.

    >>> from ringlab import zigzag
    >>> from ringlab.plan import tiles
    >>> tiles(zigzag(32, 4), rank=2, origin=1)
    (Tile(q_start=0, q_stop=8, k_start=0, k_stop=4, causal=False),)
    """
    return plan(layout, causal, largest_causal).of(rank, origin)


def plan(layout: Layout, causal: bool | Mask = True, largest_causal: int | None = None) -> Plan:
    """Return the plan of all pairs of ranks. Its tiles are computed on demand and cached.

    Raises: MaskError if the documents do not have the layout's S tokens in all.
    """
    return _plan(layout, as_mask(causal), largest_causal)


@lru_cache(maxsize=32)
def _plan(layout: Layout, mask: Mask, largest: int | None) -> Plan:
    return Plan(layout, mask, largest)


@dataclass(frozen=True)
class DocumentRun:
    """The part of a run that is in one document, and either in its prefix or after it.

    local_start: the local index of the first token. in_prefix: whether the tokens belong to the document's
    prefix.
    """

    local_start: int
    run: Run
    in_prefix: bool


class TilesByOrigin(Protocol):
    """The tiles of one rank's queries, indexed by the rank that owns the keys."""

    def __getitem__(self, origin: int, /) -> tuple[Tile, ...]: ...


class Plan:
    """The tiles of all pairs of ranks.

    Two pairs of ranks share one tuple of tiles if they have the same relation: equal run lengths, and an
    equal d for each pair of runs, clipped to the range in which d matters. The million pairs of 1,024 ranks
    have few different relations. For a rank, all relations are computed at once, but tiles are computed only
    for relations that are new.
    """

    def __init__(self, layout: Layout, mask: Mask, largest: int | None) -> None:
        self.layout, self.mask, self.largest = layout, mask.of_length(layout.S), largest
        self._by_rank: dict[int, TilesByOrigin] = {}
        self._by_relation: dict[Any, tuple[Tile, ...]] = {}
        self._document_runs: dict[int, dict[int, list[DocumentRun]]] = {}
        self._most_runs = max(1, *map(len, layout.ranks))

    def of(self, rank: int, origin: int) -> tuple[Tile, ...]:
        """Return the tiles of a pair of ranks. Raises: WorldSizeError for a number that is not a rank."""
        self.layout.length(origin)
        return self.of_rank(rank)[origin]

    def of_rank(self, rank: int) -> TilesByOrigin:
        """Return the tiles of `rank`, indexed by origin.

        Raises: WorldSizeError for a number that is not a rank.
        """
        found = self._by_rank.get(rank)
        if found is None:
            self.layout.length(rank)
            if not self.mask.plain:
                found = _MaskedTiles(self, rank)
            else:
                many = self.mask.causal and self._most_runs > _FEW_RUNS
                found = _ManyRunsTiles(self, rank) if many else self._tiles_by_relation(rank)
            self._by_rank[rank] = found
        return found

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return the offsets rank − origin at which some rank sees a K/V block, ascending from 0."""
        P = self.layout.P
        if self.mask.plain:
            return tuple(range(P))
        seen = (d for d in range(1, P) if any(self.of_rank(rank)[(rank - d) % P] for rank in range(P)))
        return (0, *seen)

    def _tiles_by_relation(self, rank: int) -> list[tuple[Tile, ...]]:
        layout, known = self.layout, self._by_relation
        if not self.mask.causal:
            n_rows = layout.length(rank)
            return [known.setdefault((n_rows, n), _full_tile(n_rows, n)) for n in layout.lengths]
        relations = self._relations(rank)
        found = [known.get(relation) for relation in relations]
        own = _pair_tiles(layout, rank, rank, self.largest)  # for a rank's own keys, one tile if possible
        found[rank] = known.setdefault(own, own)
        if None in found:
            for origin, relation in enumerate(relations):
                if found[origin] is None:
                    new = _pair_tiles(layout, rank, origin, self.largest)
                    found[origin] = known.setdefault(relation, new)
        return found  # type: ignore[return-value]

    def _relations(self, rank: int) -> list[bytes]:
        """Return bytes for every origin.

        Two origins whose keys `rank` sees in the same way have equal bytes.
        """
        starts, lengths = self._runs
        q_starts, q_lengths = starts[rank, :, None], lengths[rank, :, None]
        shifts = (q_starts - starts[:, None, :]) // self.layout.step
        shifts = np.clip(shifts, -q_lengths, np.maximum(lengths[:, None, :] - 1, -q_lengths))
        shifts *= (q_lengths > 0) & (lengths[:, None, :] > 0)  # empty runs must not make relations differ
        own = np.broadcast_to(lengths[rank], lengths.shape)
        numbers = np.concatenate([shifts.reshape(self.layout.P, -1), own, lengths], axis=1)
        as_bytes = np.dtype((np.void, numbers.itemsize * numbers.shape[1]))
        return cast(list[bytes], numbers.view(as_bytes).ravel().tolist())

    def document_runs(self, rank: int) -> dict[int, list[DocumentRun]]:
        """Return the rank's runs by document. They are cut once and cached."""
        if rank not in self._document_runs:
            self._document_runs[rank] = _runs_by_document(self.layout, self.mask, rank)
        return self._document_runs[rank]

    @cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the starts and lengths of all ranks' runs, each (P, most runs), padded with empty runs."""
        filled = [[*runs, *[Run(0, 1, 0)] * (self._most_runs - len(runs))] for runs in self.layout.ranks]
        shape = self.layout.P, self._most_runs
        starts = np.array([[run.start for run in runs] for runs in filled], np.int64).reshape(shape)
        return starts, np.array([[run.length for run in runs] for runs in filled], np.int64).reshape(shape)


class _ManyRunsTiles:
    """The tiles of a rank in a layout of many runs, planned for one origin at a time, on demand."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank

    def __getitem__(self, origin: int, /) -> tuple[Tile, ...]:
        return _pair_tiles(self.plan.layout, self.rank, origin, self.plan.largest)


class _MaskedTiles:
    """The tiles of a rank under a mask with rules other than `causal`, planned per origin on first use."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self._known: dict[int, tuple[Tile, ...]] = {}

    def __getitem__(self, origin: int, /) -> tuple[Tile, ...]:
        if origin not in self._known:
            self._known[origin] = _masked_pair_tiles(self.plan, self.rank, origin)
        return self._known[origin]


def _masked_pair_tiles(plan: Plan, rank: int, origin: int) -> tuple[Tile, ...]:
    """Return the tiles of one pair of ranks under any mask."""
    full: list[Tile] = []
    edges: list[Tile] = []
    theirs = plan.document_runs(origin)
    for document, queries in plan.document_runs(rank).items():
        for query in queries:
            for key in theirs.get(document, ()):
                for tile in _document_tiles(plan.mask, query, key, plan.layout.step):
                    shifted = tile.shifted(query.local_start, key.local_start)
                    (edges if tile.causal else full).append(shifted)
    return _sorted(_join_rows(_join_keys(full)), edges, plan.largest)


def _runs_by_document(layout: Layout, mask: Mask, rank: int) -> dict[int, list[DocumentRun]]:
    """Return the runs of a rank by document number, cut at the bounds of documents and prefixes."""
    found: dict[int, list[DocumentRun]] = {}
    prefixes = np.array(mask.prefixes, np.int64)
    for local_start, run in layout.local_runs(rank):
        if run.length == 0:
            continue
        positions = run.positions
        documents = mask.document_of(positions)
        early = positions - (mask.bounds[documents] if mask.documents else 0) < prefixes[documents]
        changes = (documents[1:] != documents[:-1]) | (early[1:] != early[:-1])
        cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), run.length]
        for start, stop in pairwise(cuts):
            part = Run(int(positions[start]), run.step, stop - start)
            of_document = found.setdefault(int(documents[start]), [])
            of_document.append(DocumentRun(local_start + start, part, bool(early[start])))
    return found


def _document_tiles(mask: Mask, query: DocumentRun, key: DocumentRun, step: int) -> list[Tile]:
    """Return the tiles of two runs of one document, as indices into the runs.

    Raises: LayoutError for a run whose step is not `step`.
    """
    n, m = query.run.length, key.run.length
    if key.in_prefix:
        return [Tile(0, n, 0, m, False)]
    _check_steps(query.run, key.run, step)
    apart = query.run.start - key.run.start
    lo, hi = -n, m
    if mask.window is not None:
        lo, hi = (apart - mask.window) // step + 1, -(-(apart + mask.window) // step) - 1
    if mask.causal:
        hi = min(hi, apart // step)
    return band(n, m, lo, hi)


def _full_tile(n_rows: int, n_keys: int) -> tuple[Tile, ...]:
    return (Tile(0, n_rows, 0, n_keys, False),) if n_rows and n_keys else ()


def _pair_tiles(layout: Layout, rank: int, origin: int, largest: int | None) -> tuple[Tile, ...]:
    """Return the tiles of one pair of ranks under the causal mask."""
    n_rows, n_keys = layout.length(rank), layout.length(origin)
    if n_rows == 0 or n_keys == 0:
        return ()
    if rank == origin and _positions_ascend(layout.runs(rank)):
        return tuple(cut(Tile(0, n_rows, 0, n_keys, True), largest))
    q_runs, k_runs = layout.runs(rank), layout.runs(origin)
    if len(q_runs) * len(k_runs) > _FEW_RUNS**2:
        return _many_runs_tiles(layout, rank, origin, largest)
    full: list[Tile] = []
    diagonal: list[Tile] = []
    for q_start, q_run in layout.local_runs(rank):
        for k_start, k_run in layout.local_runs(origin):
            for tile in _run_tiles(q_start, q_run, k_start, k_run, layout.step):
                (diagonal if tile.causal else full).append(tile)
    return _sorted(_join_rows(_join_keys(full)), diagonal, largest)


def _sorted(full: list[Tile], diagonal: list[Tile], largest: int | None) -> tuple[Tile, ...]:
    parts = full + [part for tile in diagonal for part in cut(tile, largest)]
    return tuple(sorted(parts, key=lambda tile: (tile.q_start, tile.k_start)))


@lru_cache(maxsize=4096)
def _many_runs_tiles(layout: Layout, rank: int, origin: int, largest: int | None) -> tuple[Tile, ...]:
    """Return the same tiles as `_pair_tiles`, computed for all pairs of runs at once.

    This is faster when ranks have many runs.
    """
    q_runs, k_runs = layout.runs(rank), layout.runs(origin)
    step = layout.step
    q_length, k_length = (np.array([run.length for run in runs]) for runs in (q_runs, k_runs))
    q_start, k_start = (np.cumsum(length) - length for length in (q_length, k_length))
    q_position, k_position = (np.array([run.start for run in runs]) for runs in (q_runs, k_runs))
    full: list[np.ndarray] = []
    diagonal: list[Tile] = []
    rows = max(1, _PAIRS_AT_ONCE // len(k_runs))
    for chunk in (slice(first, first + rows) for first in range(0, len(q_runs), rows)):
        shift = (q_position[chunk, None] - k_position) // step
        sees_all = shift >= k_length - 1
        q, k = np.nonzero(sees_all)
        q += chunk.start
        full.append(np.stack([q_start[q], q_start[q] + q_length[q], k_start[k], k_start[k] + k_length[k]], 1))
        sees_some = np.argwhere(~sees_all & (shift > -q_length[chunk, None]))
        parts = [
            part
            for q, k in sees_some.tolist()
            for part in _run_tiles(
                int(q_start[q + chunk.start]), q_runs[q + chunk.start], int(k_start[k]), k_runs[k], step
            )
        ]
        diagonal += [part for part in parts if part.causal]
        beside = [(p.q_start, p.q_stop, p.k_start, p.k_stop) for p in parts if not p.causal]
        full.append(np.array(beside, np.int64).reshape(-1, 4))
    joined = _join(_join(np.concatenate(full), 0, 2), 2, 0)
    return _sorted([Tile(a, b, c, d, False) for a, b, c, d in joined.tolist()], diagonal, largest)


def _join(tiles: np.ndarray, same: int, along: int) -> np.ndarray:
    """Return an array of tiles in which the tiles that touch along one axis are merged.

    The columns are q_start, q_stop, k_start and k_stop. same: the first column of the axis on which two
    merged tiles must be equal. along: the first column of the axis on which they touch.
    """
    tiles = tiles[np.lexsort((tiles[:, along], tiles[:, same + 1], tiles[:, same]))]
    before, after = tiles[:-1], tiles[1:]
    touch = (before[:, same] == after[:, same]) & (before[:, same + 1] == after[:, same + 1])
    touch &= before[:, along + 1] == after[:, along]
    first = np.flatnonzero(np.concatenate([np.ones(min(1, len(tiles)), bool), ~touch]))
    joined = tiles[first].copy()
    joined[:, along + 1] = tiles[np.append(first[1:], len(tiles)) - 1, along + 1] if len(tiles) else []
    return joined


def work(layout: Layout, rank: int, origin: int, causal: bool | Mask = True) -> int:
    """Return the number of scores that `rank` computes against the keys of `origin`.

    Raises: LayoutError and MaskError as `tiles` does.

    >>> from ringlab import contiguous
    >>> [work(contiguous(32, 4), rank, origin=1) for rank in range(4)]
    [0, 36, 64, 64]
    """
    return sum(tile.scores for tile in tiles(layout, rank, origin, causal))


def _positions_ascend(runs: tuple[Run, ...]) -> bool:
    """Return whether the global positions ascend in local order."""
    filled = [run for run in runs if run.length > 0]
    inside = all(run.step > 0 or run.length == 1 for run in filled)
    return inside and all(before.last < after.start for before, after in pairwise(filled))


def _run_tiles(q_start: int, q: Run, k_start: int, k: Run, step: int) -> list[Tile]:
    """Return the tiles of a query run and a key run, in local indices."""
    _check_steps(q, k, step)
    found = right_edge(q.length, k.length, (q.start - k.start) // step)
    return [tile.shifted(q_start, k_start) for tile in found]


def _check_steps(q: Run, k: Run, step: int) -> None:
    """Check that both runs have this step. Raises: LayoutError if a run has another step."""
    if (q.length > 1 and q.step != step) or (k.length > 1 and k.step != step):
        raise LayoutError(f"runs of step {step}", f"steps {q.step} and {k.step}")


def _join_keys(tiles: list[Tile]) -> list[Tile]:
    """Return full tiles after merging the tiles that have the same rows and adjacent keys."""
    joined: list[Tile] = []
    for tile in sorted(tiles, key=lambda t: (t.q_start, t.q_stop, t.k_start)):
        last = joined[-1] if joined else None
        if last and (last.q_start, last.q_stop, last.k_stop) == (tile.q_start, tile.q_stop, tile.k_start):
            joined[-1] = Tile(last.q_start, last.q_stop, last.k_start, tile.k_stop, False)
        else:
            joined.append(tile)
    return joined


def _join_rows(tiles: list[Tile]) -> list[Tile]:
    """Return full tiles after merging the tiles that have the same keys and adjacent rows."""
    joined: list[Tile] = []
    for tile in sorted(tiles, key=lambda t: (t.k_start, t.k_stop, t.q_start)):
        last = joined[-1] if joined else None
        if last and (last.k_start, last.k_stop, last.q_stop) == (tile.k_start, tile.k_stop, tile.q_start):
            joined[-1] = Tile(last.q_start, tile.q_stop, last.k_start, last.k_stop, False)
        else:
            joined.append(tile)
    return joined
