"""How far float32 may be from the truth, before one may call an answer wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ringlab import oracle
from ringlab_course.checking.answers import named_arrays

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
