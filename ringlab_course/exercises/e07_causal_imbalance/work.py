"""Checks of 07.work: how many visible pairs every rank computes in every step of the ring; its common mistakes.

Exercise 07 writes a run as a tuple (start, step, length) and gives each rank a list of them. Imitations take the runs
of all ranks and return the wrong table [rank, step].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from ringlab import layout as layouts
from ringlab.errors import apart
from ringlab.layout import Layout
from ringlab.plan import work
from ringlab_course.checking.answers import expect_array
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure, NotWritten
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e07_causal_imbalance.ring_mistakes import Run, positive_is_full, truncated

Tuples = list[list[tuple[int, int, int]]]


def runs_of(layout: Layout) -> Tuples:
    """Return the runs of every rank as tuples."""
    return [[(run.start, run.step, run.length) for run in layout.runs(rank)] for rank in range(layout.P)]


def positions_of(runs: list[tuple[int, int, int]]) -> np.ndarray:
    """Return the global positions of one rank's runs in local order, int64."""
    parts = [start + step * np.arange(length, dtype=np.int64) for start, step, length in runs]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def token_fold(S: int, P: int) -> Layout:
    """Return the layout that deals single tokens 0..P−1, P−1..0, and so on."""
    return layouts.dealt(S, P, chunk=1, folded=True, name="token fold")


def shuffled(rng: np.random.Generator, S: int, P: int) -> Layout:
    """Return a layout without any order: every token is a run of its own, on a rank drawn by chance."""
    owners = rng.integers(0, P, S)
    order = rng.permutation(S)
    ranks = tuple(
        tuple(layouts.Run(int(token), 1, 1) for token in order if owners[token] == r) for r in range(P)
    )
    return Layout(S, P, "shuffled", ranks)


def cut(rng: np.random.Generator, S: int, P: int, step: int) -> Layout:
    """Return a layout by hand: every residue of `step` is cut into runs of any length, for any ranks."""
    ranks: list[list[layouts.Run]] = [[] for _ in range(P)]
    for residue in range(step):
        tokens = range(residue, S, step)
        places = sorted({0, len(tokens), *map(int, rng.integers(0, len(tokens) + 1, 2))})
        for begin, end in pairwise(places):
            ranks[int(rng.integers(P))].append(layouts.Run(tokens[begin], step, end - begin))
    order = [tuple(own[i] for i in rng.permutation(len(own))) for own in ranks]
    return Layout(S, P, f"cut by hand, step {step}", tuple(order))


def by_hand(*ranks: list[tuple[int, int, int]]) -> Layout:
    """Return the layout in which rank r owns the runs `ranks[r]`."""
    S = sum(length for own in ranks for _, _, length in own)
    return Layout(S, len(ranks), "by hand", tuple(tuple(layouts.Run(*run) for run in own) for own in ranks))


def stretches(rng: np.random.Generator, P: int, longest: int) -> Layout:
    """Return a contiguous layout whose ranks own stretches of 2 to `longest` tokens each."""
    lengths = rng.integers(2, longest + 1, P).tolist()
    runs = [[(end - n, 1, n)] for end, n in zip(np.cumsum(lengths).tolist(), lengths, strict=True)]
    return replace(by_hand(*runs), name="contiguous")


def described(layout: Layout, runs: Tuples | None = None) -> str:
    """Return a layout in words, with the runs of every rank where they are few."""
    runs = runs or runs_of(layout)
    text = f"{layout.name}, S={layout.S}, P={layout.P}"
    if sum(map(len, runs)) > 8:
        return text
    owned = "; ".join(
        f"rank {rank} has {', '.join(map(str, own)) or 'nothing'}" for rank, own in enumerate(runs)
    )
    return f"{text}: {owned}"


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


def _rows(q: Run, k: Run) -> np.ndarray:
    return (q[0] - k[0]) // q[1] + 1 + np.arange(q[2])


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
    mistake("positive_is_full", _counted(_by_pairs(positive_is_full))),
    mistake("not_capped", _counted(_by_pairs(lambda q, k: np.maximum(_rows(q, k), 0)))),
    mistake("negative_rows", _counted(_by_pairs(lambda q, k: np.minimum(_rows(q, k), k[2])))),
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


MANY = 1_000_003
"""Tokens, at least: too many for a mask of S × S."""


def truth(layout: Layout) -> np.ndarray:
    """Return the visible pairs, int64 (P, P) [rank, step]: those of the plan that ringlab runs by."""
    P = layout.P
    return np.array([[work(layout, rank, (rank - step) % P) for step in range(P)] for rank in range(P)])


def _verify(subject: Any, rng: np.random.Generator, cases: Iterable[Layout]) -> None:
    """Compare the table with the plan's for each layout, the smallest first."""
    compare_all((_answered(subject, rng, layout) for layout in cases), COUNTED)


def _answered(subject: Any, rng: np.random.Generator, layout: Layout) -> Answered:
    runs = _later(rng, layout)
    answer = _counts(subject.call(runs), layout.P)
    return Answered(answer, truth(layout), 0.0, (runs,), ("pairs [rank, step]",), described(layout, runs))


def _later(rng: np.random.Generator, layout: Layout) -> Tuples:
    """Return the layout's runs as those of a piece of a longer sequence, which begins at any position."""
    begin = int(rng.integers(10_000))
    return [[(begin + start, step, n) for start, step, n in own] for own in runs_of(layout)]


def _counts(answer: Any, P: int) -> np.ndarray:
    """Return the answer as an array (P, P). Raises: Failure where it is not one, or holds fractions."""
    counts = expect_array(answer, (P, P))
    if counts.dtype.kind not in "iu":
        raise Failure(
            f"the result should be an array of whole numbers, int64, but its dtype is {counts.dtype}."
        )
    return counts


def _check_contiguous(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, rng, [stretches(rng, P, longest) for P, longest in ((2, 4), (3, 6), (4, 9), (5, 30))])


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    """Runs that interleave, and more than one on a rank."""
    cases = []
    for P, most in ((2, 4), (2, 9), (3, 9), (4, 20)):
        S = 2 * P * int(rng.integers(2, most))
        cases += [layouts.striped(S, P), layouts.zigzag(S, P), token_fold(S, P), layouts.dealt(S, P, chunk=2)]
    _verify(subject, rng, cases)


def _check_ragged(subject: Any, rng: np.random.Generator) -> None:
    cases = [layouts.contiguous(3, 2), layouts.contiguous(2, 3), layouts.striped(5, 2), layouts.zigzag(7, 3)]
    cases += [layouts.contiguous(int(rng.integers(1, 40)), 1)]
    for S in map(int, rng.integers(9, 40, 6)):
        P, chunk, folded = int(rng.integers(2, 9)), int(rng.integers(1, 6)), bool(rng.integers(2))
        cases.append(layouts.dealt(S, P, chunk=chunk, folded=folded))
    _verify(subject, rng, cases)


def _check_cut(subject: Any, rng: np.random.Generator) -> None:
    """Runs of different lengths that interleave, by any shift and in any order: no dealing makes these."""
    small = [by_hand([(0, 1, 1), (2, 1, 1)], [(1, 1, 1)]), by_hand([(1, 2, 3)], [(4, 2, 1), (0, 2, 2)])]
    small += [by_hand([(0, 3, 5)], [(7, 3, 3), (1, 3, 2)], [(2, 3, 4), (14, 3, 1)])]
    sizes = ((9, 2, 2), (14, 2, 3), (20, 3, 3), (31, 3, 2), (40, 4, 5))
    _verify(subject, rng, [*small, *(cut(rng, S, P, step) for S, P, step in sizes)])


def _check_shuffled(subject: Any, rng: np.random.Generator) -> None:
    """Every token a run of its own, anywhere: runs in no order, and many."""
    _verify(subject, rng, [shuffled(rng, S, P) for S, P in ((9, 2), (16, 3), (40, 5))])


def _check_memory(subject: Any, rng: np.random.Generator) -> None:
    """A mask of two shards takes 4 MiB here as bool; allowed are a mebibyte and eight numbers a token."""
    try:
        _verify(subject, rng, [stretches(rng, 3, 6)])
    except NotWritten:
        raise
    except Failure:
        raise Failure("memory counts once the values are right.") from None
    _expect_no_masks(subject, rng)


def _expect_no_masks(subject: Any, rng: np.random.Generator) -> None:
    layout = layouts.contiguous(4096 + int(rng.integers(256)), 2)
    runs = _later(rng, layout)
    peak, allowed = _peak(subject, layout, runs), (1 << 20) + 64 * layout.S
    if peak > allowed:  # a second look: chance (an import, the collector) only ever adds
        peak = min(peak, _peak(subject, layout, runs))
    if peak > allowed:
        used, most = apart(peak / 2**20, allowed / 2**20, digits=2, kind="f")
        example = f"{described(layout)}: peak {used} MiB, allowed {most} MiB"
        raise NAMED["builds_masks"].failure(example)


def _peak(subject: Any, layout: Layout, runs: Tuples) -> int:
    """Return the peak of memory of one call. Raises: Failure where that call counts wrongly."""
    called = subject.measure(runs)
    _expect_exact(called.answer, layout, "Thousands of tokens are counted wrongly.")
    return int(called.peak_bytes)


def _check_million(subject: Any, rng: np.random.Generator) -> None:
    _expect_no_masks(subject, rng)  # those of a million tokens would fill the machine
    for make in (layouts.contiguous, layouts.striped, layouts.zigzag):
        layout = make(MANY + int(rng.integers(1000)), 8)
        try:
            answer = subject.call(_later(rng, layout))
        except Crashed as crash:
            raise _named_crash(crash, described(layout)) from None
        _expect_exact(answer, layout, "A million tokens are counted wrongly.")


def _expect_exact(answer: Any, layout: Layout, message: str) -> None:
    got, right = _counts(answer, layout.P).astype(np.float64), truth(layout)
    if np.array_equal(got, right):
        return
    rank, step = np.argwhere(got != right)[0]
    found, wanted = apart(got[rank, step], right[rank, step], digits=0, kind="f")
    example = f"{described(layout)}: rank {rank}, step {step}: got {found}, expected {wanted}"
    if _overflown(got, right):
        raise NAMED["overflows"].failure(example)
    raise Failure(message, example)


def _named_crash(crash: Crashed, case: str) -> Failure:
    """Return the failure for a submission that ran out of time or memory; others as they are."""
    if "did not end within" in crash.message:
        return NAMED["too_slow"].failure(f"{case}: {crash.message}")
    if "of memory" in crash.message or "MemoryError" in crash.message:
        return NAMED["builds_masks"].failure(f"{case}: {crash.message}")
    return crash


def _overflown(got: np.ndarray, right: np.ndarray) -> bool:
    """Whether every entry is right modulo 2³², or right but for the digits that float32 lacks."""
    wrapped = np.array_equal(np.mod(got, 2.0**32), np.mod(right.astype(np.float64), 2.0**32))
    return wrapped or bool(np.allclose(got, right, rtol=1e-5, atol=0.0))


HINTS = (
    "Query i of a run has the position start + step·i. How many keys of another run with the same step are at or "
    "before it?",
    "Take one run of queries and one of keys. d = (q start − k start) // step says how many rows the queries are "
    "ahead. Row i sees i + d + 1 keys, but never fewer than 0 and never more than there are. Sum that over i by a "
    "formula, then over all pairs of runs. Column t of row r belongs to the block of rank (r − t) mod P.",
    r"$\sum_{i=0}^{n_q-1} \min\bigl(\max(i+d+1,\,0),\,n_k\bigr)$, with "
    r"$\sum_{j=1}^{m} j = \tfrac{m(m+1)}{2}$ for the rows that are cut by neither end",
)

STAGE = Stage(
    id="07.work",
    function="work_per_step",
    title="Who computes how much, and when",
    hints=HINTS,
    misconceptions=MISTAKES,
    checks=(
        Check("contiguous", 2, "visible", "rank r owns the r-th stretch of tokens", _check_contiguous),
        Check(
            "layouts",
            2,
            "visible",
            "striped, folded and zig-zag: interleaved runs, several of them",
            _check_layouts,
        ),
        Check("ragged", 1, "visible", "shards of different lengths, ranks without a token", _check_ragged),
        Check("cut", 1, "visible", "runs of different lengths, with any shift, in any order", _check_cut),
        Check("memory", 1, "visible", "counted without a mask", _check_memory, kind="cost"),
        Check("million", 1, "stress", "a million tokens, exactly", _check_million),
        Check("shuffled", 1, "held-out", "tokens dealt at random, each of them a run", _check_shuffled),
    ),
)
