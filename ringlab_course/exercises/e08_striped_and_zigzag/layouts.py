"""Checks of 08.deal and 08.runs: who owns which token, and the runs that a rank stores them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
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
    cases = ((4, 2, 1), (8, 2, 2), (12, 3, 4), (18, 3, 2), (5, 1, 2))
    _judge_deal(subject, [(S, P, chunk, False) for S, P, chunk in cases])


def _check_folded(subject: Subject, rng: np.random.Generator) -> None:
    cases = ((6, 3, 1), (8, 2, 1), (16, 4, 1), (24, 3, 2), (6, 1, 2))
    _judge_deal(subject, [(S, P, chunk, True) for S, P, chunk in cases])


def _check_ragged(subject: Subject, rng: np.random.Generator) -> None:
    lengths = ((4, 3, 1), (3, 2, 1), (5, 2, 2), (7, 2, 3), (13, 3, 2), (2, 3, 1), (3, 8, 2), (0, 2, 1))
    _judge_deal(subject, [(*case, folded) for case in lengths for folded in (False, True)])


def _check_any(subject: Subject, rng: np.random.Generator) -> None:
    cases = [
        (int(rng.integers(1, 400)), P, int(rng.integers(1, 20)), folded)
        for P in (3, 8, 2, 1)
        for folded in (False, True)
        for _ in range(4)
    ]
    _judge_deal(subject, [*cases, (30_011, 8, 1, True)])


def _case(positions: np.ndarray, step: int) -> str:
    return f"positions {listed(positions)}, step {step}"


def _judge_runs(subject: Subject, cases: Sequence[tuple[Any, ...]]) -> None:
    """Judge cases (positions, step), or (positions, step, answer) where the answer is there already."""

    def ask(positions: Any, step: int, answer: Any = None) -> Question:
        positions = np.array(positions, dtype=np.int64)
        case, truth = _case(positions, step), chains(positions, step)
        got = _expect_runs(subject.call(positions, step) if answer is None else answer, case)
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
    held = [start + step * i for start, _, n in got for i in range(min(n, len(positions) + 1))]
    if sorted(held) != sorted(positions.tolist()):
        return Failure("The runs do not hold each of the positions exactly once.", wrong.example)
    return Failure("The runs hold the right positions, but fewer runs would do.", wrong.example)


def _expect_runs(answer: Any, case: str) -> list[tuple[int, ...]]:
    if answer is None:
        raise Failure("the result is None: is the `return` missing?")
    if isinstance(answer, np.ndarray):
        answer = answer.tolist()
    try:
        runs = [tuple(int(x) for x in run) for run in answer]
    except (TypeError, ValueError):
        raise Failure(
            "the result should be a list of runs (start, step, length), integers all.", case
        ) from None
    if any(len(run) != 3 for run in runs):
        raise Failure("every run should be three integers: (start, step, length).", case)
    return runs


def _told(runs: Sequence[tuple[int, ...]]) -> str:
    return "[" + ", ".join(map(str, runs[:6])) + (", …]" if len(runs) > 6 else "]")


def _check_stretches(subject: Subject, rng: np.random.Generator) -> None:
    lists: tuple[list[int], ...] = ([0, 1], [0, 1, 6, 7], [4, 5, 6], [2, 3, 8, 9, 14, 15], [5], [])
    _judge_runs(subject, [(positions, 1) for positions in lists])


def _check_strides(subject: Subject, rng: np.random.Generator) -> None:
    cases = (
        ([1, 4, 7], 3),
        ([0, 7, 8, 15], 8),
        ([0, 1, 6, 7, 12, 13], 6),
        ([2, 5, 10, 13, 18], 8),
        ([0, 2, 6, 8], 2),
        ([3, 9, 11, 17], 8),
    )
    _judge_runs(subject, cases)


def _check_every_layout(subject: Subject, rng: np.random.Generator) -> None:
    cases = []
    for P in (1, 2, 3, 8):
        for folded in (False, True):
            S, chunk = int(rng.integers(40, 300)), int(rng.integers(1, 9))
            period = P * chunk * (2 if folded else 1)
            cases += [(mine, step) for mine in dealt(S, P, chunk, folded) for step in (1, period)]
    _judge_runs(subject, cases)


def _check_memory(subject: Subject, rng: np.random.Generator) -> None:
    _judge_runs(subject, [_large(64)])
    cases: list[tuple[Any, ...]] = []

    def peak(n: int) -> int:
        called = subject.measure(*_large(n))
        cases.append((*_large(n), called.answer))
        return called.peak_bytes

    growth = measured(LARGE, peak, order=1)
    if growth.faster_than(1):
        raise NAMED["compares_all_pairs"].failure(f"shards of S positions, step 8; {growth}")
    _judge_runs(subject, cases)


def _large(n: int) -> tuple[np.ndarray, int]:
    return dealt(4 * n, 4, 1, True)[1], 8


DEAL_STAGE = Stage(
    id="08.deal",
    function="deal",
    title="one family of layouts",
    hints=(
        "Which piece does token t belong to? And which rank is handed piece i, in a forward turn and in a backward one?",
        "Work out the owner of every token at once: its piece is its position // chunk, and the owner depends on the piece's "
        "place in a period, of P pieces or of 2P. Then ask for each rank which tokens it owns.",
        r"$\mathrm{owner}(t) = j$ with $j = \lfloor t/c \rfloor \bmod P$; folded: $\min(j, 2P-1-j)$ with "
        r"$j = \lfloor t/c \rfloor \bmod 2P$",
    ),
    misconceptions=DEAL,
    checks=(
        Check("round_robin", 2, "visible", "turn after turn from rank 0", _check_round_robin),
        Check("folded", 2, "visible", "every other turn backwards", _check_folded),
        Check("ragged", 2, "visible", "lengths that do not divide, ranks that get nothing", _check_ragged),
        Check("any", 2, "held-out", "any length, any piece, 1 to 8 ranks", _check_any),
    ),
)

RUNS_STAGE = Stage(
    id="08.runs",
    function="runs",
    title="positions as a few runs",
    hints=(
        "Token p is in your shard. Which other position, if you own it too, belongs into the same run right before p?",
        "A run begins at a position whose predecessor, one step before, is not owned, and ends where the successor is not. "
        "Beginnings and ends, each sorted by (remainder, position), pair up; or sort all positions by (remainder, position) "
        "and cut where the difference is not the step.",
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
            "thousands of positions, without comparing all pairs",
            _check_memory,
            kind="cost",
        ),
    ),
)
