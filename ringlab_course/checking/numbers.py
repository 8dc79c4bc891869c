"""Helpers for the checks of several exercises: random inputs, rounding bounds and partial results."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab import oracle
from ringlab_course.checking.answers import named_arrays
from ringlab_course.checking.diagnosis import Answered
from ringlab_course.checking.failures import Failure

if TYPE_CHECKING:
    import torch

BOUND = 1e-9
"""The allowed relative error. It is far above the error of a float64 sum of a few hundred terms, and far
below the error of a wrong count."""


def expect_number(answer: Any) -> float:
    """Return the answer as a float. Raises: Failure if it is not a single number."""
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
    text: str = "",
    unit: str = "",
) -> Answered:
    """Return the case for `compare_all`. The counterexample names `unit`.

    Raises: Failure if the answer is not a single number.
    """
    got, right = np.asarray(expect_number(answer)), np.asarray(float(truth))
    return Answered(got, right, BOUND, (f"the result in {unit}",), text)


def random(rng: np.random.Generator, *shape: int, size: float = 1.0) -> torch.Tensor:
    """Return a float32 tensor of normally distributed numbers of standard deviation `size`."""
    import torch  # imported here, because exercises in NumPy are judged without torch

    return torch.from_numpy((size * rng.standard_normal(shape)).astype(np.float32))


EPS = float(np.finfo(np.float32).eps)


def largest(values: Any) -> float:
    """Return the largest finite magnitude in an array (0 if there is none)."""
    numbers = np.abs(np.asarray(values, dtype=np.float64))
    return float(numbers[np.isfinite(numbers)].max(initial=0.0))


def rounding(truth: Any, size: float = 8.0) -> float:
    """Return the relative error of `truth` if it comes from numbers up to `size` with relative error EPS.

    If a part of `truth` is smaller than 1, its terms have cancelled. Their rounding errors have not, so the
    same error is a larger fraction of that part.
    """
    scales = [largest(part) for part in named_arrays(truth).values()]
    return EPS * max(size, 8.0) / min([1.0, *(scale for scale in scales if scale > 0)])


def roundings(truth: tuple[Any, Any], size: float = 8.0) -> tuple[float, float]:
    """Return the relative errors of (out, lse) if these come from numbers up to `size` with error EPS.

    The error of lse is absolute: if lse is off by x, the weights e^(s − lse) are off by the fraction x. So an
    lse near 1000 may have a relative error that is a thousand times smaller than the relative error of out.
    """
    out, lse = truth
    return rounding(out, size), EPS * max(size, 8.0) / (largest(lse) or 1.0)


def rounding_bound(q: Any, k: Any, v: Any, right: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the relative error that `right` may have in float32, whatever the order of its sums.

    A score s of D products is off by about eps·√D·|s|, and each of the S keys adds a rounding when it is
    merged. Roundings add up like a random walk, so a weight is off by eps·(√D·max|s| + √S). The factor 4
    allows four standard deviations. Errors are absolute, in units of |v| for out and of 1 for lse, so they
    are divided by the largest element of the part.
    """
    q, k, v = (oracle.float64(x) for x in (q, k, v))
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = np.abs(q @ k.swapaxes(-1, -2)).max(initial=0.0) / math.sqrt(q.shape[-1])
    base = 4 * np.finfo(np.float32).eps * (math.sqrt(q.shape[-1]) * scores + math.sqrt(k.shape[-2]))
    units = ((right[0], np.abs(v).max(initial=0.0)), (right[1], 1.0))
    return float(base * max(max(1.0, unit / (largest(part) or 1.0)) for part, unit in units))


NAMES = ("out", "lse")
State = tuple[np.ndarray, np.ndarray]


def attend(q: Any, k: Any, v: Any, mask: Any = None, scale: float | None = None) -> State:
    """Return the partial (out, lse) of one block."""
    out, lse = oracle.attention(q, k, v, mask=mask, scale=scale)
    return out, lse


def merged(a: State, b: State) -> State:
    """Return the partial (out, lse) over the keys of both partials."""
    with np.errstate(all="ignore"):
        lse = np.logaddexp(a[1], b[1])
        weights = [np.where(np.isneginf(part[1]), 0.0, np.exp(part[1] - lse))[..., None] for part in (a, b)]
    return a[0] * weights[0] + b[0] * weights[1], lse


def fold(parts: Iterable[State]) -> State:
    """Return the partial (out, lse) that results from merging all partials in order."""
    first, *rest = parts
    for part in rest:
        first = merged(first, part)
    return first
