r"""Checks of a merge of several ranks' partials into one attention, as decode with a sharded cache needs it.

The function takes `outs` (P, B, H, L, D) and `lses` (P, B, H, L), by these names or as its first two
arguments, and returns out, or (out, lse): out in the dtype of `outs`, lse in that of `lses`, float32 or
float64. If a rank has no keys for a row, its lse is −∞ for that row, and its row of `outs` is 0 or unwritten
memory.

The bound holds for any order of merging in the state's dtype (float32, float64 for float64), whose unit of
last place is ε. Each of P steps rounds an lse by ε |lse| and a few ε more, so lse is off by at most δ = P ε
(max |lse| + 4), and a weight e^(lse_i − lse) has a relative error of at most δ. So out is off by 2 δ Σ weight
· |out_i|, by 2 P ε max |out_i| if a difference of two outs is weighted, and by a unit of last place of its
own dtype.

A partial that is NaN or infinite comes from a kernel that overflowed, or from a rank that failed. It has to show: out may not
be finite there. An lse of NaN or +∞ may show in lse instead. The function may also raise an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ringlab import oracle
from ringlab.conformance.checks import LOADS, refuse_unknown
from ringlab.conformance.kinds.calls import unusual
from ringlab.conformance.report.findings import Finding, Report
from ringlab.conformance.run.loading import named
from ringlab.conformance.target.calling import (
    CannotCall,
    called,
    check_callable,
    name_of,
    parameters,
    required,
    written,
)
from ringlab.errors import BackendError, apart
from ringlab.merge import state_dtype

B, H, L, D = 2, 3, 5, 8
UNWRITTEN = 1e30
"""A value of unwritten memory: it is finite, and its weight is 0."""
EMPTY: dict[str, Any] = {
    "first": (0,), "middle": (1,), "last": (-1,), "some rows": (0, slice(None), slice(None), slice(2)), "a row": (slice(None), 0, 0, 1),
}  # fmt: skip
"""The places without keys: one rank, some rows of the first rank, or one row on all ranks."""


BROKEN = {
    "NaN in out": ("out", math.nan), "∞ in out": ("out", math.inf), "−∞ in out": ("out", -math.inf),
    "NaN in lse": ("lse", math.nan), "∞ in lse": ("lse", math.inf),
}  # fmt: skip
"""Wrong entries of a partial, which must show in the result."""


@dataclass(frozen=True)
class Case:
    """Random partials. shift, spread: the mean and deviation of lse. empty: a key of `EMPTY`, or "".

    broken: a key of `BROKEN`, or ""; the middle partial has this entry at its first row.
    """

    P: int
    dtype: str = "float32"
    shift: float = 0.0
    spread: float = 1.0
    empty: str = ""
    unwritten: bool = False
    strided: bool = False
    broken: str = ""

    def __str__(self) -> str:
        return ", ".join([f"P={self.P} {self.dtype}", *unusual(self, Case(self.P, self.dtype))])


CHECKS: dict[str, tuple[str, tuple[Case, ...]]] = {
    "values": ("the whole attention, of 1 to 16 partials", tuple(Case(P) for P in (*range(1, 9), 12, 16))),
    "dtypes": ("half dtypes summed in float32, and float64", tuple(Case(8, d) for d in ("bfloat16", "float16", "float64"))),
    "empty ranks": ("ranks without keys", (Case(2, empty="first"), *(Case(3, empty=e) for e in ("middle", "last", "some rows")))),
    "blind rows": ("a row without any key: out 0, lse −∞", (Case(1, empty="a row"), Case(3, empty="a row"))),
    "unwritten": ("no keys, and an out that nobody has written", (Case(1, empty="a row", unwritten=True), *(Case(3, empty=e, unwritten=True) for e in EMPTY))),
    "large lse": ("lse near ±1,000, which overflows without a maximum", (Case(3, shift=1e3), Case(3, shift=-1e3))),
    "small weights": ("weights that differ by e^4 and by e^40", (Case(4, spread=4.0), Case(4, spread=40.0))),
    "NaN": ("a NaN or ∞ in a partial shows in the result, or raises an error", tuple(Case(P, dtype, broken=each) for P, dtype in ((1, "float32"), (3, "float32"), (3, "bfloat16")) for each in BROKEN)),
    "strided": ("partials that do not lie densely in memory", (Case(3, strided=True),)),
}  # fmt: skip


def check_merge(target: Any, *, base: float = math.e, seed: int = 0, only: Sequence[str] = ()) -> Report:
    """Return the findings about `target`, a function or "package.module:name".

    The function runs in this process, without a time limit. base: the base of all lse, both those of the
    partials and the returned one.
    Raises: BackendError for an unknown check, a target that is not a function of two arguments, or a base
    that is not a number above 1.

    >>> from ringlab.conformance.kinds.merge import check_merge
    >>> check_merge(lambda outs, lses: (lses.softmax(0).unsqueeze(-1) * outs).sum(0), only=["values"]).ok
    True
    """
    refuse_unknown(only, CHECKS)
    if not 1 < base < math.inf:
        raise BackendError("a base of lse above 1", repr(base))
    function = named(target) if isinstance(target, str) else target
    left = _left(function)
    name = target if isinstance(target, str) else name_of(function)
    loads = Finding(
        LOADS, "the target can be imported", True, f"{name}, a merge; lse to base {base:.4g}", 0.0
    )
    report = Report(name, "one process", "none", False, seed, math.inf, [loads], not_asked=left)
    for check, (asks, cases) in CHECKS.items():
        if check in only or not only:
            begun = time.monotonic()
            wrong = ((text, case) for case in cases for text in _wrong(function, case, float(base), seed))
            evidence, found = next(wrong, ("", None))
            good = f"{len(cases)} cases: {'; '.join(map(str, cases))}"
            took = time.monotonic() - begun
            case = None if found is None else vars(found)
            report.findings.append(Finding(check, asks, not evidence, evidence or good, took, case=case))
            report.runs += len(cases)
    report.seconds = sum(each.seconds for each in report.findings)
    return report


def _wrong(function: Callable[..., Any], case: Case, base: float, seed: int) -> Iterator[str]:
    """Yield a sentence for each fault in the function's answer to a case."""
    outs, lses = partials(case, base, seed)
    kept = outs.clone(), lses.clone()
    with np.errstate(invalid="ignore"):
        true_out, true_lse, room, delta = truth(outs, lses, base)
    try:
        found = called(function, *_arguments(function, outs, lses))
    except CannotCall:
        raise
    except Exception as error:
        if case.broken:
            return
        yield f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]} ({case})"
        return
    # If the tuple is empty, it is compared as out, which is then wrong.
    results = found if isinstance(found, (tuple, list)) and found else (found,)
    wanted = (("out", outs, true_out, room), ("lse", lses, true_lse, delta))
    if len(results) > 1 and results[1] is None:
        results = results[:1]
    for (name, given, true, allowed), result in zip(wanted, results, strict=False):
        form = tuple(given.shape[1:]), given.dtype
        tensor = isinstance(result, Tensor)
        if not tensor or (tuple(result.shape), result.dtype) != form:
            got = f"{tuple(result.shape)} of {result.dtype}" if tensor else type(result).__name__
            yield f"{name} is to be a tensor {form[0]} of {form[1]}, and is {got} ({case})"
            if case.broken:
                return
        elif not case.broken:
            yield from _beyond(name, oracle.float64(result), true, allowed, case)
    if case.broken:
        yield from _hidden(case, results)
    elif not all(map(torch.equal, (outs, lses), kept)):
        yield f"the partials were changed in place ({case})"


def _hidden(case: Case, results: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence if all results of a row are finite although an entry of a partial there is not."""
    out, *lse = (x[0, 0, 0] for x in results[:2])
    shown = out[:1] if BROKEN[case.broken][0] == "out" else torch.cat([out, *(x[None] for x in lse)])
    # If a lse is ∞, the other partials have no weight in the limit, so out may be finite.
    if shown.isfinite().all() and (lse or case.broken != "∞ in lse"):
        yield f"the result is finite despite {case.broken} of a partial: nobody would notice ({case})"


def _left(function: Any) -> tuple[str, ...]:
    """Return the parameters that get no partials.

    Raises: BackendError unless the function takes outs and lses and requires no other argument.
    """
    check_callable(function)
    names = written(function)
    by_name = {*_TAKEN} <= {*names}
    left = tuple(name for number, name in enumerate(names) if (name not in _TAKEN if by_name else number > 1))
    if missing := sorted(required(function) & {*left}):
        needed = "a function of outs and lses, by these names or as the first two parameters, which requires no other"
        raise BackendError(needed, f"one that requires {', '.join(missing)}", "bind it, or give it a default")
    return left


def _arguments(
    function: Callable[..., Any], outs: Tensor, lses: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    by_name = {*_TAKEN} <= parameters(function)
    return ((), {"outs": outs, "lses": lses}) if by_name else ((outs, lses), {})


_TAKEN = ("outs", "lses")


def partials(
    case: Case, base: float, seed: int
) -> tuple[Float[Tensor, "P B H L D"], Float[Tensor, "P B H L"]]:
    """Return the outs and lses of a case, which are the same for equal cases."""
    draw = np.random.default_rng([case.P, seed]).standard_normal
    outs, lses = draw((case.P, B, H, L, D)), case.shift + case.spread * draw((case.P, B, H, L))
    if case.empty:
        lses[EMPTY[case.empty]], outs[EMPTY[case.empty]] = -np.inf, UNWRITTEN if case.unwritten else 0.0
    if case.broken:
        name, value = BROKEN[case.broken]
        {"out": outs[..., 0], "lse": lses}[name][case.P // 2, 0, 0, 0] = value
    dtype = getattr(torch, case.dtype)
    pair = torch.from_numpy(outs).to(dtype), torch.from_numpy(lses / math.log(base)).to(state_dtype(dtype))
    out, lse = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in pair) if case.strided else pair
    return out, lse


def truth(
    outs: Float[Tensor, "P *rows Dv"], lses: Float[Tensor, "P *rows"], base: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return out and lse in float64, and how far rounding may be from each of their entries."""
    logs = lses.double().numpy() * math.log(base)
    values = np.where(np.isfinite(logs)[..., None], outs.double().numpy(), 0.0)
    top = np.where(np.isfinite(logs.max(0)), logs.max(0), 0.0)
    weights = np.exp(logs - top)
    total = weights.sum(0)
    shares = (weights / np.where(total == 0, 1.0, total))[..., None]
    out = (shares * values).sum(0)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    steps = len(outs) * torch.finfo(lses.dtype).eps
    delta = steps * (np.abs(logs, where=np.isfinite(logs), out=np.zeros_like(logs)).max(0) + 4)
    room = 2 * delta[..., None] * (shares * np.abs(values)).sum(0) + 2 * steps * np.abs(values).max(0)
    return out, lse / math.log(base), room + torch.finfo(outs.dtype).eps * np.abs(out), delta / math.log(base)


def _beyond(name: str, found: np.ndarray, true: np.ndarray, room: np.ndarray, case: Case) -> Iterator[str]:
    with np.errstate(invalid="ignore"):
        error = np.where(found == true, 0.0, np.abs(found - true))
    error = np.where(np.isnan(error), np.inf, error)
    if (error > room).any():
        at = np.unravel_index(int((error - room).argmax()), error.shape)
        place = f"batch {at[0]}, head {at[1]}, query {at[2]}"
        got, right = apart(found[at], true[at])
        yield f"{name} is {got} for {right}, {room[at]:.2g} is allowed: {place} ({case})"
