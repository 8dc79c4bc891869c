"""Partial results (out, lse) of attention in float64: of one block, and merged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ringlab import oracle

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
