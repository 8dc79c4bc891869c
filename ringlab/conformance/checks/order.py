"""Checks of dependence: causality, the same results for the same inputs, and memory that is not shared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringlab.conformance.checks.check import (
    Check,
    Judge,
    Measure,
    Plan,
    Verdict,
    by_errors,
    needs_backward,
    needs_causal,
    needs_own_tensors,
    needs_ranks,
)
from ringlab.conformance.checks.measuring import expected
from ringlab.conformance.run.run import Ran, Run
from ringlab.conformance.tolerance import NAMES

_LENGTH = 24
_TOKEN = 13  # in the middle of the sequence, and not at the border of a shard


def _probes(plan: Plan) -> list[Run]:
    ranks = plan.ranks(3) if plan.quick else plan.ranks(2, 3, 4)
    moves: tuple[tuple[str, int] | None, ...] = (None, ("token", _TOKEN))
    moves += (("dout", _TOKEN),) if plan.claims.backward else ()
    return [
        plan.run(P, _LENGTH, layout=layout, causal=True, moved=moved)
        for layout in plan.claims.layouts
        for P in ranks
        for moved in moves
    ]


def _causality(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict on causality.

    Changing token j must not change out, lse or dq of the rows before j. Changing row j of dout must not
    change dk or dv after j.
    """
    still = {(ran.run.layout, ran.run.P): ran for ran in rans if ran.run.moved is None}
    looked = 0
    for ran in rans:
        if ran.run.moved is None:
            continue
        what, j = ran.run.moved
        names = ("out", "lse", "dq") if what == "token" else ("dk", "dv")
        rows = slice(0, j) if what == "token" else slice(j + 1, None)
        base = still[ran.run.layout, ran.run.P]
        for name in names:
            if name not in ran.arrays:
                continue
            looked += 1
            moved = _first_moved(ran, base, name, rows)
            if moved is not None:
                changed = f"token {j} is changed" if what == "token" else f"row {j} of dout is changed"
                side = "before" if what == "token" else "after"
                return Verdict(
                    False, f"{changed}, and {name} of token {moved}, {side} it, moves ({base.run})", base.run
                )
    return Verdict(True, f"{looked} probes: nothing before a changed token moves, and no gradient after it")


def _first_moved(ran: Ran, base: Ran, name: str, rows: slice) -> int | None:
    """Return the first token whose result changes by more than rounding, or None; NaN counts as a change."""
    (true, limits), (_, others) = expected(base.run.plain), expected(ran.run.plain)
    scale = np.abs(getattr(true, name)).max(initial=0.0) or 1.0
    allowed = 2 * max(limits[name], others[name]) * scale
    before, after = (np.moveaxis(each.arrays[name], 2, 0)[rows] for each in (base, ran))
    with np.errstate(all="ignore"):
        change = np.where(before == after, 0.0, np.abs(before - after)).reshape(len(before), -1)
    moved = np.flatnonzero(~(change.max(-1, initial=0.0) <= allowed))
    return int(moved[0]) + (rows.start or 0) if len(moved) else None


def _equal(plan: Plan) -> list[Run]:
    ranks = plan.ranks(2, 3) if plan.quick else plan.ranks(1, 2, 3, 4)
    return [
        plan.run(
            P, _LENGTH, twice=True, layout=plan.claims.layouts[-1], causal=plan.claims.causal[-1], dtype=dtype
        )
        for P in ranks
        for dtype in plan.dtypes("float32", "bfloat16")
    ]


def _equal_and_long(plan: Plan) -> list[Run]:
    """Return the runs of `_equal`, and runs with long shards.

    Kernels split long shards into several blocks of keys, and may add the gradients of blocks in any order.
    """
    P = plan.ranks(2)[0]
    long = [
        plan.run(P, 320 * P, twice=True, D=32, dtype=dtype) for dtype in plan.dtypes("float32", "bfloat16")
    ]
    return [*_equal(plan), *long]


def _noting(kind: str, right: str) -> Judge:
    def judge(plan: Plan, rans: Sequence[Ran]) -> Verdict:
        notes = [(text, ran.run) for ran in rans for text in ran.noted(kind)]
        return Verdict(
            not notes, notes[0][0] if notes else f"{len(rans)} runs: {right}", notes[0][1] if notes else None
        )

    return judge


def _early(plan: Plan) -> list[Run]:
    return [plan.run(P, _LENGTH, strict=True, causal=plan.claims.causal[-1]) for P in plan.ranks(2, 3)]


ORDER_CHECKS = (
    Check("causality", "a changed token moves nothing before it, a changed row of dout no gradient after it", "quick", Measure.MASKS, _probes, _causality, needs_causal),
    Check("determinism", "equal calls give equal bits, in long shards too", "quick", Measure.CALLER, _equal_and_long, _noting("determinism", "equal bits")),
    Check("inputs kept", "q, k, v and dout are as they were", "quick", Measure.CALLER, _equal, _noting("inputs", "nothing was changed"), needs_own_tensors),
    Check("aliasing", "results share no memory with inputs, with each other, or with a later call, and backward does not overwrite out or lse", "quick", Measure.CALLER, _equal, _noting("aliasing", "each result has memory of its own"), needs_own_tensors),
    Check("two layers", "a second forward before the first one's backward changes none of its gradients", "quick", Measure.CALLER, _equal, _noting("layers", "gradients are those of a call alone"), needs_backward),
    Check("early reads", "receive buffers hold NaN until they are waited for; what is sent may not change", "quick", Measure.FAULTS, _early, by_errors(NAMES), needs_ranks),
)  # fmt: skip
