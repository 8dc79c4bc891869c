"""The check of pairs: settings of a call that are right one at a time may be wrong together.

A covering array contains every pair of values of two axes: arguments, ways of calling, dtypes, layouts, masks,
ranks, heads and strides. An argument takes part if the target honours it alone. A combination may be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from ringlab.conformance.checks.arguments import ARGUMENTS, Argument
from ringlab.conformance.checks.check import Check, Measure, Plan, Verdict, by_errors, needs_own_tensors
from ringlab.conformance.checks.measuring import measure
from ringlab.conformance.pairwise_cases import Axes, covering_pairs
from ringlab.conformance.run.call_patterns import CALL_PATTERNS
from ringlab.conformance.run.run import RAISED, Ran, Run, Trouble
from ringlab.conformance.tolerance import NAMES

WAYS = (
    "no_grad", "recomputed", "summed loss", "loss scale", "loss on lse", "backward again", "five in flight",
    "evaluated in between", "q and v trained",
)  # fmt: skip
"""The ways of calling that have a place in the table; the others change nothing about a single call."""
_APART = frozenset(
    {frozenset(pair) for pair in (("soft cap", "ALiBi slopes"), ("sinks", "way"))}
    | {frozenset(("other sequence", what)) for what in ("window", "packed documents", "padded documents", "padding mask", "joint tokens")}
    | {frozenset(("joint tokens", what)) for what in ("window", "packed documents", "padded documents", "padding mask", "head dim of v")}
    | {frozenset(("prefix", what)) for what in ("padded documents", "padding mask")}
)  # fmt: skip
"""The axes whose values have no agreed meaning together.

Whether a soft cap applies before or after ALiBi's bias differs among models, and lse with sinks among rings."""
_BY_MASK = frozenset({frozenset(("prefix", "window")), frozenset(("prefix", "packed documents"))})
"""The axes whose values make sense together only in ringlab's Mask."""

_NO_REFUSALS = ("DeadlockError", "IndexError", "KeyError", "ZeroDivisionError")
"""Errors that are never a refusal of an argument. PeerDiedError may follow from another rank's refusal."""

Chosen = Mapping[str, Any]


def _alone(plan: Plan, argument: Argument) -> list[Run]:
    """Return the runs of the argument's own check in one place, which are not made twice."""
    return argument.runs_in(plan, argument.places(plan)[0])


def _first(plan: Plan) -> list[Run]:
    """Return the runs that show which arguments the target honours, and a plain run."""
    asked = [argument for argument in ARGUMENTS if argument.needs(plan) is None]
    return [_run(plan, {}), *(run for argument in asked for run in _alone(plan, argument))]


def _axes(plan: Plan, honoured: Sequence[Argument]) -> dict[str, tuple[Any, ...]]:
    claims = plan.claims
    ways = [
        name
        for name in WAYS
        if (claims.autograd or not CALL_PATTERNS[name].autograd)
        and (claims.backward or not CALL_PATTERNS[name].backward)
    ]
    heads = ((2, 1), (4, 2), (2, 2)) if claims.grouped else ((2, 2),)
    return {
        **{each.what: (None, *range(len(each.values + each.others))) for each in honoured},
        "way": ("", *ways),
        "layout": claims.layouts,
        "causal": claims.causal,
        "P": tuple(plan.ranks(3, 2, 4)),
        "dtype": tuple(plan.dtypes("float32", "bfloat16", "float16", "float64")),
        "heads": heads,
        "sequences": (1,) if claims.axes == "LHD" else (1, 2),
        "strides": ("",) if needs_own_tensors(plan) else ("", "heads", "dims"),
        "scale": (None, 0.3) if claims.scale else (None,),
    }


def _fits(plan: Plan, honoured: Mapping[str, Argument], chosen: Chosen) -> bool:
    """Return whether these settings make sense together."""
    given = [name for name in honoured if chosen.get(name) is not None]
    masks = [chosen["causal"]] if "causal" in chosen else plan.claims.causal
    if not any(all(honoured[name].fits(plan, causal) for name in given) for causal in masks):
        return False
    changes = CALL_PATTERNS[chosen["way"]].changes if chosen.get("way") else {}
    sample = plan.run(1, Argument.length(plan, 1))
    pads = any("pads" in honoured[name].changes(plan, sample, chosen[name]) for name in given)
    if changes.get("dout") == "ones" and pads:
        return False  # a summed loss has a gradient in rows of padding too
    if changes.get("dlse"):
        given.append("way")
    for a, b in combinations(given, 2):
        pair = frozenset((a, b))
        if pair in _APART or (pair in _BY_MASK and not plan.claims.takes_mask):
            return False
        if "way" not in pair and honoured[a].fields(plan) & honoured[b].fields(plan):
            return False
    return True


def _run(plan: Plan, chosen: Chosen, honoured: Mapping[str, Argument] | None = None) -> Run:
    P = chosen.get("P") or plan.ranks(3, 2, 4)[0]
    named = {name: chosen[name] for name in ("layout", "causal", "dtype", "scale") if name in chosen}
    if "heads" in chosen:
        H, K = chosen["heads"]
        named |= {"H": H, "K": K, "B": chosen["sequences"], "strided": chosen["strides"]}
    run = plan.run(P, Argument.length(plan, P), **named)
    changes: dict[str, Any] = {}
    for name, argument in (honoured or {}).items():
        if chosen[name] is not None:
            changes |= argument.changes(plan, run, chosen[name])
    if way := chosen.get("way"):
        changes |= {"use": way, **CALL_PATTERNS[way].changes}
    return replace(run, **changes)


def _judge(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict.

    It first asks for the runs of the table, and then for simpler runs than the first wrong one.
    """
    done = {ran.run: ran for ran in rans}
    plain = done[_run(plan, {})]
    if plain.trouble is not None:
        return Verdict(False, f"{plain.trouble} ({plain.run})")
    honoured = {
        each.what: each
        for each in ARGUMENTS
        if each.needs(plan) is None and all(_is_right(done[run]) for run in _alone(plan, each))
    }
    axes, fits = _axes(plan, tuple(honoured.values())), partial(_fits, plan, honoured)
    rows = {_run(plan, chosen, honoured): chosen for chosen in covering_pairs(axes, fits)}
    if missing := tuple(run for run in rows if run not in done):
        return Verdict(True, "", more=missing)
    made = [done[run] for run in rows]
    for ran in made:
        if ran.trouble is not None and not _is_refusal(
            ran.trouble, [rows[ran.run][name] for name in honoured]
        ):
            return Verdict(False, f"{ran.trouble} ({ran.run})")
        if noted := [*ran.noted("use"), *ran.noted("padding")]:
            return Verdict(False, noted[0])
    refused = [ran for ran in made if ran.trouble is not None]
    verdict = by_errors(NAMES)(plan, [ran for ran in made if ran.arrays])
    if verdict.counter is None:
        also = f"; refused in {len(refused)}: {refused[0].trouble} ({refused[0].run})" if refused else ""
        return replace(verdict, evidence=f"{verdict.evidence}{also}"[:500])
    wrong = rows[verdict.counter]
    simpler = {axis: _run(plan, row, honoured) for axis, row in _simpler(axes, fits, wrong).items()}
    if missing := tuple(run for run in simpler.values() if run not in done):
        return Verdict(True, "", more=missing)
    needed = [axis for axis, run in simpler.items() if _is_right(done[run])]
    named = [_setting(plan, verdict.counter, axis, wrong[axis], honoured) for axis in needed]
    only = f"only where {' comes with '.join(named)}" if len(named) > 1 else f"only with {''.join(named)}"
    cause = f"wrong {only}; " if named else ""
    return replace(verdict, evidence=f"{cause}{verdict.evidence}")


def _is_refusal(trouble: Trouble, values: Sequence[int | None]) -> bool:
    """Return whether an error refuses a combination of arguments; a call without arguments has none to refuse."""
    given = any(value is not None for value in values)
    return given and trouble.kind == RAISED and not trouble.text.startswith(_NO_REFUSALS)


def _is_right(ran: Ran) -> bool:
    return ran.trouble is None and all(each.ok for each in measure(ran))


def _simpler(axes: Axes, fits: Callable[[Chosen], bool], wrong: Chosen) -> dict[str, Chosen]:
    """Return, by axis, the wrong row in which the value of this axis alone is replaced by the plain one."""
    rows = {axis: {**wrong, axis: values[0]} for axis, values in axes.items() if wrong[axis] != values[0]}
    return {axis: row for axis, row in rows.items() if fits(row)}


def _setting(plan: Plan, run: Run, axis: str, value: Any, honoured: Mapping[str, Argument]) -> str:
    if axis not in honoured:
        return f"{axis}={value}"
    return f"{axis} {', '.join(map(str, honoured[axis].changes(plan, run, value).values()))}"


PAIR_CHECKS = (
    Check("pairs", "every two settings together: arguments, ways of calling, dtypes, layouts, masks, heads", "quick", Measure.ARGUMENTS, _first, _judge, tolerant=True),
)  # fmt: skip
