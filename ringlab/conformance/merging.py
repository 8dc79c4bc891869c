r"""Checks of a merge: the partials of several ranks in, one attention out, as decode against a sharded cache needs it.

The function takes `outs` (P, B, H, L, D) and `lses` (P, B, H, L), by these names or as its first two arguments, and
returns out, or (out, lse). A rank without keys for a row has lse −∞ and out 0 there, or memory that nobody has written.

The bound follows from any order of merging in the state's dtype (float32, float64 for float64), whose unit of last place
is ε: each of P steps rounds an lse by ε |lse| and a few ε more, so lse is off by at most δ = P ε (max |lse| + 4), and a
weight e^(lse_i − lse) by as much of itself. So out is off by at most 2 δ Σ weight · |out_i|, and by a unit of its own dtype.
"""

from __future__ import annotations

import inspect
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
from ringlab.conformance.loading import resolve
from ringlab.conformance.runner import Finding, Report
from ringlab.errors import BackendError, RinglabError
from ringlab.merge import state_dtype

B, H, L, D = 2, 3, 5, 8
UNWRITTEN = 1e30
"""A value that memory may hold which nobody has written: finite, and its weight is 0."""


@dataclass(frozen=True)
class Case:
    """Random partials. shift, spread: mean and deviation of lse. without: what is empty, "a rank", "a row" on all ranks, or ""."""

    P: int
    dtype: str = "float32"
    shift: float = 0.0
    spread: float = 1.0
    without: str = ""
    unwritten: bool = False
    strided: bool = False

    def __str__(self) -> str:
        named = {"shift": 0.0, "spread": 1.0, "without": "", "unwritten": False, "strided": False}
        extra = [f"{key} {getattr(self, key)}" for key, usual in named.items() if getattr(self, key) != usual]
        return ", ".join([f"P={self.P} {self.dtype}", *extra])


CHECKS: dict[str, tuple[str, tuple[Case, ...]]] = {
    "values": ("the whole attention, of 1 to 8 partials", tuple(Case(P) for P in (1, 2, 3, 8))),
    "dtypes": ("half dtypes, summed in float32", tuple(Case(8, d) for d in ("bfloat16", "float16"))),
    "empty ranks": ("a rank without keys", (Case(2, without="a rank"), Case(8, without="a rank"))),
    "blind rows": ("a row without any key: out 0, lse −∞", (Case(1, without="a row"), Case(3, without="a row"))),
    "unwritten": ("a rank without keys, whose out nobody has written", (Case(3, without="a rank", unwritten=True),)),
    "large lse": ("lse near ±1,000, which overflows without a maximum", (Case(3, shift=1e3), Case(3, shift=-1e3))),
    "small weights": ("weights that differ by e^40", (Case(4, spread=40.0),)),
    "strided": ("partials that do not lie densely in memory", (Case(3, strided=True),)),
}  # fmt: skip


def check_merge(target: Any, *, base: float = math.e, seed: int = 0, only: Sequence[str] = ()) -> Report:
    """Return the findings about `target`, a function or "package.module:name", in this process.

    base: of which all lse are logarithms, those that come in and the one that is returned.
    Raises: BackendError for an unknown check, a target that is no function, or a base that is not above 1.

    >>> from ringlab.conformance.merging import check_merge
    >>> check_merge(lambda outs, lses: (lses.softmax(0).unsqueeze(-1) * outs).sum(0), only=["values"]).ok
    True
    """
    function = resolve(*target.split(":", 1)) if isinstance(target, str) and ":" in target else target
    unknown = sorted({*only} - {*CHECKS})
    if unknown or not callable(function) or not base > 1:
        needed = f"checks among {', '.join(CHECKS)}; a function; a base above 1"
        raise BackendError(needed, f"{unknown or ''} {function!r}, base {base}")
    name = target if isinstance(target, str) else getattr(function, "__qualname__", repr(function))
    report = Report(name, "no ranks", "this process", False, seed, math.inf)
    start = time.monotonic()
    for check, (asks, cases) in CHECKS.items():
        if check in only or not only:
            begun = time.monotonic()
            found = (wrong for case in cases for wrong in _wrong(function, case, float(base), seed))
            evidence = next(found, "")
            good = f"{len(cases)} cases: {'; '.join(map(str, cases))}"
            took = time.monotonic() - begun
            report.findings.append(Finding(check, asks, not evidence, evidence or good, took))
            report.runs += len(cases)
    report.seconds = time.monotonic() - start
    return report


def _wrong(function: Callable[..., Any], case: Case, base: float, seed: int) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong with the function's answer to a case."""
    outs, lses = partials(case, base, seed)
    kept = outs.clone(), lses.clone()
    true_out, true_lse, room, delta = _truth(outs, lses, base)
    try:
        named = {"outs", "lses"} <= {*inspect.signature(function).parameters}
        found = function(outs=outs, lses=lses) if named else function(outs, lses)
        out, lse = (*found, None)[:2] if isinstance(found, (tuple, list)) else (found, None)
    except RinglabError:
        raise
    except Exception as error:
        yield f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]} ({case})"
        return
    if not isinstance(out, Tensor) or out.shape != outs.shape[1:] or out.dtype != outs.dtype:
        yield f"out is to be a tensor {tuple(outs.shape[1:])} of {outs.dtype}, and is {_form(out)} ({case})"
        return
    if not all(map(torch.equal, (outs, lses), kept)):
        yield f"the partials were changed in place ({case})"
    yield from _beyond("out", oracle.float64(out), true_out, room, case)
    if isinstance(lse, Tensor):
        if lse.shape != lses.shape[1:]:
            yield f"lse is to be a tensor {tuple(lses.shape[1:])}, and is {_form(lse)} ({case})"
            return
        yield from _beyond("lse", oracle.float64(lse), true_lse, delta, case)


def partials(
    case: Case, base: float, seed: int
) -> tuple[Float[Tensor, "P B H L D"], Float[Tensor, "P B H L"]]:
    """Return the outs and lses of a case, the same for equal cases."""
    draw = np.random.default_rng([case.P, seed]).standard_normal
    outs, lses = draw((case.P, B, H, L, D)), case.shift + case.spread * draw((case.P, B, H, L))
    if where := {"": (), "a rank": (0,), "a row": (slice(None), 0, 0, 1)}[case.without]:
        lses[where], outs[where] = -np.inf, UNWRITTEN if case.unwritten else 0.0
    dtype = getattr(torch, case.dtype)
    out, lse = (
        torch.from_numpy(outs).to(dtype),
        torch.from_numpy(lses / math.log(base)).to(state_dtype(dtype)),
    )
    return (out.transpose(1, 3).contiguous().transpose(1, 3) if case.strided else out), lse


def _truth(outs: Tensor, lses: Tensor, base: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return out and lse in float64, and the errors allowed of them, as in the module's docstring."""
    values, logs = oracle.float64(outs), oracle.float64(lses) * math.log(base)
    top = np.where(np.isfinite(logs.max(0)), logs.max(0), 0.0)
    weights = np.exp(logs - top)
    total = weights.sum(0)
    shares = (weights / np.where(total == 0, 1.0, total))[..., None]
    out = (shares * values).sum(0)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    largest = np.abs(logs, where=np.isfinite(logs), out=np.zeros_like(logs)).max(0)
    delta = len(outs) * torch.finfo(lses.dtype).eps * (largest + 4)
    room = 2 * delta[..., None] * (shares * np.abs(values)).sum(0) + torch.finfo(outs.dtype).eps * np.abs(out)
    return out, lse / math.log(base), room, delta / math.log(base)


def _beyond(name: str, found: np.ndarray, true: np.ndarray, room: np.ndarray, case: Case) -> Iterator[str]:
    with np.errstate(invalid="ignore"):
        error = np.where(found == true, 0.0, np.abs(found - true))
    error = np.where(np.isnan(error), np.inf, error)
    if (error > room).any():
        at = np.unravel_index(int((error - room).argmax()), error.shape)
        place = f"batch {at[0]}, head {at[1]}, query {at[2]}"
        yield f"{name} is {found[at]:.6g} for {true[at]:.6g}, {room[at]:.2g} is allowed: {place} ({case})"


def _form(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
