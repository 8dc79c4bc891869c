"""Which schedules a case of the table can be asked of, by counting heads and ranks; the others must be refused."""

from __future__ import annotations

from ringlab.conformance.cases import Case
from ringlab.errors import RinglabError, ShapeError, WorldSizeError


def refusal(case: Case, schedule: str) -> type[RinglabError] | None:
    """Return the error with which `schedule` must refuse the case on every rank; None where it must compute it.

    Ranks that share heads need as many query heads each, and whole key/value heads or parts of one. Groups of two
    ranks, as the hybrid and the double ring have where nothing is said, need an even number of ranks.
    """
    if schedule in ("hybrid", "double-ring") and case.P % 2:
        return WorldSizeError
    sharing = {"ulysses": case.P, "hybrid": 2}.get(schedule, 1)
    H, K = case.heads
    splits = H % sharing == 0 and (K % sharing == 0 or sharing % K == 0)
    return None if splits else ShapeError
