"""Checks of 07.work: the number of visible pairs that every rank computes in every step of the ring."""

from __future__ import annotations

from collections.abc import Iterable
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
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of
from ringlab_course.exercises.e07_causal_imbalance.runs import (
    Tuples,
    by_hand,
    cut,
    described,
    runs_of,
    shuffled,
    stretches,
    token_fold,
)

mistake = mistakes_of("07.work")

MANY = 1_000_003
"""The least number of tokens in `_check_million`, too many for a mask of S × S."""


def truth(layout: Layout) -> np.ndarray:
    """Return the visible pairs as ringlab's own plan counts them, int64 (P, P) [rank, step]."""
    P = layout.P
    return np.array([[work(layout, rank, (rank - step) % P) for step in range(P)] for rank in range(P)])


def _verify(subject: Any, rng: np.random.Generator, cases: Iterable[Layout]) -> None:
    """Compare the table with that of ringlab's plan for each layout; the smallest layouts come first."""
    compare_all(_answered(subject, rng, layout) for layout in cases)


def _answered(subject: Any, rng: np.random.Generator, layout: Layout) -> Answered:
    runs = _later(rng, layout)
    answer = _counts(subject.call(runs), layout.P)
    return Answered(answer, truth(layout), 0.0, names=("pairs [rank, step]",), text=described(layout, runs))


def _later(rng: np.random.Generator, layout: Layout) -> Tuples:
    """Return the layout's runs, all moved by the same number of tokens, as in a part of a longer sequence."""
    begin = int(rng.integers(10_000))
    return [[(begin + start, step, n) for start, step, n in own] for own in runs_of(layout)]


def _counts(answer: Any, P: int) -> np.ndarray:
    """Return the answer as an array (P, P).

    Raises: Failure if it has another shape, or a dtype that is not one of integers.
    """
    counts = expect_array(answer, (P, P))
    if counts.dtype.kind not in "iu":
        raise Failure(
            f"the result should be an array of whole numbers, int64, but its dtype is {counts.dtype}."
        )
    return counts


def _check_contiguous(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, rng, [stretches(rng, P, longest) for P, longest in ((2, 4), (3, 6), (4, 9), (5, 30))])


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    """Try layouts whose runs interleave, some with several runs on a rank."""
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
    """Try runs of different lengths that interleave, with any shift and in any order; dealing makes no such layouts."""
    small = [by_hand([(0, 1, 1), (2, 1, 1)], [(1, 1, 1)]), by_hand([(1, 2, 3)], [(4, 2, 1), (0, 2, 2)])]
    small += [by_hand([(0, 3, 5)], [(7, 3, 3), (1, 3, 2)], [(2, 3, 4), (14, 3, 1)])]
    sizes = ((9, 2, 2), (14, 2, 3), (20, 3, 3), (31, 3, 2), (40, 4, 5))
    _verify(subject, rng, [*small, *(cut(rng, S, P, step) for S, P, step in sizes)])


def _check_shuffled(subject: Any, rng: np.random.Generator) -> None:
    """Try layouts in which every token is a run of its own, on any rank and in any order."""
    _verify(subject, rng, [shuffled(rng, S, P) for S, P in ((9, 2), (16, 3), (40, 5))])


def _check_memory(subject: Any, rng: np.random.Generator) -> None:
    """Check that the peak is at most 1 MiB plus eight numbers for each token.

    Here the mask of two shards takes 4 MiB, even as bool.
    """
    try:
        _verify(subject, rng, [stretches(rng, 3, 6)])
    except NotWritten:
        raise
    except Failure:
        raise Failure("memory is checked only when the values are right.") from None
    _expect_no_masks(subject, rng)


def _expect_no_masks(subject: Any, rng: np.random.Generator) -> None:
    layout = layouts.contiguous(4096 + int(rng.integers(256)), 2)
    runs = _later(rng, layout)
    peak, allowed = _peak(subject, layout, runs), (1 << 20) + 64 * layout.S
    if peak > allowed:  # measure again: an import or the collector may have added to the peak
        peak = min(peak, _peak(subject, layout, runs))
    if peak > allowed:
        used, most = apart(peak / 2**20, allowed / 2**20, digits=2, kind="f")
        example = f"{described(layout)}: peak {used} MiB, allowed {most} MiB"
        raise mistake("builds_masks").failure(example)


def _peak(subject: Any, layout: Layout, runs: Tuples) -> int:
    """Return the peak of memory of one call, in bytes. Raises: Failure if this call counts wrongly."""
    called = subject.measure(runs)
    _expect_exact(called.answer, layout, "Thousands of tokens are counted wrongly.")
    return int(called.peak_bytes)


def _check_million(subject: Any, rng: np.random.Generator) -> None:
    _expect_no_masks(
        subject, rng
    )  # checked first, because an answer that makes masks would fill the memory in the runs below
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
        raise mistake("overflows").failure(example)
    raise Failure(message, example)


def _named_crash(crash: Crashed, case: str) -> Failure:
    """Return the named mistake of an answer that ran out of time or memory.

    Any other crash is returned unchanged.
    """
    if "did not end within" in crash.message:
        return mistake("too_slow").failure(f"{case}: {crash.message}")
    if "of memory" in crash.message or "MemoryError" in crash.message:
        return mistake("builds_masks").failure(f"{case}: {crash.message}")
    return crash


def _overflown(got: np.ndarray, right: np.ndarray) -> bool:
    """Return whether every entry is right modulo 2³², or right up to the precision of float32."""
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
    misconceptions=misconceptions_of("07.work"),
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
