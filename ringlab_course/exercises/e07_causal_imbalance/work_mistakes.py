"""Common mistakes of 07.work, each with a function that counts the same wrong pairs.

Imitations take the runs of all ranks and return the table [rank, step] that the mistake leads to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e07_causal_imbalance.relation_mistakes import Run, truncated
from ringlab_course.exercises.e07_causal_imbalance.runs import Tuples, positions_of

mistake = mistakes_of("07.work")


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
    mistake("counts_hidden_pairs", _counted(_all)),
    mistake("strictly_before", _counted(_strict)),
    mistake("counts_the_future", _counted(_future)),
    mistake("local_triangle", _counted(_local)),
    mistake("whole_diagonal", _counted(_whole_diagonal)),
    mistake("half_the_square", _counted(_half_square)),
    mistake("columns_by_origin", _counted(_visible, lambda rank, step, P: step)),
    mistake("origin_plus_step", _counted(_visible, lambda rank, step, P: (rank + step) % P)),
    mistake("only_four_kinds", _counted(_by_pairs(_four_kinds(rows=True)))),
    mistake("truncates", _counted(_by_pairs(truncated))),
    mistake("assumes_contiguous", _counted(_by_rank)),
    mistake("first_run_only", _counted(_first_run)),
    mistake("assumes_equal_lengths", _counted(_first_length)),
    mistake("expects_sorted_runs", _counted(_by_ends)),
    mistake("builds_masks"),
    mistake("too_slow"),
    mistake("overflows"),
)
NAMED = {each.name: each for each in MISTAKES}
COUNTED = (
    *MISTAKES,
    replace(NAMED["half_the_square"], imitate=_counted(_half_square_down)),
    replace(NAMED["only_four_kinds"], imitate=_counted(_by_pairs(_four_kinds(rows=False)))),
)
"""What wrong counts are compared with: half a square may have been rounded, a triangle has rows or keys."""
