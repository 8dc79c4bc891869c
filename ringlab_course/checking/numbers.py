"""Numbers that several exercises need: random inputs, rounding bounds, partial results, answers that are one number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    inputs: Sequence[Any] = (),
    text: str = "",
    unit: str = "",
    keywords: Mapping[str, Any] | None = None,
) -> Answered:
    """Return the case for `compare_all`; `unit` stands in the counterexample. Raises: Failure as `expect_number`."""
    got, right = np.asarray(expect_number(answer)), np.asarray(float(truth))
    return Answered(got, right, BOUND, inputs, (f"the result in {unit}",), text, keywords or {})


def random(rng: np.random.Generator, *shape: int, size: float = 1.0) -> torch.Tensor:
    """Return a float32 tensor of normal numbers."""
    import torch  # late: exercises in NumPy are judged without it

    return torch.from_numpy((size * rng.standard_normal(shape)).astype(np.float32))


EPS = float(np.finfo(np.float32).eps)


def largest(values: Any) -> float:
    """Return the largest finite magnitude in an array (0 if there is none)."""
    numbers = np.abs(np.asarray(values, dtype=np.float64))
    return float(numbers[np.isfinite(numbers)].max(initial=0.0))


def rounding(truth: Any, size: float = 8.0) -> float:
    """Return the relative error that numbers of magnitude `size`, known to EPS · size, may leave in `truth`.

    Where a part of `truth` is smaller than 1, its terms have cancelled; their rounding has not, so
    that the same error is a larger fraction of it.
    """
    scales = [largest(part) for part in named_arrays(truth).values()]
    return EPS * max(size, 8.0) / min([1.0, *(scale for scale in scales if scale > 0)])


def roundings(truth: tuple[Any, Any], size: float = 8.0) -> tuple[float, float]:
    """Return the relative errors of (out, lse) that numbers of magnitude `size` leave, known to EPS · size.

    The error of lse is absolute: if lse is off by x, the weights e^(s − lse) are off by the fraction x. So an lse near 1000
    may have a relative error a thousand times smaller than that of out.
    """
    out, lse = truth
    return rounding(out, size), EPS * max(size, 8.0) / (largest(lse) or 1.0)


def rounding_bound(q: Any, k: Any, v: Any, right: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the relative error that a float32 computation of `right` may have, whatever the order of its sums.

    A score s of D products is off by about eps·√D·|s|, and each of the S keys adds a rounding of its
    own when it is merged, so a weight is off by eps·(√D·max|s| + √S), as roundings add up like a
    random walk; 4 is the distance in standard deviations. Errors are absolute in units of |v| for
    out and of 1 for lse, hence the division by the parts' largest elements.
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
    """Return the partial over the keys of both."""
    with np.errstate(all="ignore"):
        lse = np.logaddexp(a[1], b[1])
        weights = [np.where(np.isneginf(part[1]), 0.0, np.exp(part[1] - lse))[..., None] for part in (a, b)]
    return a[0] * weights[0] + b[0] * weights[1], lse


def fold(parts: Iterable[State]) -> State:
    """Return all partials merged in order."""
    first, *rest = parts
    for part in rest:
        first = merged(first, part)
    return first
