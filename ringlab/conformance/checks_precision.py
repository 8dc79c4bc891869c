"""A check of digits: a result that was rounded on its way to fewer than its dtype has.

Bounds cannot see this in half dtypes: the plainest implementation in float16 errs by as much as one rounding to
bfloat16 does. The digits themselves can: of numbers with 11 bits one in eight has 8 by chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ringlab.conformance.plan_runs import Check, Plan, Verdict
from ringlab.conformance.runs import Ran, Run
from ringlab.conformance.tolerance import NAMES

NARROWER = {
    "float64": ("bfloat16", "float16", "float32"),
    "float32": ("bfloat16", "float16"),
    "float16": ("bfloat16",),
}
"""For each dtype those with fewer digits, the fewest first."""
FEWEST = 32
"""Numbers that are needed to say so: by chance 1 in 8 at most has fewer digits, all of them 1 in 10²⁸."""
SMALL = 2.0**-10
"""Numbers below this share of the largest are left out: those that underflow have few digits."""


def rounded_to(array: np.ndarray, dtype: str) -> str | None:
    """Return the narrowest dtype that holds all numbers of a result in `dtype`; None where only `dtype` does.

    Too few numbers that are not small say nothing: None.
    """
    finite = array[np.isfinite(array)]
    large = np.abs(finite) >= SMALL * np.abs(finite).max(initial=0.0)
    numbers = torch.from_numpy(finite[large & (finite != 0.0)])
    if len(numbers.unique()) < FEWEST:
        return None
    for narrow in NARROWER.get(dtype, ()):
        if torch.equal(numbers.to(getattr(torch, narrow)).double(), numbers):
            return narrow
    return None


def _each_dtype(plan: Plan) -> list[Run]:
    return [plan.run(P, 24, dtype=dtype) for P in plan.ranks(2)[:1] for dtype in plan.claims.dtypes]


def _digits(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    looked = 0
    for ran in rans:
        for name in NAMES:
            if name == "lse" or name not in ran.arrays:
                continue
            looked += 1
            narrow = rounded_to(ran.arrays[name], ran.run.dtype)
            if narrow is not None:
                told = f"{name} is {ran.run.dtype}, and every number of it is one of {narrow}: it was rounded to that ({ran.run})"
                return Verdict(False, told, ran.run)
    return Verdict(
        True, f"{looked} results in {', '.join(plan.claims.dtypes)} have the digits of their dtype"
    )


PRECISION_CHECKS = (
    Check("precision", "results with all digits of their dtype, not those of a narrower one", "quick", _each_dtype, _digits, by_values=False),
)  # fmt: skip
