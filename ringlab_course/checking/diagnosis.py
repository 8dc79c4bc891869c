"""Find the mistake that explains all answers in a check, because one answer may fit several mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringlab_course.checking.answers import Bound, compare_with, resembles
from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.failures import Failure

LARGEST = 100_000
"""The most numbers in an answer that is explained. On larger answers, as in checks of memory, imitations take
minutes."""


@dataclass(frozen=True)
class Answered:
    """One case and the learner's answer to it; imitations take `inputs` and `keywords`."""

    answer: Any
    truth: Any
    bound: Bound
    inputs: Sequence[Any] = ()
    names: Sequence[str] = ()
    text: str = ""
    keywords: Mapping[str, Any] = field(default_factory=dict)


def compare_all(
    cases: Iterable[Answered],
    misconceptions: Sequence[Misconception] = (),
    read: Callable[[Any], Any] | None = None,
) -> None:
    """Return None if every answer is right.

    Raises: the Failure of the first wrong answer. The Failure names a mistake only if this mistake gives the
    learner's answers in all cases, including the right ones, and no other mistake does. One case alone fits
    many mistakes, and a false diagnosis is worse than none. Answers of more than LARGEST numbers are not
    explained. `read` returns the part of an answer that the check looks at, if the check does not look at the
    whole answer.
    """
    seen: list[Answered] = []
    first: Failure | None = None
    try:
        for case in cases:
            seen.append(case)
            first = first or _failure(case)
    except Failure:  # a later failure only leaves fewer cases to tell mistakes apart
        if first is None:
            raise
    if first is None:
        return
    first.read = read
    if any(_numbers(case.truth) > LARGEST for case in seen):
        raise first
    fitting = {m.name: m for m in misconceptions if all(_matches(m, case) for case in seen)}
    if len(fitting) != 1:
        raise first
    (misconception,) = fitting.values()
    raise misconception.failure(first.counterexample)


def _numbers(value: Any) -> int:
    return sum(map(_numbers, value)) if isinstance(value, (tuple, list)) else math.prod(np.shape(value))


def _failure(case: Answered) -> Failure | None:
    try:
        compare_with(case.answer, case.truth, bound=case.bound, names=case.names, case=case.text)
    except Failure as failure:
        return failure
    return None


def _matches(misconception: Misconception, case: Answered) -> bool:
    if misconception.imitate is None:
        return False
    with np.errstate(all="ignore"):
        try:
            imitation = misconception.imitate(*case.inputs, **case.keywords)
            return resembles(case.answer, imitation, case.bound)
        except (ArithmeticError, ValueError, TypeError, IndexError):
            return False  # the mistake cannot be made on this input, or the answer has no numbers


def blame_groups(shared: Callable[[], None], alone: Callable[[], None]) -> None:
    """Run `shared`, which checks heads that share a K/V head; `alone` checks heads that each have their own.

    Raises: the Failure of `shared`. If its values are wrong, no known mistake explains them, and the answer
    passes `alone`, the Failure says that the error comes from the sharing.
    """
    try:
        shared()
    except Failure as failure:
        if failure.misconception is not None or "wrong values" not in failure.message:
            raise
        alone()  # an answer that is also wrong without groups has another mistake
        sharing = Failure(
            "Your answer is right where each query head has a K/V head of its own, and wrong where several share one. "
            "Query head h should read K/V head h // (H // K): neighbours share one.",
            failure.counterexample,
        )
        sharing.allowed = failure.allowed
        raise sharing from None
