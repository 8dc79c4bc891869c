"""Common mistakes of 07.work, each with a function that counts the same wrong pairs.

Imitations take the runs of all ranks and return the table [rank, step] that the mistake leads to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ringlab.course.contract import Misconception
from ringlab.course.contracts.e07_relation_mistakes import Run, truncated
from ringlab.course.contracts.e07_runs import Tuples, positions_of


def _counted(count: Any, origin: Any = lambda rank, step, P: (rank - step) % P) -> Any:
    """An imitation that fills the table with count(runs, rank, origin of that step)."""

    def imitate(runs: Tuples) -> np.ndarray:
        P = len(runs)
        table = [[count(runs, rank, origin(rank, step, P)) for step in range(P)] for rank in range(P)]
        return np.array(table, dtype=np.float64)

    return imitate


def _visible(runs: Tuples, rank: int, origin: int) -> int:
    rows, keys = positions_of(runs[rank]), positions_of(runs[origin])
    return int((rows[:, None] >= keys[None, :]).sum())


def _length(runs: Tuples, rank: int) -> int:
    return sum(length for _, _, length in runs[rank])


def _all(runs: Tuples, rank: int, origin: int) -> int:
    return _length(runs, rank) * _length(runs, origin)


def _strict(runs: Tuples, rank: int, origin: int) -> int:
    return _visible(runs, rank, origin) - (_length(runs, rank) if rank == origin else 0)


def _future(runs: Tuples, rank: int, origin: int) -> int:
    return _visible(runs, origin, rank)


def _local(runs: Tuples, rank: int, origin: int) -> int:
    return int(np.tri(_length(runs, rank), _length(runs, origin), dtype=np.int64).sum())


def _by_rank(runs: Tuples, rank: int, origin: int) -> int:
    return _local(runs, rank, origin) if rank == origin else _all(runs, rank, origin) * (origin < rank)


def _whole_diagonal(runs: Tuples, rank: int, origin: int) -> int:
    return _all(runs, rank, origin) if rank == origin else _visible(runs, rank, origin)


def _half_square(runs: Tuples, rank: int, origin: int) -> float:
    return _all(runs, rank, origin) / 2 if rank == origin else _visible(runs, rank, origin)


def _half_square_down(runs: Tuples, rank: int, origin: int) -> int:
    return int(_half_square(runs, rank, origin))


def _first_run(runs: Tuples, rank: int, origin: int) -> int:
    return _visible([own[:1] for own in runs], rank, origin)


def _by_ends(runs: Tuples, rank: int, origin: int) -> int:
    """Skip and full decided by the first and the last run of each shard."""
    if not runs[rank] or not runs[origin]:
        return 0
    (q_first, *_), (k_first, *_) = runs[rank][0], runs[origin][0]
    q_last, k_last = (start + step * (n - 1) for start, step, n in (runs[rank][-1], runs[origin][-1]))
    if q_last < k_first:
        return 0
    return _all(runs, rank, origin) if q_first >= k_last else _visible(runs, rank, origin)


def _first_length(runs: Tuples, rank: int, origin: int) -> int:
    """Every rank's runs cut or stretched to the lengths of rank 0's: what equal lengths would give."""
    lengths = [length for _, _, length in runs[0]]
    even = [
        [(start, step, length) for (start, step, _), length in zip(own, lengths, strict=False)]
        for own in runs
    ]
    return _visible(even, rank, origin)


def _by_pairs(relation: Callable[[Run, Run], np.ndarray]) -> Callable[[Tuples, int, int], int]:
    """A count of what relation(query run, key run) shows, over all pairs of runs."""

    def count(runs: Tuples, rank: int, origin: int) -> int:
        return int(sum(relation(q, k).sum() for q in runs[rank] for k in runs[origin]))

    return count


def _four_kinds(rows: bool) -> Callable[[Run, Run], np.ndarray]:
    """Skip, full, or a triangle of as many rows as the query run has (else: as many as the key run has)."""

    def relation(q: Run, k: Run) -> np.ndarray:
        (q_start, step, n_q), (k_start, _, n_k) = q, k
        if q_start + step * (n_q - 1) < k_start:
            return np.zeros(1)
        if q_start >= k_start + step * (n_k - 1):
            return np.ones((n_q, n_k))
        n = n_q if rows else n_k
        return np.tri(n, n, 0 if q_start >= k_start else -1)

    return relation


MISTAKES = (
    Misconception(
        "counts_hidden_pairs",
        "You counted all pairs of the two shards. Under a causal mask a query meets only keys at or before its own "
        "position; the others are hidden and need not be computed.",
        _counted(_all),
    ),
    Misconception(
        "strictly_before",
        "A token sees itself: a query meets the keys at or before its position, so the diagonal counts.",
        _counted(_strict),
    ),
    Misconception(
        "counts_the_future",
        "Upside down: these are the keys at and after each query. A causal mask lets a query see the keys at and before it, "
        "the lower triangle.",
        _counted(_future),
    ),
    Misconception(
        "local_triangle",
        "Every pair of shards got a triangle by local indices. Row 0 of a shard is not token 0 of the sequence: compare "
        "global positions, which the runs give you.",
        _counted(_local),
    ),
    Misconception(
        "whole_diagonal",
        "A rank's own block was counted whole. Its upper half is hidden. (This is how write-ups get 2P for the busiest rank "
        "against the idlest: it is 2P − 1 in the limit.)",
        _counted(_whole_diagonal),
    ),
    Misconception(
        "half_the_square",
        "A triangle with its diagonal is n(n + 1)/2, not half the square n²/2: one token sees one key, itself.",
        _counted(_half_square),
    ),
    Misconception(
        "columns_by_origin",
        "The columns are owners, not steps. In step t rank r has the block of rank (r − t) mod P; column 0 is everybody's "
        "own block.",
        _counted(_visible, lambda rank, step, P: step),
    ),
    Misconception(
        "origin_plus_step",
        "Blocks move to the right, to rank + 1, so after t hops the block here is that of rank (r − t) mod P, not "
        "(r + t) mod P.",
        _counted(_visible, lambda rank, step, P: (rank + step) % P),
    ),
    Misconception(
        "only_four_kinds",
        "A pair of runs was skipped, full, or a triangle of one run's length, with its diagonal or without. That is all there is "
        "when layouts are dealt. Runs that were cut by hand differ in length and are shifted by any number of rows: "
        "keys before the triangle and rows after it count as well.",
        _counted(_by_pairs(_four_kinds(rows=True))),
    ),
    Misconception(
        "truncates",
        "Rounded towards zero, a shift of −1/4 step becomes 0, and row i counts a key too many where queries begin just before the keys. "
        "Floor division, //, gives −1.",
        _counted(_by_pairs(truncated)),
    ),
    Misconception(
        "assumes_contiguous",
        "You compared ranks: nothing of later ranks, everything of earlier ones. That holds only where rank r owns the r-th "
        "stretch; in other layouts two shards interleave. Compare positions.",
        _counted(_by_rank),
    ),
    Misconception(
        "first_run_only",
        "Only the first run of each rank was counted. A shard may be several runs: every run of the queries meets every run "
        "of the keys.",
        _counted(_first_run),
    ),
    Misconception(
        "assumes_equal_lengths",
        "Every rank was given the lengths of rank 0. Runs may differ in length, and a rank may own nothing: take each run's "
        "own length.",
        _counted(_first_length),
    ),
    Misconception(
        "expects_sorted_runs",
        "Whole shards were skipped or taken whole by their first and last run, as if runs stood in ascending order. Their "
        "order is the order in memory and says nothing: look at every pair of runs.",
        _counted(_by_ends),
    ),
    Misconception(
        "builds_masks",
        "Memory grows with the product of two shards' lengths: you built a mask to count it. At a million tokens it would "
        "not fit anywhere. Rows of a run see one key more each, so a pair of runs can be counted by a formula.",
    ),
    Misconception(
        "too_slow",
        "A million tokens took too long: counting row by row grows with S. A pair of runs needs one formula, "
        "whatever its length.",
    ),
    Misconception(
        "overflows",
        "A million tokens have 5·10¹¹ visible pairs; 32 bits end at 2·10⁹, and float32 is exact up to 2²⁴ only. Count in "
        "int64 or Python's own integers.",
    ),
)
NAMED = {mistake.name: mistake for mistake in MISTAKES}
COUNTED = (
    *MISTAKES,
    replace(NAMED["half_the_square"], imitate=_counted(_half_square_down)),
    replace(NAMED["only_four_kinds"], imitate=_counted(_by_pairs(_four_kinds(rows=False)))),
)
"""What wrong counts are compared with: half a square may have been rounded, a triangle has rows or keys."""
