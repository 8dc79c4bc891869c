"""Answers that are one number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from ringlab_course.checking.diagnosis import Answered
from ringlab_course.checking.failures import Failure

BOUND = 1e-9
"""Relative: float64 sums of a few hundred terms are far better, a wrong count is far worse."""


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


def answered_number(
    answer: Any,
    truth: float,
    inputs: Sequence[Any],
    text: str,
    unit: str,
    keywords: Mapping[str, Any] | None = None,
) -> Answered:
    """Return the case for `compare_all`; `unit` stands in the counterexample. Raises: Failure as `expect_number`."""
    got, right = np.asarray(expect_number(answer)), np.asarray(float(truth))
    return Answered(got, right, BOUND, inputs, (f"the result in {unit}",), text, keywords or {})
