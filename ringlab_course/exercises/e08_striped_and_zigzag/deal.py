"""Checks of 08.deal: a function that tells which rank owns which token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.positions import (
    Question,
    expect_owned_once,
    expect_shares,
    first_difference,
    judge,
    read_sets,
    same_sets,
    same_shares,
)
from ringlab_course.checking.wrong_answers import misconceptions_of

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

Asked = tuple[int, int, int, bool]
"""The arguments S, P, chunk and folded."""


def dealt(S: int, P: int, chunk: int, folded: bool) -> list[np.ndarray]:
    """Return the right answer: each rank's positions in ascending order."""
    period = 2 * P if folded else P
    turn = np.arange(S) // chunk % period
    owner = np.minimum(turn, period - 1 - turn) if folded else turn
    return [np.flatnonzero(owner == rank) for rank in range(P)]


def _verify(subject: Subject, cases: Sequence[Asked]) -> None:
    def ask(S: int, P: int, chunk: int, folded: bool) -> Question:
        case = f"S={S}, P={P}, chunk={chunk}, folded={folded}"
        shares, truth = expect_shares(subject.call(S, P, chunk, folded), P), dealt(S, P, chunk, folded)
        return Question((S, P, chunk, folded), shares, truth, first_difference(shares, truth, case))

    judge(cases, ask, same_shares, _failure, read_sets)


def _failure(wrong: Question) -> Failure:
    try:
        expect_owned_once(wrong.got, wrong.inputs[0], wrong.example.split(":")[0])
    except Failure as failure:
        return failure
    failure = Failure(
        "Every token is owned once, but some by another rank than the one it is dealt to.", wrong.example
    )
    if same_sets(wrong.got, wrong.truth):
        failure.otherwise = STAGE.misconception("not_ascending").failure(wrong.example)
    return failure


def _check_round_robin(subject: Subject, rng: np.random.Generator) -> None:
    _verify(subject, [_dividing(rng, P, most, False) for P, most in ((2, 3), (3, 5), (5, 9), (4, 9))])


def _check_folded(subject: Subject, rng: np.random.Generator) -> None:
    _verify(subject, [_dividing(rng, P, most, True) for P, most in ((3, 3), (2, 5), (4, 5), (5, 9))])


def _dividing(rng: np.random.Generator, P: int, most: int, folded: bool) -> Asked:
    """Return the arguments of a deal of 3 to 99 whole turns, in pieces of at most `most` tokens."""
    chunk = int(rng.integers(2 if most > 5 else 1, most + 1))
    return P * chunk * int(rng.integers(3, 100)), P, chunk, folded


def _check_ragged(subject: Subject, rng: np.random.Generator) -> None:
    cases: list[Asked] = []
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
    _verify(subject, cases)


def _check_any(subject: Subject, rng: np.random.Generator) -> None:
    cases = [
        (int(rng.integers(100, 2000)), P, int(rng.integers(1, 20)), folded)
        for P in (3, 8, 2, 1)
        for folded in (False, True)
        for _ in range(4)
    ]
    _verify(subject, [*cases, (30_011 + int(rng.integers(1000)), 8, 1, True)])


STAGE = Stage(
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
    misconceptions=misconceptions_of("08.deal"),
    checks=(
        Check("round_robin", 2, "visible", "turn after turn from rank 0", _check_round_robin),
        Check("folded", 2, "visible", "every other turn runs backwards", _check_folded),
        Check("ragged", 2, "visible", "lengths that do not divide, ranks that get nothing", _check_ragged),
        Check("any", 2, "held-out", "any length, any piece, 1 to 8 ranks", _check_any),
    ),
)
