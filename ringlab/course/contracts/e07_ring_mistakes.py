"""Common mistakes of 07.ring: what is seen of a block that is here, and what is computed of it.

Imitations take (rank, qs, ks, vs, positions, runs), the shards of all ranks with the global positions
and the runs of their tokens, and compute in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ringlab import oracle
from ringlab.course.contract import Misconception
from ringlab.course.contracts.e05_mistakes import State, attend, fold, merged
from ringlab.course.contracts.e05_ring_mistakes import CAUSAL, FORWARD, global_mask
from ringlab.course.contracts.e07_relation_mistakes import Bounds, Run, canonical, mask

Relation = Callable[[Run, Run], np.ndarray]
OLD = {mistake.name: mistake.imitate for mistake in CAUSAL}


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


def _last_block_missing(rank, qs, ks, vs, positions, runs) -> State:
    order = [(rank - step) % len(ks) for step in range(max(1, len(ks) - 1))]
    return fold(attend(qs[rank], ks[o], vs[o], global_mask(rank, o, positions)) for o in order)


def _tiled(
    *,
    row_offset: bool = True,
    key_offset: bool = True,
    overwrite: bool = False,
    backwards: bool = False,
    here: Callable[[int, int, int], int] = lambda rank, step, P: (rank - step) % P,
) -> Callable[..., State]:
    """An imitation that goes through tiles as the learner's ring does, with one thing left out.

    here(rank, step, P) is the rank whose tokens are really there when those of rank − step should be.
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
                q0, q1, k0, k1, causal = tile
                row, key = row * row_offset, key * key_offset
                rows, keys = slice(row + q0, row + q1), slice(key + k0, key + k1)
                seen = np.tri(q1 - q0, dtype=bool) if causal else None
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
    Misconception(
        "no_mask",
        "Every block was attended to whole: queries see keys that come after them.",
        _as_in_05("no_mask"),
    ),
    Misconception(
        "strictly_before",
        "A token does not see itself here: the triangle of a run with itself holds its diagonal, position ≥ position.",
        _as_in_05("strictly_before"),
    ),
    Misconception(
        "skips_the_diagonal",
        "The triangle of a run with itself was left out. Your own block is the one block that every rank has work in, in step 0.",
        _by_runs(_no_diagonal),
    ),
    Misconception(
        "sees_the_future",
        "Upside down: queries see the keys at and after their own position.",
        _as_in_05("sees_the_future"),
    ),
    Misconception(
        "local_mask",
        "Every block got a triangle by local index. Row 0 of a shard is not token 0: relate the runs by their global "
        "starts.",
        _as_in_05("local_mask"),
    ),
    Misconception(
        "masks_own_block_only",
        "Only your own block was masked and visitors were seen whole, those from the future too.",
        _as_in_05("masks_own_block_only"),
    ),
    Misconception(
        "assumes_contiguous",
        "Blocks were taken whole or skipped by comparing ranks. That is right only for contiguous shards; in other layouts a later rank "
        "owns earlier tokens as well. Compare runs.",
        _as_in_05("assumes_contiguous"),
    ),
    Misconception(
        "origin_plus_step",
        "The mask belongs to another block than the one that is here: after `step` hops to the right it is that of rank − step, "
        "ring.origin(step).",
        _as_in_05("origin_plus_step"),
    ),
    Misconception(
        "first_run_only",
        "Two shards were related by their first runs, as if each were one run. With several runs every pair of "
        "runs has a relation of its own.",
        _over(_first_runs),
    ),
    Misconception(
        "own_block_is_a_triangle",
        "Your own block was taken for one big triangle. It is one only where the shard's positions ascend: in a token fold they "
        "may read 0, 4, 8, 3, 7, 11, and row 1 sees key 3.",
        _over(_own_triangle),
    ),
    Misconception(
        "shifted_is_causal",
        "Where queries begin just before the keys you took a plain triangle: row i then sees key i, which comes after it. It is causal "
        "shifted by one: q[1:] with k[:-1].",
        _by_runs(_shifted_is_causal),
    ),
    Misconception(
        "shifted_is_skip",
        "Runs of queries that begin just before the keys were skipped. Only their first row sees nothing; row 1 sees key 0, and so on: "
        "causal shifted by one.",
        _by_runs(_shifted_is_skip),
    ),
    Misconception(
        "last_block_missing",
        "The last block to arrive was not attended to: P − 1 hops, but P blocks. To your last rank it is as visible as any.",
        _last_block_missing,
    ),
    Misconception(
        "overwrites_rows",
        "What a row had from other tiles was overwritten by the last tile it is in. A row meets many keys, tile by tile: merge each "
        "Partial into the state's rows with merge_into.",
        _tiled(overwrite=True),
    ),
    Misconception(
        "forgets_the_row_offset",
        "Rows of later runs were computed as if their run began at row 0 of the shard. The rows of a tile count within its run: add the "
        "lengths of the query runs before it.",
        _tiled(row_offset=False),
    ),
    Misconception(
        "forgets_the_key_offset",
        "Keys of later runs were taken as if their run began at key 0 of the block. The keys of a tile count within its run: add the "
        "lengths of the key runs before it.",
        _tiled(key_offset=False),
    ),
    Misconception(
        "sends_own_block_again",
        "Every step sent your own K/V again, so the neighbour's block is all you ever see, taken for blocks of other ranks. Pass on what "
        "arrived. (With two ranks nobody notices.)",
        _tiled(here=lambda rank, step, P: (rank - min(step, 1)) % P),
    ),
    Misconception(
        "never_uses_the_visitor",
        "Every step used your own K/V again, taken for the block of another rank. What shift returns is a new pair of tensors: "
        "go on with those.",
        _tiled(here=lambda rank, step, P: rank),
    ),
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
    Misconception(
        "relation_first",
        "First make 07.relation hold: `tiles_between` is wrong for small runs already, and a ring computes what it says. What is wrong "
        "in the ring itself, if anything, shows after that.",
    ),
    Misconception(
        "computes_hidden_blocks",
        "Keys that no tile of these rows holds have touched them: hidden pairs were computed and their weight 0 multiplied. (The "
        "probe puts NaN there, and 0 · NaN is NaN.) Leave hidden tiles out: pass each pair of runs to attend in tiles.",
    ),
    Misconception(
        "leaves_the_ring",
        "A rank left the ring, or did not pass a block on, while another one waited for it. Who sees nothing of a block "
        "skips the computation, never the exchange: somebody behind needs that block.",
    ),
    Misconception(
        "assumes_equal_lengths",
        "Shards have different lengths, and the buffer for what arrives was as long as what is sent: "
        "ring.shift(k, v, length=…) takes the number of tokens of the block due next, the sum over its runs.",
    ),
    Misconception(
        "nan_in_blind_rows",
        "There is a NaN although all inputs are finite. That comes of attending with a row that has no key to see: −inf − (−inf) is NaN. "
        "Tiles have no such rows: those that see nothing are cut off, and keep (0, −inf).",
    ),
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
MISTAKES = (*SEEN, *DONE, *(mistake for mistake in FORWARD if mistake.name in KEPT))
NAMED = {mistake.name: mistake for mistake in MISTAKES}
