"""Find the mistake that explains all wrong answers in a check, since one answer may fit several mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringlab_course.checking.answers import Bound, compare_with, relative_error
from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.failures import Failure

LARGEST = 100_000
"""An answer with more numbers than this is not explained, because that would take minutes."""
ROUNDED = 2.0**-4
"""Rounding to bfloat16, by 2⁻⁸ at a time, causes relative errors below this; a larger error has another cause."""


@dataclass(frozen=True)
class Answered:
    """The learner's answer to one case, the right answer, and the relative error that is allowed."""

    answer: Any
    truth: Any
    bound: Bound = 0.0
    names: Sequence[str] = ()
    text: str = ""


def compare_all(cases: Iterable[Answered], read: Callable[[Any], Any] | None = None) -> None:
    """Return None if every answer is right.

    Raises: the Failure of the first wrong answer. `read` returns the part of an answer that the check looks at, if
    the check does not look at the whole answer.
    """
    raise_first(failure_of(case, read) for case in cases)


def raise_first(failures: Iterable[Failure | None]) -> None:
    """Raise the first of `failures`, which has a Failure or None for each case.

    All cases are run, because the later ones help to tell mistakes apart (`explain`). If a call fails after
    the first Failure, the remaining cases are not run.
    """
    first: Failure | None = None
    try:
        for failure in failures:
            first = first or failure
    except Failure:
        if first is None:
            raise
    if first is not None:
        raise first


def compare_suspecting(
    cases: Sequence[Answered],
    suspected: Misconception,
    plausible: Callable[[float], bool] = lambda error: error < ROUNDED,
    read: Callable[[Any], Any] | None = None,
) -> None:
    """Compare as `compare_all` does, in a check that is about one suspected mistake.

    The Failure is named after the suspected mistake if two conditions hold: no other mistake of the stage
    explains the wrong answers, and `plausible` is true of the largest relative error. By default, errors of
    the size of rounding are plausible.
    """
    try:
        compare_all(cases, read)
    except Failure as failure:
        if plausible(max(relative_error(case.answer, case.truth) for case in cases)):
            failure.otherwise = suspected.failure(failure.counterexample)
        raise


def numbers_in(value: Any) -> int:
    """Return how many numbers there are in an answer."""
    if isinstance(value, Mapping):
        return sum(map(numbers_in, value.values()))
    return sum(map(numbers_in, value)) if isinstance(value, (tuple, list)) else math.prod(np.shape(value))


def failure_of(case: Answered, read: Callable[[Any], Any] | None = None) -> Failure | None:
    """Return the Failure of a wrong answer, or None if the answer is right."""
    try:
        compare_with(case.answer, case.truth, bound=case.bound, names=case.names, case=case.text)
    except Failure as failure:
        failure.read = read
        return failure
    return None


def blame_groups(shared: Callable[[], None], alone: Callable[[], None]) -> None:
    """Run the check `shared`, in which query heads share a K/V head, and find out whether sharing causes its failure.

    If no known mistake explains wrong values, the check `alone` runs, in which each query head has its own
    K/V head.
    Raises: the Failure of `shared` or, if `alone` also fails, that of `alone`. If only `shared` fails, the
    Failure says that the error comes from the sharing.
    """
    try:
        shared()
    except Failure as failure:
        if failure.misconception is not None or "wrong values" not in failure.message:
            raise
        alone()  # if the answer is also wrong without shared heads, this raises: sharing is not the cause
        sharing = Failure(
            "Your answer is right where each query head has a K/V head of its own, and wrong where several share one. "
            "Query head h should read K/V head h // (H // K): neighbours share one.",
            failure.counterexample,
        )
        sharing.allowed = failure.allowed
        raise sharing from None
