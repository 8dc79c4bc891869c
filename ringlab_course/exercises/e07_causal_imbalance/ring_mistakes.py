"""The tiles of two runs; common mistakes of 07.ring: the pairs that are visible in a block, and those that are computed.

Imitations take (rank, qs, ks, vs, positions, runs), the shards of all ranks with the global positions
and the runs of their tokens, and compute in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ringlab import oracle
from ringlab_course.checking.numbers import State, attend, fold, merged
from ringlab_course.checking.ring_mistakes import CAUSAL, FORWARD, global_mask
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("07.ring")

Run = tuple[int, int, int]
Bounds = tuple[int, int, int, int, bool]


def mask(q: Run, k: Run) -> np.ndarray:
    """Return 1.0 where the query's global position is at or after the key's: (n_q, n_k)."""
    rows, keys = (start + step * np.arange(length) for start, step, length in (q, k))
    return (rows[:, None] >= keys[None, :]).astype(np.float64)


def drawn(tiles: Iterable[Bounds], n_q: int, n_k: int) -> np.ndarray:
    """Return how often each (query, key) is seen in these tiles: (n_q, n_k)."""
    times = np.zeros((n_q, n_k))
    for q0, q1, k0, k1, causal in tiles:
        block = np.ones((q1 - q0, k1 - k0))
        times[q0:q1, k0:k1] += np.tril(block) if causal else block
    return times


def shift_of(q: Run, k: Run) -> int:
    """Return d, where row i sees the keys j ≤ i + d."""
    return (q[0] - k[0]) // q[1]


def truncated(q: Run, k: Run) -> np.ndarray:
    """Return what is seen when the shift is rounded towards zero: (n_q, n_k)."""
    return np.tri(q[2], k[2], int((q[0] - k[0]) / q[1]))


def positive_is_full(q: Run, k: Run) -> np.ndarray:
    """Return what is seen when any shift of 1 or more counts as full: (n_q, n_k)."""
    return np.ones((q[2], k[2])) if shift_of(q, k) > 0 else mask(q, k)


def canonical(q: Run, k: Run) -> list[Bounds]:
    """Return the tiles of two runs: a full one, or a triangle, the keys before it and the rows after it."""
    shift, (n_q, n_k) = shift_of(q, k), (q[2], k[2])
    if shift <= -n_q:
        return []
    if shift >= n_k - 1:
        return [(0, n_q, 0, n_k, False)]
    first, last = max(0, -shift), min(n_q, n_k - shift)
    tiles = [
        (first, last, first + shift, last + shift, True),
        (first, last, 0, shift, False),
        (last, n_q, 0, n_k, False),
    ]
    return [tile for tile in tiles if tile[1] > tile[0] and tile[3] > tile[2]]


Relation = Callable[[Run, Run], np.ndarray]
OLD = {each.name: each.imitate for each in CAUSAL}


def _as_in_05(name: str) -> Any:
    """The imitation of 05.causal of that name, which knows positions only."""
    imitate = OLD[name]
    assert imitate is not None
    return lambda rank, qs, ks, vs, positions, runs: imitate(rank, qs, ks, vs, positions)


def _over(see: Callable[..., np.ndarray]) -> Callable[..., State]:
    """An imitation in which rank sees of origin's block what see(rank, origin, positions, runs) says."""

    def imitate(rank, qs, ks, vs, positions, runs) -> State:
        order = [(rank - step) % len(ks) for step in range(len(ks))]
        return fold(attend(qs[rank], ks[o], vs[o], see(rank, o, positions, runs)) for o in order)

    return imitate


def _by_runs(relation: Relation) -> Callable[..., State]:
    """An imitation in which relation(query run, key run) says what is seen of every pair of runs."""

    def see(rank, origin, positions, runs) -> np.ndarray:
        seen = np.zeros((len(positions[rank]), len(positions[origin])), dtype=bool)
        row = 0
        for q in runs[rank]:
            key = 0
            for k in runs[origin]:
                seen[row : row + q[2], key : key + k[2]] = relation(q, k).astype(bool)
                key += k[2]
            row += q[2]
        return seen

    return _over(see)


def _shift(q: Run, k: Run) -> int:
    return (q[0] - k[0]) // max(q[1] if q[2] > 1 else 1, k[1] if k[2] > 1 else 1)


def _shifted_is_causal(q: Run, k: Run) -> np.ndarray:
    return np.tri(q[2], k[2]) if _shift(q, k) == -1 else mask(q, k)


def _shifted_is_skip(q: Run, k: Run) -> np.ndarray:
    return np.zeros((q[2], k[2])) if _shift(q, k) == -1 else mask(q, k)


def _no_diagonal(q: Run, k: Run) -> np.ndarray:
    return np.zeros((q[2], k[2])) if q == k else mask(q, k)


def _own_triangle(rank, origin, positions, runs) -> np.ndarray:
    if rank == origin:
        return np.tri(len(positions[rank]), dtype=bool)
    seen = global_mask(rank, origin, positions)
    assert seen is not None
    return seen


def _first_runs(rank, origin, positions, runs) -> np.ndarray:
    """Whole shards related by their first runs, as if each were one run."""
    n, m = len(positions[rank]), len(positions[origin])
    if not n or not m:
        return np.zeros((n, m), dtype=bool)
    return np.tri(n, m, _shift(runs[rank][0], runs[origin][0])).astype(bool)


def _first_query_run(rank, origin, positions, runs) -> np.ndarray:
    seen = global_mask(rank, origin, positions)
    assert seen is not None
    first = runs[rank][0][2] if runs[rank] else 0
    return seen & (np.arange(len(seen)) < first)[:, None]


def _last_block_missing(rank, qs, ks, vs, positions, runs) -> State:
    order = [(rank - step) % len(ks) for step in range(max(1, len(ks) - 1))]
    return fold(attend(qs[rank], ks[o], vs[o], global_mask(rank, o, positions)) for o in order)


def _tiled(
    *,
    row_offset: bool = True,
    key_offset: bool = True,
    overwrite: bool = False,
    backwards: bool = False,
    flag: Callable[[Bounds], bool] = lambda tile: tile[4],
    here: Callable[[int, int, int], int] = lambda rank, step, P: (rank - step) % P,
) -> Callable[..., State]:
    """An imitation that goes through tiles as a right ring does, with one thing left out.

    flag(tile) says whether a tile is attended to as causal; here(rank, step, P) is the rank whose tokens are really there when those of rank − step should be.
    """

    def imitate(rank, qs, ks, vs, positions, runs) -> State:
        q = oracle.float64(qs[rank])
        out, lse = np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
        P = len(ks)
        for step in range(P):
            origin, there = (rank - step) % P, here(rank, step, P)
            if ks[there].shape[-2] != len(positions[origin]):
                raise ValueError("tokens of another rank are more or fewer, and this mistake breaks off")
            k, v = (oracle.float64(x[there]) for x in (ks, vs))
            for row, key, tile in _placed(runs[rank], runs[origin], backwards):
                q0, q1, k0, k1, _ = tile
                row, key = row * row_offset, key * key_offset
                rows, keys = slice(row + q0, row + q1), slice(key + k0, key + k1)
                seen = np.tri(q1 - q0, dtype=bool) if flag(tile) else None
                part = attend(q[..., rows, :], k[..., keys, :], v[..., keys, :], seen)
                if not overwrite:
                    part = merged((out[..., rows, :], lse[..., rows]), part)
                out[..., rows, :], lse[..., rows] = part
        return out, lse

    return imitate


def _placed(q_runs: list[Run], k_runs: list[Run], backwards: bool) -> Iterator[tuple[int, int, Bounds]]:
    """Every tile of two shards, with the local row and key at which its runs begin."""
    row = 0
    for q in q_runs:
        key = 0
        for k in k_runs:
            for tile in canonical(q, k)[:: -1 if backwards else 1]:
                yield row, key, tile
            key += k[2]
        row += q[2]


SEEN = (
    mistake("no_mask", _as_in_05("no_mask")),
    mistake("strictly_before", _as_in_05("strictly_before")),
    mistake("skips_the_diagonal", _by_runs(_no_diagonal)),
    mistake("sees_the_future", _as_in_05("sees_the_future")),
    mistake("local_mask", _as_in_05("local_mask")),
    mistake("masks_own_block_only", _as_in_05("masks_own_block_only")),
    mistake("assumes_contiguous", _as_in_05("assumes_contiguous")),
    mistake("origin_plus_step", _as_in_05("origin_plus_step")),
    mistake("first_run_only", _over(_first_runs)),
    mistake("first_query_run", _over(_first_query_run)),
    mistake("own_block_is_a_triangle", _over(_own_triangle)),
    mistake("shifted_is_causal", _by_runs(_shifted_is_causal)),
    mistake("shifted_is_skip", _by_runs(_shifted_is_skip)),
    mistake("last_block_missing", _last_block_missing),
    mistake("overwrites_rows", _tiled(overwrite=True)),
    mistake("forgets_the_row_offset", _tiled(row_offset=False)),
    mistake("forgets_the_key_offset", _tiled(key_offset=False)),
    mistake("forgets_both_offsets", _tiled(row_offset=False, key_offset=False)),
    mistake("no_tile_is_causal", _tiled(flag=lambda tile: False)),
    mistake("square_is_causal", _tiled(flag=lambda tile: tile[1] - tile[0] == tile[3] - tile[2])),
    mistake("sends_own_block_again", _tiled(here=lambda rank, step, P: (rank - min(step, 1)) % P)),
    mistake("never_uses_the_visitor", _tiled(here=lambda rank, step, P: rank)),
)
COMPARED = (
    *SEEN,
    *(
        replace(mistake, imitate=_tiled(overwrite=True, backwards=True))
        for mistake in SEEN
        if mistake.name == "overwrites_rows"
    ),
)
"""What wrong values are compared with: overwriting shows the last tile, and tiles come in any order."""

DONE = (
    mistake("relation_first"),
    mistake("computes_hidden_blocks"),
    mistake("leaves_the_ring"),
    mistake("assumes_equal_lengths"),
    mistake("nan_in_blind_rows"),
)
KEPT = (
    "sends_p_times",
    "gathers_everything",
    "repeats_heads_on_the_wire",
    "sends_too_many_bytes",
    "does_not_unpack",
    "never_waits",
    "splits_the_exchange",
)
MISTAKES = (*SEEN, *DONE, *(each for each in FORWARD if each.name in KEPT))
NAMED = {each.name: each for each in MISTAKES}
