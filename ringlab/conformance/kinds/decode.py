"""Checks of decode: a few queries on every rank, against a K/V cache that is spread over the ranks.

The function is called, by name, with those of these arguments for which it has parameters:

    q                 (B, H, n, D): queries of the last n tokens of the sequence, the same on every rank
    k v               (B, K, C, D): this rank's slots of the cache, which contains the last n tokens too
    length            the number of slots in use on this rank; other slots hold values that were not cleared
    lengths           the list of these numbers for all ranks
    positions         the positions in the sequence of the tokens in the used slots, int64
    ring comm group rank world_size   as for a ring (see `ringlab.conformance.target.claims`)

It returns out (B, H, n, D) in the dtype of q, or (out, lse), where lse (B, H, n) is a natural logarithm in
float32 (float64 for float64). Every rank returns the whole results. Query i is token S − n + i: it sees
itself and the tokens before it. Tokens are distributed to the ranks in turn, or in stretches.

The bounds are those of a prefill of the whole sequence (`ringlab.conformance.tolerance`), widened as for a
ring.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ringlab import oracle
from ringlab.comm.ring import Ring
from ringlab.conformance.checks.measuring import expected
from ringlab.conformance.kinds.calls import (
    CallCheck,
    Calls,
    around,
    changed_inputs,
    distance,
    itself,
    report,
    unusual,
)
from ringlab.conformance.report.findings import Report
from ringlab.conformance.run.run import Run, inputs
from ringlab.conformance.suite import LIMIT
from ringlab.conformance.target.calling import call
from ringlab.errors import BackendError, apart
from ringlab.merge import state_dtype

GIVEN = ("q", "k", "v", "length", "lengths", "positions")
UNCLEARED = 1e4
"""The value of unused slots: finite in every dtype, and far from every written value."""
SLOTS = 5
"""The number of unused slots on each rank, if the function gets its length."""


@dataclass(frozen=True)
class Case:
    """One call: two sequences of S tokens, with queries for the last n tokens of each.

    dealt: "in turn" or "in stretches". values: as in a `Run`.
    """

    P: int
    S: int = 24
    n: int = 1
    dealt: str = "in turn"
    H: int = 2
    K: int = 2
    dtype: str = "float32"
    values: str = "normal"
    uncleared: bool = False

    def __str__(self) -> str:
        return ", ".join([f"P={self.P}", *unusual(self, Case(self.P))])

    def run(self, seed: int) -> Run:
        """Return the run of the whole sequence."""
        return Run(
            1, self.S, "", True, self.H, self.K, 16, 2, dtype=self.dtype, values=self.values, seed=seed
        )

    def tokens(self, rank: int) -> Int[np.ndarray, " L"]:
        """Return the tokens that a rank's cache holds."""
        if self.dealt == "in turn":
            return np.arange(rank, self.S, self.P)
        return np.array_split(np.arange(self.S), self.P)[rank]


@dataclass
class Result:
    """One rank's out, its lse if it returns one, and `changed`: the names of inputs that the call changed."""

    out: Float[Tensor, "B H n D"]
    lse: Float[Tensor, "B H n"] | None
    changed: list[str]


DecodeCalls: TypeAlias = Calls[Case, Result]


def result(function: Callable[..., Any], case: Case, ring: Ring | None, rank: int, seed: int) -> Result:
    """Return this rank's result of a case. Raises: the function's error; BackendError if it is invalid."""
    q, k, v, _ = inputs(case.run(seed))
    mine = torch.from_numpy(case.tokens(rank))
    slots = SLOTS if case.uncleared else 0
    k, v = (torch.nn.functional.pad(x[:, :, mine], (0, 0, 0, slots), value=UNCLEARED) for x in (k, v))
    given: dict[str, Any] = {
        "q": q[:, :, case.S - case.n :].contiguous(), "k": k, "v": v, "length": len(mine),
        "lengths": [len(case.tokens(each)) for each in range(case.P)], "positions": mine,
    }  # fmt: skip
    kept = copy.deepcopy(given)
    found = call(function, (), {**given, **around(ring, rank, case.P)})
    out, lse, *_ = (*found, None) if isinstance(found, (tuple, list)) and found else (found, None)
    for name, x, like in (("out", out, q), ("lse", lse, q.to(state_dtype(q.dtype))[..., 0])):
        shape = (*like.shape[:2], case.n, *like.shape[3:])
        if name == "lse" and x is None:
            continue
        if not isinstance(x, Tensor) or (tuple(x.shape), x.dtype) != (shape, like.dtype):
            got = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise BackendError(f"{name} as a tensor {shape} of {like.dtype}", got)
    changed = [name for name, x in given.items() if not _same(x, kept[name])]
    return Result(out.detach(), None if lse is None else lse.detach(), changed)


def _same(x: Any, kept: Any) -> bool:
    return torch.equal(x, kept) if isinstance(x, Tensor) else bool(x == kept)


@lru_cache(maxsize=64)
def _truth(run: Run) -> dict[str, tuple[np.ndarray, float]]:
    """Return out and lse of the whole sequence, each with the largest allowed error."""
    true, limits = expected(run.plain)
    results = {"out": true.out, "lse": true.lse}
    return {name: (x, limits[name] * max(np.abs(x).max(initial=0.0), 1e-30)) for name, x in results.items()}


def _differs(calls: DecodeCalls, case: Case) -> str:
    (ranks,) = calls.of(case)
    for name, (whole, allowed) in _truth(case.run(calls.seed)).items():
        true = whole[:, :, case.S - case.n :]
        for rank, each in enumerate(ranks):
            if (found := getattr(each, name)) is None:
                continue
            errors = distance(oracle.float64(found), true)
            if errors.max() > allowed:
                at = np.unravel_index(int(errors.argmax()), errors.shape)
                got, right = apart(float(found[at]), true[at])
                values = f"{got} for {right}, {allowed:.2g} is allowed"
                return (
                    f"{name} on rank {rank} is {values}: batch {at[0]}, head {at[1]}, query {at[2]} ({case})"
                )
    return ""


CHECKS: tuple[CallCheck[Case, Result], ...] = (
    CallCheck("values", "one new token, against caches that are dealt in turn and in stretches", lambda ranks: [Case(P, S, dealt=dealt) for P in (1, *ranks) for S in (24, 37) for dealt in ("in turn", "in stretches")], itself, _differs),
    CallCheck("dtypes", "half dtypes merged in float32, and float64", lambda ranks: [Case(P, 64, dtype=dtype) for P in ranks[-1:] for dtype in ("bfloat16", "float16", "float64")], itself, _differs),
    CallCheck("grouped heads", "fewer key/value heads than query heads", lambda ranks: [Case(P, H=4, K=K) for P in ranks for K in (2, 1)], itself, _differs),
    CallCheck("empty ranks", "fewer tokens than ranks", lambda ranks: [Case(P, S, dealt=dealt) for P in ranks for S in (1, max(1, P - 1)) for dealt in ("in turn", "in stretches")], itself, _differs),
    CallCheck("large scores", "scores of some hundreds, which overflow without a maximum", lambda ranks: [Case(P, values=values) for P in ranks for values in ("large", "negative")], itself, _differs),
    CallCheck("new tokens", "some new tokens, causal among themselves", lambda ranks: [Case(P, n=n, dealt=dealt, H=H) for P in ranks for n, H in ((2, 2), (7, 4)) for dealt in ("in turn", "in stretches")], itself, _differs, (("positions",),)),
    CallCheck("new tokens in half", "several new tokens in half dtypes, causal among themselves", lambda ranks: [Case(P, 13, 7, dtype=dtype) for P in ranks[-1:] for dtype in ("bfloat16", "float16")], itself, _differs, (("positions",),)),
    CallCheck("short prefix", "a prefix of one token, and none", lambda ranks: [Case(P, S, S - before) for P in ranks for S in (8, 13) for before in (1, 0)], itself, _differs, (("positions",),)),
    CallCheck("uncleared slots", "slots that are not in use", lambda ranks: [Case(P, S, uncleared=True) for P in ranks for S in (24, max(1, P - 1))], itself, _differs, (("length", "lengths", "positions"),)),
    CallCheck("uncleared, new tokens", "several new tokens, and slots that are not in use", lambda ranks: [Case(P, n=3, uncleared=True) for P in ranks], itself, _differs, (("positions",),)),
    CallCheck("side effects", "queries and cache as they were", lambda ranks: [Case(P) for P in ranks], itself, changed_inputs),
)  # fmt: skip
"""The checks, in the order in which they are reported."""


def check_decode(
    target: Any,
    *,
    ranks: Sequence[int] = (2, 3, 4),
    seed: int = 0,
    only: Sequence[str] = (),
    limit: float = LIMIT,
) -> Report:
    """Return the findings about `target`, a decode or "package.module:name".

    ranks: the numbers of ranks. limit: seconds for each call on processes; a function over ringlab's Comm runs on virtual
    ranks in this process, without a limit.
    Raises: BackendError for an unknown check, a target that is not a function of q, or invalid ranks.

    >>> from ringlab.conformance.kinds.decode import check_decode
    >>> def alone(ring, q, k, v):  # right on one rank, which has the whole cache
    ...     weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    ...     return weights @ v
    >>> check_decode(alone, only=["values"], ranks=[1]).failed, check_decode(alone, only=["values"]).failed
    ([], ['values'])
    """
    if not ranks or min(ranks) < 1:
        raise BackendError("numbers of ranks of at least 1", repr(tuple(ranks)))
    calls = DecodeCalls(target, result, seed, limit, GIVEN)
    return report(calls, CHECKS, only, tuple(ranks), "a decode", {})
