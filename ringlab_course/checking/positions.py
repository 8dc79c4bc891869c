"""Answers that say which positions each rank owns, or count something, and the mistake that gives the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.failures import Failure

LONGEST = 12
"""At most this many positions stand in a counterexample."""


def expect_shares(answer: Any, P: int) -> list[np.ndarray]:
    """Return the answer as one array of positions per rank. Raises: Failure when it is something else."""
    if answer is None:
        raise Failure("the result is None: is the `return` missing?")
    if not isinstance(answer, (list, tuple, np.ndarray)):
        raise Failure(
            f"the result should be a list with one array of positions per rank, but is a {type(answer).__name__}."
        )
    if len(answer) != P:
        raise Failure(
            "the result should hold one array of positions per rank.", f"{len(answer)} parts for P={P}"
        )
    return [_positions(part, rank) for rank, part in enumerate(answer)]


def same_shares(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether both give every rank the same positions in the same order."""
    return len(a) == len(b) and all(np.array_equal(left, right) for left, right in zip(a, b, strict=True))


def same_sets(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether both give every rank the same positions, in whatever order."""
    return same_shares([np.sort(x) for x in a], [np.sort(x) for x in b])


def expect_owned_once(shares: Sequence[np.ndarray], S: int, case: str) -> None:
    """Return None where each of the positions 0 … S − 1 is owned exactly once. Raises: Failure."""
    owned = np.concatenate([np.zeros(0, np.int64), *shares])
    beyond = owned[(owned < 0) | (owned >= S)]
    if len(beyond):
        raise Failure(
            "Some positions do not exist: the sequence ends at S − 1.", f"{case}: {listed(np.sort(beyond))}"
        )
    times = np.bincount(owned, minlength=S)
    if (times > 1).any():
        raise Failure(
            "Some positions are owned more than once.", f"{case}: {listed(np.flatnonzero(times > 1))}"
        )
    if (times == 0).any():
        raise Failure("Some positions are owned by no rank.", f"{case}: {listed(np.flatnonzero(times == 0))}")


@dataclass(frozen=True)
class Question:
    """A question put to the learner's function, its answer and the right one; `example` tells of it in words."""

    inputs: tuple[Any, ...]
    got: Any
    truth: Any
    example: str


def judge(
    cases: Iterable[tuple[Any, ...]],
    ask: Callable[..., Question],
    right: Callable[[Any, Any], bool],
    explain: Callable[[list[Question], Question], Failure],
) -> None:
    """Ask every case, then explain the first wrong answer in the light of all. Raises: Failure.

    Two mistakes often give the same answer in one case; all cases together tell them apart.
    """
    answered: list[Question] = []
    wrong = None
    for case in cases:
        try:
            latest = ask(*case)
        except Failure:
            if wrong is None:
                raise
            break  # what came out wrong before is told first
        answered.append(latest)
        if wrong is None and not right(latest.got, latest.truth):
            wrong = latest
    if wrong is not None:
        raise explain(answered, wrong)


def mistake_in(
    answered: Sequence[Question], mistakes: Iterable[Misconception], same: Callable[[Any, Any], bool]
) -> Misconception | None:
    """Return the first mistake that explains every answer, right ones too, and at least one wrong one."""
    return next((m for m in mistakes if m.imitate is not None and _explains(m.imitate, answered, same)), None)


def _explains(
    imitate: Callable[..., Any], answered: Sequence[Question], same: Callable[[Any, Any], bool]
) -> bool:
    errs = False
    for one in answered:
        try:
            imitation = imitate(*one.inputs)
        except (ArithmeticError, ValueError, IndexError):
            continue  # the mistake cannot be made on this input
        if not same(one.got, imitation):
            return False
        errs = errs or not same(imitation, one.truth)
    return errs


def listed(positions: Any) -> str:
    """Return positions as text, the first few of them where there are many."""
    items = [int(p) for p in positions]
    shown = ", ".join(map(str, items[:LONGEST]))
    return f"{{{shown}{', …' if len(items) > LONGEST else ''}}}"


def first_difference(shares: Sequence[np.ndarray], truth: Sequence[np.ndarray], case: str) -> str:
    """Return in words what the first rank that differs owns, and what it should."""
    for rank, (got, expected) in enumerate(zip(shares, truth, strict=True)):
        if not np.array_equal(got, expected):
            return f"{case}: rank {rank} owns {listed(got)}, should own {listed(expected)}"
    return case


def _positions(part: Any, rank: int) -> np.ndarray:
    what = "every rank's part should be one flat NumPy array of integers, int64."
    if not isinstance(part, np.ndarray):
        raise Failure(what, f"rank {rank}: a {type(part).__name__}")
    if part.dtype.kind == "f" and part.size == 0:
        raise Failure(
            f"{what} An empty np.array([]) holds floats, and floats do not index: give it dtype=np.int64.",
            f"rank {rank}: dtype {part.dtype}, no positions",
        )
    if part.ndim != 1 or part.dtype.kind not in "iu":
        raise Failure(what, f"rank {rank}: dtype {part.dtype}, shape {part.shape}")
    return part.astype(np.int64)
