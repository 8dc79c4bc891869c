"""Checks of 08.runs: a function that cuts the positions of a rank into a few runs of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.growth import measured
from ringlab_course.checking.positions import Question, judge, listed
from ringlab_course.checking.wrong_answers import misconceptions_of
from ringlab_course.exercises.e08_striped_and_zigzag.deal import dealt

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

LARGE = 2048, 4096, 8192
"""Numbers of positions at which memory is measured."""
LONGEST = 131_072
"""The number of positions in the longest shard. Looking up each of these positions in a list takes minutes."""


def chains(positions: np.ndarray, step: int) -> list[tuple[int, int, int]]:
    """Return the fewest runs of this step that hold the positions, in order of their starts."""
    owned = np.sort(positions)
    starts = owned[~np.isin(owned - step, owned)]
    ends = owned[~np.isin(owned + step, owned)]
    order = np.lexsort((ends, ends % step))
    begin = np.lexsort((starts, starts % step))
    pairs = zip(starts[begin].tolist(), ends[order].tolist(), strict=True)
    return sorted((start, step, (end - start) // step + 1) for start, end in pairs)


def _verify(subject: Subject, cases: Sequence[tuple[Any, ...]]) -> None:
    """Check answers to cases (positions, step), or (positions, step, answer) if the call was made already."""

    def ask(positions: Any, step: int, answer: Any = None) -> Question:
        positions = np.array(positions, dtype=np.int64)
        case, truth = f"positions {listed(positions)}, step {step}", chains(positions, step)
        got = _expect_runs(subject.call(positions, step) if answer is None else answer, case, len(positions))
        return Question((positions, step), got, truth, f"{case}: got {_told(got)}, should be {_told(truth)}")

    judge(cases, ask, lambda a, b: a == b, _failure, _read)


def _failure(wrong: Question) -> Failure:
    (positions, step), got = wrong.inputs, wrong.got
    if sorted(got) == wrong.truth:
        return Failure("These are the right runs, but not in order of their starts.", wrong.example)
    if any(run[1] != step for run in got):
        return Failure("Some runs have another step than the one passed in.", wrong.example)
    if any(n < 1 for _, _, n in got):
        return Failure("A run holds at least one position.", wrong.example)
    if sum(n for _, _, n in got) != len(positions):
        return Failure("The lengths of the runs do not add up to the number of positions.", wrong.example)
    held = [start + step * i for start, _, n in got for i in range(n)]
    if sorted(held) != sorted(positions.tolist()):
        return Failure("The runs do not hold each of the positions exactly once.", wrong.example)
    return Failure("The runs hold the right positions, but fewer runs would do.", wrong.example)


def _expect_runs(answer: Any, case: str, most: int) -> list[tuple[int, ...]]:
    """Return the answer as runs of integers. Raises: Failure if it is something else, or has more than `most` runs."""
    if answer is None:
        raise Failure("the result is None: is the `return` missing?")
    if isinstance(answer, np.ndarray) and answer.ndim != 2 and answer.size:
        raise Failure("the result should be a list of runs.", f"{case}: an array of shape {answer.shape}")
    if not isinstance(answer, list | tuple | np.ndarray):
        raise Failure(f"the result should be a list of runs, but is a {type(answer).__name__}.", case)
    if len(answer) > most:
        raise Failure("There are more runs than positions.", f"{case}: {len(answer):,} runs")
    if not all(isinstance(run, list | tuple | np.ndarray) and _is_triple(run) for run in answer):
        raise Failure("every run should be three integers: (start, step, length).", case)
    try:
        return [tuple(int(x) for x in run) for run in answer]
    except (TypeError, ValueError, OverflowError):
        raise Failure("every run should be three integers: (start, step, length).", case) from None


def _read(answer: Any) -> list[tuple[int, ...]]:
    return _expect_runs(answer, "", len(answer) if hasattr(answer, "__len__") else 0)


def _is_triple(run: Any) -> bool:
    return getattr(run, "ndim", 1) == 1 and len(run) == 3


def _told(runs: Sequence[tuple[int, ...]]) -> str:
    return "[" + ", ".join(map(str, runs[:6])) + (", …]" if len(runs) > 6 else "]")


def _check_stretches(subject: Subject, rng: np.random.Generator) -> None:
    cases = [_pieces(rng, 1, [(0, 2)]), _pieces(rng, 1, [(0, 2), (6, 2)]), _pieces(rng, 1, [(0, 3)])]
    gaps = np.cumsum(rng.integers(5, 20, 3)).tolist()
    cases += [_pieces(rng, 1, [(gap, int(rng.integers(1, 5))) for gap in gaps]), _pieces(rng, 1, [(0, 1)])]
    _verify(subject, cases)


def _check_strides(subject: Subject, rng: np.random.Generator) -> None:
    cases = [_pieces(rng, 3, [(0, 3)]), _pieces(rng, 8, [(0, 2), (7, 2)]), _pieces(rng, 6, [(0, 3), (1, 3)])]
    cases += [_pieces(rng, 8, [(2, 3), (5, 2)]), _pieces(rng, 2, [(0, 2), (6, 2)])]
    step = int(rng.integers(4, 12))
    begin = step * int(rng.integers(1, 1000)) + step - 2  # the later run begins with the smaller remainder
    cases += [(np.array(sorted([begin, begin + step, begin + 3, begin + 3 + step])), step)]
    _verify(subject, [*cases, (np.zeros(0, np.int64), int(rng.integers(2, 100_000)))])


def _pieces(rng: np.random.Generator, step: int, runs: Sequence[tuple[int, int]]) -> tuple[np.ndarray, int]:
    """Return the positions of runs (start, length), all moved by the same random number, and the step."""
    held = [start + step * i for start, n in runs for i in range(n)]
    return np.array(sorted(held), dtype=np.int64) + int(rng.integers(10_000)), step


def _check_every_layout(subject: Subject, rng: np.random.Generator) -> None:
    cases = []
    for P in (1, 2, 3, 8):
        for folded in (False, True):
            S, chunk, begin = int(rng.integers(40, 300)), int(rng.integers(1, 9)), int(rng.integers(1000))
            period = P * chunk * (2 if folded else 1)
            cases += [
                (begin + mine, step)
                for mine in dealt(S, P, chunk, folded)
                for step in (1, period)
                if len(mine)
            ]
    _verify(subject, cases)


def _check_memory(subject: Subject, rng: np.random.Generator) -> None:
    _verify(subject, [_large(rng, 64), _pieces(rng, 8, [(0, 3)])])
    cases: list[tuple[Any, ...]] = []

    def peak(n: int) -> int:
        large = _large(rng, n)
        called = subject.measure(*large)
        cases.append((*large, called.answer))
        return called.peak_bytes

    growth = measured(LARGE, peak, 1, LARGE[-1] ** 2)
    if growth.faster_than(1, LARGE[-1] ** 2):
        raise STAGE.misconception("compares_all_pairs").failure(f"shards of S positions, step 8; {growth}")
    _verify(subject, cases)
    try:
        _verify(subject, [_large(rng, LONGEST)])
    except Crashed as crash:
        if "did not end within" not in crash.message:
            raise
        raise STAGE.misconception("compares_all_pairs").failure(
            f"{LONGEST:,} positions: {crash.message}"
        ) from None


def _large(rng: np.random.Generator, n: int) -> tuple[np.ndarray, int]:
    """Return n positions of one rank in a token fold, and the step 8. They form two interleaved runs."""
    return int(rng.integers(100_000)) + dealt(4 * n, 4, 1, True)[1], 8


STAGE = Stage(
    id="08.runs",
    function="runs",
    title="Positions as a few runs",
    hints=(
        "Token p is in your shard. Which other position, if you own it too, comes right before p in the same run?",
        "A run begins at a position p such that p − step is not owned, and ends where p + step is not owned. Sort the "
        "beginnings and the ends by (remainder, position), and they pair up. Or sort all positions by (remainder, position), "
        "and cut wherever the difference is not the step.",
        r"starts $\{p : p - s \notin A\}$, ends $\{p : p + s \notin A\}$, length $(\mathrm{end} - \mathrm{start})/s + 1$",
    ),
    misconceptions=misconceptions_of("08.runs"),
    checks=(
        Check("stretches", 2, "visible", "step 1: stretches of neighbours", _check_stretches),
        Check("strides", 2, "visible", "larger steps: runs that interleave", _check_strides),
        Check("every_layout", 1, "held-out", "the shards of any layout", _check_every_layout),
        Check(
            "memory",
            1,
            "stress",
            "thousands of positions without comparing all pairs",
            _check_memory,
            kind="cost",
        ),
    ),
)
