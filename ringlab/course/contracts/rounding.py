"""How far float32 may be from the truth, before one may call an answer wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlab.course.answers import named_arrays

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
