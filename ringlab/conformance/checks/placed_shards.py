"""Checks of shards that no layout describes: positions far from 0, other orders of tokens, and other lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ringlab.conformance.checks.arguments import (
    ARGUMENT_LENGTH,
    Argument,
    WindowArgument,
    as_without,
    asked_of,
    place_of,
    shard_of,
)
from ringlab.conformance.checks.check import (
    Check,
    Measure,
    Plan,
    Verdict,
    by_errors,
    needs_causal,
    needs_positions,
)
from ringlab.conformance.run.run import GIVEN, Ran, Run
from ringlab.conformance.target.claims import LENGTHS, ORDERS
from ringlab.conformance.tolerance import NAMES
from ringlab.layout import layout_names


def _far(plan: Plan) -> list[Run]:
    """Return runs whose positions pass 2¹⁵, 2¹⁶ and 2²⁴: the limits of int16, uint16 and of float32 integers.

    Beyond these limits, 16-bit positions become negative or begin again at 0, and half dtypes and float32 round
    neighbours to the same position. Windows and ALiBi use distances, which may be rounded too.
    """
    P = plan.ranks(2)[0]
    plain = plan.run(P, ARGUMENT_LENGTH, layout=plan.claims.layouts[-1], causal=True)
    of_distance = [replace(plain, **each.changes(plan, plain, 0)) for each in asked_of(plan, _BY_DISTANCE)]
    halves = [replace(plain, dtype=dtype) for dtype in plan.half]
    far = [(each, (2**16, 2**24)) for each in (*halves, *of_distance)]
    return [
        replace(run, offset=end - run.S // 2)
        for run, ends in ((plain, (2**15, 2**16, 2**24)), *far)
        for end in ends
    ]


_BY_DISTANCE = ("window", "window sides", "ALiBi slopes")
"""The arguments whose effect depends only on the distance between two positions."""


def _needs_far(plan: Plan) -> str | None:
    return needs_positions(plan) or needs_causal(plan)


_BY_PLACE = (
    "window",
    "window sides",
    "prefix",
    "ALiBi slopes",
    "additive bias",
    "packed documents",
    "padding mask",
)
"""The arguments whose effect depends on the positions of rows and keys."""


def _placed(plan: Plan) -> list[Argument]:
    """Return the arguments in `_BY_PLACE` that the target takes; the window also has the length of a shard plus 1."""
    return [
        replace(each, values=(*each.values, _beyond_a_shard)) if isinstance(each, WindowArgument) else each
        for each in asked_of(plan, _BY_PLACE)
    ]


def _beyond_a_shard(run: Run) -> dict[str, Any]:
    return {"window": shard_of(run) + 1}


def _shards(plan: Plan) -> list[str]:
    """Return the names in `ORDERS`, and those in `LENGTHS` if the target claims ragged lengths on several ranks."""
    ranks = [P for P in plan.claims.ranks if P > 1]
    return [*ORDERS, *(LENGTHS if plan.claims.ragged and ranks else ())]


def _by_positions(plan: Plan) -> list[Run]:
    """Return plain runs with all of these shards, on one rank too, and runs of arguments with some of them.

    Contiguous shards come first, because a ring may cache data about them by a length, or by a first and last
    token, that the other shards share.
    """
    P = plan.ranks(3, 2)[0]
    plain = [
        plan.run(P, Argument.length(plan, P), layout=layout, causal=causal)
        for layout in ("contiguous", *_shards(plan))
        for causal in plan.claims.causal
    ]
    alone = [
        plan.run(1, 16, layout=layout, causal=causal, K=2)
        for layout in ORDERS
        for causal in plan.claims.causal
    ]
    asked = [each for each in _shards(plan) if each in LENGTHS or each == "chunks in no order"]
    given = [run for each in _placed(plan) for layout in asked for run in each.runs(plan, layout)]
    return [*plain, *(alone if 1 in plan.claims.ranks else []), *given]


def _as_placed(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict: runs with these shards, and with arguments, must give the oracle's results or be refused."""
    for ran in rans:
        if ran.trouble is not None and not ran.trouble.refuses:
            return Verdict(False, f"{ran.trouble} ({ran.run})", ran.run)
    done = {ran.run: ran for ran in rans}
    plain = [ran for ran in rans if _is_plain(ran.run)]
    right = [ran for ran in plain if ran.trouble is None]
    verdicts = [by_errors(NAMES)(plan, right)] if right else []
    taken = {place_of(ran.run) for ran in right}
    for each in _placed(plan):
        made = each.made(plan, done, _shards(plan))
        verdicts.append(
            each.judge(plan, [ran for ran in made if place_of(ran.run) in taken and ran.trouble is None])
        )
    if wrong := next((each for each in verdicts if not each.ok), None):
        return wrong
    refused = [f"refused: {ran.trouble} ({ran.run})" for ran in (*plain, *rans) if ran.trouble is not None]
    said = [each.evidence for each in verdicts if each.evidence]
    return Verdict(True, "; ".join([*said, *refused[:1]])[:700])


def _is_plain(run: Run) -> bool:
    return not any(getattr(run, field) for field in GIVEN)


def needs_any_layout(plan: Plan) -> str | None:
    """Return the reason why shards that belong to no layout are not tested, or None."""
    if {*layout_names()} <= {*plan.claims.layouts}:
        return needs_positions(plan)
    return needs_positions(plan) or f"the target claims the layouts {', '.join(plan.claims.layouts)} only"


SHARD_CHECKS = (
    Check("far positions", "positions beyond 32,767, 65,535 and 16,777,216, as in a later part of a long sequence: the same result, or an error", "quick", Measure.ARGUMENTS, _far, as_without, _needs_far, tolerant=True),
    Check("any shards", "tokens in orders, and shards of lengths, that only positions can say, with windows, documents and other arguments: the oracle's result, or an error", "quick", Measure.ARGUMENTS, _by_positions, _as_placed, needs_any_layout, tolerant=True),
)  # fmt: skip
