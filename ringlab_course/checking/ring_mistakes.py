"""Common mistakes in the forward and the causal ring, by name; what a rank should return."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlab_course.checking.positions import truth
from ringlab_course.checking.wrong_answers import misconceptions_of

__all__ = ["CAUSAL", "FORWARD", "global_mask", "truth"]

FORWARD = misconceptions_of("05.forward")
CAUSAL = misconceptions_of("05.causal")


def global_mask(rank: int, origin: int, positions: Any) -> np.ndarray | None:
    """Return True where the key's global position is at or before the query's; None without positions."""
    if positions is None:
        return None
    queries, keys = (np.asarray(positions[of]) for of in (rank, origin))
    return queries[:, None] >= keys[None, :]
