"""Checks of 08.deal and 08.runs: who owns which token, and the runs that a rank stores them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.growth import measured
from ringlab_course.checking.positions import (
    Question,
    expect_owned_once,
    expect_shares,
    first_difference,
    judge,
    listed,
    mistake_in,
    same_sets,
    same_shares,
)
from ringlab_course.exercises.e08_striped_and_zigzag.layout_mistakes import DEAL, RUNS, chains, dealt

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

NAMED = {mistake.name: mistake for mistake in (*DEAL, *RUNS)}
LARGE = 2048, 4096, 8192
LONGEST = 131_072
"""Positions of the longest shard: a search in a list for each of them takes minutes."""


def _judge_deal(subject: Subject, cases: Sequence[tuple[int, int, int, bool]]) -> None:
    def ask(S: int, P: int, chunk: int, folded: bool) -> Question:
        case = f"S={S}, P={P}, chunk={chunk}, folded={folded}"
        shares, truth = expect_shares(subject.call(S, P, chunk, folded), P), dealt(S, P, chunk, folded)
        return Question((S, P, chunk, folded), shares, truth, first_difference(shares, truth, case))

    judge(cases, ask, same_shares, _explain_deal)


def _explain_deal(answered: list[Question], wrong: Question) -> Failure:
    if mistake := mistake_in(answered, DEAL, same_sets):
        return mistake.failure(wrong.example)
    if same_sets(wrong.got, wrong.truth):
        return NAMED["not_ascending"].failure(wrong.example)
    try:
        expect_owned_once(wrong.got, wrong.inputs[0], wrong.example.split(":")[0])
    except Failure as failure:
        return failure
    return Failure(
        "Every token is owned once, but some by another rank than the one it is dealt to.", wrong.example
    )


def _check_round_robin(subject: Subject, rng: np.random.Generator) -> None:
    _judge_deal(subject, [_dividing(rng, P, most, False) for P, most in ((2, 3), (3, 5), (5, 9), (4, 9))])


def _check_folded(subject: Subject, rng: np.random.Generator) -> None:
    _judge_deal(subject, [_dividing(rng, P, most, True) for P, most in ((3, 3), (2, 5), (4, 5), (5, 9))])


def _dividing(rng: np.random.Generator, P: int, most: int, folded: bool) -> tuple[int, int, int, bool]:
    """Return S, P, chunk and folded for up to a hundred whole turns of pieces of 1 to `most` tokens."""
    chunk = int(rng.integers(2 if most > 5 else 1, most + 1))
    return P * chunk * int(rng.integers(3, 100)), P, chunk, folded


def _check_ragged(subject: Subject, rng: np.random.Generator) -> None:
    cases = []
    for folded in (False, True):
        for P in (2, 3, 5):
            chunk = int(rng.integers(2, 6))
            turns, pieces, rest = (
                int(rng.integers(2, 60)),
                int(rng.integers(1, P)),
                int(rng.integers(1, chunk)),
            )
            cases.append((P * chunk * turns + chunk * pieces + rest, P, chunk, folded))
        P, chunk = int(rng.integers(5, 10)), int(rng.integers(2, 100))
        cases.append((chunk * int(rng.integers(1, P - 1)) + int(rng.integers(1, chunk)), P, chunk, folded))
        cases.append((0, int(rng.integers(2, 9)), int(rng.integers(1, 10_000)), folded))
        cases.append((int(rng.integers(20, 500)), 1, int(rng.integers(1, 20)), folded))
    _judge_deal(subject, cases)


def _check_any(subject: Subject, rng: np.random.Generator) -> None:
    cases = [
        (int(rng.integers(100, 2000)), P, int(rng.integers(1, 20)), folded)
        for P in (3, 8, 2, 1)
        for folded in (False, True)
        for _ in range(4)
    ]
    _judge_deal(subject, [*cases, (30_011 + int(rng.integers(1000)), 8, 1, True)])


def _case(positions: np.ndarray, step: int) -> str:
    return f"positions {listed(positions)}, step {step}"


def _judge_runs(subject: Subject, cases: Sequence[tuple[Any, ...]]) -> None:
    """Judge cases (positions, step), or (positions, step, answer) where the answer is there already."""

    def ask(positions: Any, step: int, answer: Any = None) -> Question:
        positions = np.array(positions, dtype=np.int64)
        case, truth = _case(positions, step), chains(positions, step)
        got = _expect_runs(subject.call(positions, step) if answer is None else answer, case, len(positions))
        return Question((positions, step), got, truth, f"{case}: got {_told(got)}, should be {_told(truth)}")

    judge(cases, ask, lambda a, b: a == b, _explain_runs)


def _explain_runs(answered: list[Question], wrong: Question) -> Failure:
    (positions, step), got = wrong.inputs, wrong.got
    if mistake := mistake_in(answered, RUNS, lambda a, b: a == b):
        return mistake.failure(wrong.example)
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
    """Return the answer as runs of integers. Raises: Failure where it is not that, or holds more than `most` runs."""
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


def _is_triple(run: Any) -> bool:
    return getattr(run, "ndim", 1) == 1 and len(run) == 3


def _told(runs: Sequence[tuple[int, ...]]) -> str:
    return "[" + ", ".join(map(str, runs[:6])) + (", …]" if len(runs) > 6 else "]")


def _check_stretches(subject: Subject, rng: np.random.Generator) -> None:
    cases = [_pieces(rng, 1, [(0, 2)]), _pieces(rng, 1, [(0, 2), (6, 2)]), _pieces(rng, 1, [(0, 3)])]
    gaps = np.cumsum(rng.integers(5, 20, 3)).tolist()
    cases += [_pieces(rng, 1, [(gap, int(rng.integers(1, 5))) for gap in gaps]), _pieces(rng, 1, [(0, 1)])]
    _judge_runs(subject, cases)


def _check_strides(subject: Subject, rng: np.random.Generator) -> None:
    cases = [_pieces(rng, 3, [(0, 3)]), _pieces(rng, 8, [(0, 2), (7, 2)]), _pieces(rng, 6, [(0, 3), (1, 3)])]
    cases += [_pieces(rng, 8, [(2, 3), (5, 2)]), _pieces(rng, 2, [(0, 2), (6, 2)])]
    step = int(rng.integers(4, 12))
    begin = step * int(rng.integers(1, 1000)) + step - 2  # the later run begins with the smaller remainder
    cases += [(np.array(sorted([begin, begin + step, begin + 3, begin + 3 + step])), step)]
    _judge_runs(subject, [*cases, (np.zeros(0, np.int64), int(rng.integers(2, 100_000)))])


def _pieces(rng: np.random.Generator, step: int, runs: Sequence[tuple[int, int]]) -> tuple[np.ndarray, int]:
    """Return the positions of runs (start, length) in a sequence that begins a random number of tokens earlier."""
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
    _judge_runs(subject, cases)


def _check_memory(subject: Subject, rng: np.random.Generator) -> None:
    _judge_runs(subject, [_large(rng, 64)])
    cases: list[tuple[Any, ...]] = []

    def peak(n: int) -> int:
        large = _large(rng, n)
        called = subject.measure(*large)
        cases.append((*large, called.answer))
        return called.peak_bytes

    growth = measured(LARGE, peak, order=1)
    if growth.faster_than(1):
        raise NAMED["compares_all_pairs"].failure(f"shards of S positions, step 8; {growth}")
    _judge_runs(subject, cases)
    try:
        _judge_runs(subject, [_large(rng, LONGEST)])
    except Crashed as crash:
        if "did not end within" not in crash.message:
            raise
        raise NAMED["compares_all_pairs"].failure(f"{LONGEST:,} positions: {crash.message}") from None


def _large(rng: np.random.Generator, n: int) -> tuple[np.ndarray, int]:
    """Return n positions of a token fold, in two runs of step 8 that interleave."""
    return int(rng.integers(100_000)) + dealt(4 * n, 4, 1, True)[1], 8


DEAL_STAGE = Stage(
    id="08.deal",
    function="deal",
    title="One family of layouts",
    hints=(
        "Which piece does token t belong to? Which rank gets piece i in a forward turn, and which in a backward turn?",
        "Work out the owner of every token at once. The piece of a token is its position // chunk. The owner of a piece "
        "depends on its place in a period of P pieces, or of 2P. Then ask for each rank which tokens it owns.",
        r"$\mathrm{owner}(t) = j$ with $j = \lfloor t/c \rfloor \bmod P$; folded: $\min(j, 2P-1-j)$ with "
        r"$j = \lfloor t/c \rfloor \bmod 2P$",
    ),
    misconceptions=DEAL,
    checks=(
        Check("round_robin", 2, "visible", "turn after turn from rank 0", _check_round_robin),
        Check("folded", 2, "visible", "every other turn runs backwards", _check_folded),
        Check("ragged", 2, "visible", "lengths that do not divide, ranks that get nothing", _check_ragged),
        Check("any", 2, "held-out", "any length, any piece, 1 to 8 ranks", _check_any),
    ),
)

RUNS_STAGE = Stage(
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
    misconceptions=RUNS,
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
