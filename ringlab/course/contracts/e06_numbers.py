"""Reading one number as an answer, for exercise 06: what costs is a number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from ringlab.course.answers import compare_with, relative_error
from ringlab.course.contract import Failure, Misconception

BOUND = 1e-9
"""Relative: float64 sums of a few hundred terms are far better, a wrong count is far worse."""
NEAR = 1e-6
"""Relative: how near an answer must be to a mistake's number to be called by its name."""


def expect_number(answer: Any) -> float:
    """Return the answer as a float. Raises: Failure when it is no single number."""
    if answer is None:
        raise Failure("The result is None: is the `return` missing?")
    shape = getattr(answer, "shape", ())
    if tuple(shape) != ():
        raise Failure("The result should be one number.", f"got an array of shape {tuple(shape)}")
    if isinstance(answer, (bool, str, complex, tuple, list, dict)):
        raise Failure("The result should be one number.", f"got a {type(answer).__name__}")
    if not isinstance(answer, Real) and not hasattr(answer, "item"):
        raise Failure("The result should be one number.", f"got a {type(answer).__name__}")
    return float(answer)


@dataclass(frozen=True)
class NumberCase:
    """One case with what the learner answered; `inputs` and `keywords` are those of the imitations too."""

    answer: Any
    truth: float
    inputs: Sequence[Any]
    text: str
    keywords: Mapping[str, Any] = field(default_factory=dict)


def compare_numbers(cases: Iterable[NumberCase], misconceptions: Sequence[Misconception], unit: str) -> None:
    """Return None when every number is right; `unit` stands in the counterexample.

    Raises: the Failure of the first wrong one. It is named after a mistake only if that mistake gives the
    learner's numbers in all cases, right ones too, and no other does: on one small input many look alike.
    """
    seen: list[NumberCase] = []
    first: Failure | None = None
    try:
        for case in cases:
            seen.append(case)
            first = first or _failure(case, unit)
    except Failure:  # what breaks off later only leaves fewer cases to tell mistakes apart
        if first is None:
            raise
    if first is None:
        return
    fitting = [m for m in misconceptions if all(_gives(m, case) for case in seen)]
    raise fitting[0].failure(first.counterexample) if len(fitting) == 1 else first


def _failure(case: NumberCase, unit: str) -> Failure | None:
    got, truth = np.asarray(expect_number(case.answer)), np.asarray(float(case.truth))
    try:
        compare_with(got, truth, bound=BOUND, names=(f"the result in {unit}",), case=case.text)
    except Failure as failure:
        return failure
    return None


def _gives(misconception: Misconception, case: NumberCase) -> bool:
    if misconception.imitate is None:
        return False
    with np.errstate(all="ignore"):
        try:
            imitation = misconception.imitate(*case.inputs, **case.keywords)
            return relative_error(np.asarray(expect_number(case.answer)), np.asarray(imitation)) <= NEAR
        except (ArithmeticError, ValueError, TypeError, IndexError):
            return False  # the mistake cannot be made on this input
