"""Checks of 10.error: the relative error of a result, with NaN, infinities, zeros and other shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ringlab_course.checking import answers
from ringlab_course.checking.answers import expect_array
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

mistake = mistakes_of("10.error")

FLOAT32 = 1e-6
"""A relative error that was computed in float32 differs from the right one by less than this fraction of it."""
CLOSE = 1e-9
"""Two float64 computations of a relative error differ by far less than this, and every mistake by more."""


def relative_error(x: Tensor, truth: Tensor) -> float:
    """Return ‖x − truth‖ / ‖truth‖ in float64, or ‖x‖ if truth is all 0.

    The result is inf if x and truth cannot be compared.
    """
    x, truth = x.double(), truth.double()
    if x.shape != truth.shape:
        return math.inf
    same = x == truth  # equal infinities have no error
    difference = torch.where(same, 0.0, x - truth)
    scale = torch.where(torch.isfinite(truth), truth, 0.0).norm()
    error = difference.norm() / (scale if scale > 0 else 1.0)
    return float(error) if torch.isfinite(error) else math.inf


def check_worked(subject: Subject, rng: np.random.Generator) -> None:
    """Try two or three numbers, to follow on paper."""
    pairs = [(_tenths(rng, length), _tenths(rng, length)) for length in (2, 3, 3)]
    _errors(subject, [(x, truth, f"x = {x}, truth = {truth}") for x, truth in pairs])


def _tenths(rng: np.random.Generator, length: int) -> list[float]:
    """Return numbers from 1 to 100 with one decimal."""
    return [int(n) / 10 for n in rng.integers(10, 1000, length)]


def check_scale(subject: Subject, rng: np.random.Generator) -> None:
    """Expect the same error for the same numbers in another unit."""
    x, truth = _numbers(rng, 2, 3)
    units = 2.0**-20, 2.0**20
    _errors(subject, [(x * unit, truth * unit, f"2 × 3 numbers of size {unit:.0e}") for unit in units])


def check_narrow(subject: Subject, rng: np.random.Generator) -> None:
    """Expect the error that rounding to bfloat16 and float16 makes."""
    cases = []
    for dtype in (torch.bfloat16, torch.float16):
        truth = torch.from_numpy(rng.standard_normal((4, 8)))
        cases.append((truth.to(dtype), truth, f"x is the truth, rounded to {str(dtype)[6:]}"))
    _errors(subject, cases)


def check_zero(subject: Subject, rng: np.random.Generator) -> None:
    """Try a truth with some zeros, and a truth that is all 0."""
    (a, b), (c, d) = _tenths(rng, 2), _tenths(rng, 2)
    shape = tuple(int(n) for n in rng.integers(1, 200, 2))
    cases = (
        ([a, b], [c, 0.0], f"x = [{a}, {b}], truth = [{c}, 0]"),
        (torch.zeros(shape), torch.zeros(shape).double(), f"x and truth are 0, shape {shape}"),
        ([c, d], [0.0, 0.0], f"x = [{c}, {d}], truth = [0, 0]"),
    )
    _errors(subject, cases)


def check_not_finite(subject: Subject, rng: np.random.Generator) -> None:
    """Try a NaN and infinities where the truth is a number."""
    cases = []
    for wrong in (math.nan, math.inf, -math.inf):
        a, b = _tenths(rng, 2)
        cases.append(([a, wrong], [a, b], f"x = [{a}, {wrong}], truth = [{a}, {b}]"))
    _errors(subject, cases)


def check_empty_rows(subject: Subject, rng: np.random.Generator) -> None:
    """Try an lse of −inf, and other values where the truth is −inf."""
    a, b = _tenths(rng, 2)
    shape = tuple(int(n) for n in rng.integers(1, 200, 2))
    nothing = torch.full(shape, -math.inf, dtype=torch.float64)
    cases = (
        ([-math.inf, a], [-math.inf, b], f"x = [−inf, {a}], truth = [−inf, {b}]"),
        ([-1e9, b], [-math.inf, b], f"x = [−1e9, {b}], truth = [−inf, {b}]"),
        ([math.inf, b], [-math.inf, b], f"x = [inf, {b}], truth = [−inf, {b}]"),
        (nothing.float(), nothing, f"x and truth are −inf, shape {shape}"),
    )
    _errors(subject, cases)


def check_shape(subject: Subject, rng: np.random.Generator) -> None:
    """Try results whose shape differs from that of the truth."""
    x, truth = _numbers(rng, 3, 3)
    cases = [
        (other, truth, f"x of shape {tuple(other.shape)}, truth of shape {tuple(truth.shape)}")
        for other in (x[:, :1], x[0], x[:1])
    ]
    _errors(subject, cases)


def check_any(subject: Subject, rng: np.random.Generator) -> None:
    """Try rows of very different size, a row of zeros, and a NaN."""
    cases = []
    for spread in (0.0, 1.0, 4.0):
        x, truth = _numbers(rng, 5, 40)
        factor = torch.from_numpy(np.exp(spread * rng.standard_normal((5, 1))))
        x, truth = (x * factor).float(), truth * factor
        truth[2] = 0.0
        cases.append((x, truth, f"5 × 40 numbers, rows that differ in size by e^{spread:g}, one row of 0"))
    with_nan = x.clone()
    with_nan[1, 7] = math.nan
    _errors(subject, [*cases, (with_nan, truth, "one NaN among 200 numbers")])


def _errors(subject: Subject, cases: Iterable[tuple[Any, Any, str]]) -> None:
    """Compare the error in every case (x, truth, description) with the right one.

    Raises: the Failure of the first wrong case. If all errors are right to the precision of float32, and no
    other mistake explains them, the Failure is named after the mistake of computing in float32.
    """
    seen: list[Answered] = []

    def answered() -> Iterator[Answered]:
        for case in cases:
            seen.append(_answered(subject, *case))
            yield seen[-1]

    try:
        compare_all(answered())
    except Failure as failure:
        if seen and all(answers.relative_error(one.answer, one.truth) <= FLOAT32 for one in seen):
            failure.otherwise = mistake("in_float32").failure(failure.counterexample)
        raise


def _answered(subject: Subject, x: Any, truth: Any, case: str) -> Answered:
    x, truth = (t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64) for t in (x, truth))
    answer = _number(subject.call(x, truth))
    right = np.float64(relative_error(x, truth))
    if np.isnan(answer):
        raise mistake("nan_is_no_number").failure(f"{case}: got nan, expected {right:.4g}")
    return Answered(answer, right, CLOSE, names=("the error",), text=case)


def _number(answer: Any) -> np.float64:
    """Return the learner's answer as a number. Raises: Failure for any other answer."""
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        return np.float64(answer)
    array = expect_array(answer, (), name="the error")
    if array.dtype.kind != "f":
        raise Failure(f"The error should be one floating-point number, but is {array.dtype.name}.")
    return np.float64(array)


def _numbers(rng: np.random.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    truth = rng.standard_normal(shape)
    return torch.from_numpy(truth + 1e-3 * rng.standard_normal(shape)), torch.from_numpy(truth)


STAGE = Stage(
    id="10.error",
    function="relative_error",
    title="How far off is a result?",
    hints=(
        "A result is 1 % too large in every entry. What should its error be? And if you measure in millimetres instead of metres?",
        "Convert both to float64 first. Before you subtract, handle the cases that need no arithmetic: another shape, a NaN, an "
        "infinity that the truth does not have. Where both are the same infinity, nothing is wrong.",
        "$\\lVert x - t \\rVert_2 \\,/\\, \\lVert t \\rVert_2$, and $\\lVert x \\rVert_2$ for $t = 0$",
    ),
    misconceptions=misconceptions_of("10.error"),
    checks=(
        Check("worked", 2, "visible", "two and three numbers, to follow on paper", check_worked),
        Check("scale", 1, "visible", "the same numbers in another unit", check_scale),
        Check("narrow", 1, "visible", "x in bfloat16 and float16", check_narrow),
        Check("zero", 1, "visible", "zeros in the truth, and nothing but zeros", check_zero),
        Check("not_finite", 1, "visible", "a NaN or an infinity is infinitely wrong", check_not_finite),
        Check("empty_rows", 1, "visible", "lse −inf where the truth says −inf", check_empty_rows),
        Check("shape", 1, "visible", "x of another shape", check_shape),
        Check("any", 1, "held-out", "all sorts of numbers", check_any),
    ),
)  # fmt: skip
