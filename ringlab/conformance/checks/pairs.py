"""The check of pairs: settings of a call that are right one at a time may be wrong together.

The axes are arguments, ways of calling, dtypes, layouts, masks, ranks, heads and strides. An argument takes
part if the target honours it alone. First come rows in which only one setting is not the simplest one, because
they may take a fast path. Then a covering array contains every pair of values of two axes. If the target
refuses a row, the check looks for the two settings that are refused together, and tests the other pairs again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from ringlab.conformance.checks.arguments import ARGUMENTS, Argument, as_understood
from ringlab.conformance.checks.check import (
    Check,
    Measure,
    Plan,
    Verdict,
    by_errors,
    needs_own_tensors,
)
from ringlab.conformance.checks.dropout import IN_PAIRS as DROPOUT
from ringlab.conformance.checks.measuring import measure
from ringlab.conformance.checks.placed_shards import needs_any_layout
from ringlab.conformance.pairwise_cases import Axes, Chosen, completed, covering_pairs, pairs_in
from ringlab.conformance.run.call_patterns import CALL_PATTERNS
from ringlab.conformance.run.run import RAISED, Ran, Run, Trouble, in_words
from ringlab.conformance.target.argument_names import WINDOWS
from ringlab.conformance.target.claims import RING
from ringlab.conformance.tolerance import NAMES

WAYS = (
    "no_grad", "recomputed", "summed loss", "loss scale", "loss on lse", "backward again", "five in flight",
    "evaluated in between", "q and v trained", "same memory", "side effects",
)  # fmt: skip
"""The ways of calling that have a place in the table; the others change nothing about a single call."""
_NOT_WITH = {
    "soft cap": ("ALiBi slopes", "additive bias"),
    "sinks": ("way",),
    "window sides": ("window", "prefix"),
    "padding of one sequence": ("padding mask", "packed documents", "padded documents", "prefix"),
    "padding with holes": ("padding mask", "packed documents", "padded documents", "prefix", "padding of one sequence"),
    "prefix": ("padded documents", "padding mask"),
    "documents of each sequence": ("packed documents", "padded documents", "padding mask", "padding with holes", "prefix"),
    **dict.fromkeys(
        ("other sequence", "more keys", "documents of keys", "joint tokens"),
        ("window", "window sides", "packed documents", "padded documents", "padding mask", "padding of one sequence", "padding with holes",
         "documents of each sequence", "joint tokens", "prefix", "ALiBi slopes", "additive bias", "dropout"),
    ),
    "head dim of v": ("joint tokens", "dropout"),
}  # fmt: skip
"""The axes whose values have no agreed meaning together.

Models differ in whether a soft cap applies before or after a bias, and rings in whether lse includes sinks."""
_BY_MASK = {"prefix": ("window", "packed documents")}
"""The axes whose values make sense together only in a mask."""
_WITHOUT_OUT = ("loss on lse", "backward again", "q and v trained")
"""The ways of calling that return no out; only out shows the pairs that dropout drops."""
PAIRED = (*(each for each in ARGUMENTS if each.paired), DROPOUT)
"""The arguments that have a place in the table."""

_LISTED = 6
"""The most pairs of settings that a report lists as refused together."""
_ROUNDS = 100
"""More rounds than any table needs: each round settles at least one pair of settings, and most rounds settle
many."""


def _alone(plan: Plan, argument: Argument) -> list[Run]:
    """Return the runs of the argument's own check in its first place; they are not made again."""
    return argument.runs_in(plan, argument.places(plan)[0])


def _first(plan: Plan) -> list[Run]:
    """Return a plain run, and the runs that show which arguments the target honours in the last layout."""
    P = plan.ranks(3, 2, 4)[0]
    asked = [argument for argument in PAIRED if argument.needs(plan) is None]
    alone = [run for argument in asked for run in _alone(plan, argument)]
    alone += [run for argument in asked if argument.names == WINDOWS for run in argument.runs(plan)]
    return [plan.run(P, Argument.length(plan, P)), *_of_more_layouts(plan).values(), *alone]


def _of_more_layouts(plan: Plan) -> dict[str, Run]:
    """Return plain runs for further kinds of shards; the table has those for which the run is right."""
    if needs_any_layout(plan):
        return {}
    P = plan.ranks(3, 2)[0]
    more = ("chunks in no order", *(["a short shard between long ones"] if plan.claims.ragged else []))
    return {
        layout: plan.run(P, Argument.length(plan, P), layout=layout, causal=plan.claims.causal[-1])
        for layout in more
    }


def _axes(plan: Plan, honoured: Sequence[Argument], layouts: Sequence[str]) -> Axes:
    """Return the axes; the first value of each is the one that the arguments' own checks use."""
    claims = plan.claims
    ways = [
        name
        for name in WAYS
        if (claims.autograd or not CALL_PATTERNS[name].autograd)
        and (claims.backward or not CALL_PATTERNS[name].backward)
    ]
    heads = ((2, 1), (4, 2), (2, 2), (10, 2)) if claims.grouped else ((2, 2), (5, 5))
    return {
        **{each.what: (None, *range(len(each.values + each.others))) for each in honoured},
        "way": ("", *ways),
        "layout": tuple(layouts),
        "causal": claims.causal[::-1],
        "P": tuple(
            plan.ranks(3, 2, 4, 1, *([8] if claims.over == RING else []))
        ),  # eight processes take long to start
        "dtype": tuple(plan.dtypes("float32", "bfloat16", "float16", "float64")),
        "heads": heads,
        "sequences": (1,) if claims.axes == "LHD" else (1, 2, 5),
        "more tokens": (0, 5, 77) if claims.ragged else (0, 72),
        "strides": ("",) if needs_own_tensors(plan) else ("", "heads", "dims", "offset", "one buffer"),
        "scale": (None, 0.3) if claims.scale else (None,),
    }


def _without_meaning(plan: Plan, honoured: Sequence[Argument]) -> set[frozenset[str]]:
    """Return the pairs of axes whose values have no meaning together, or change the same field of a run."""
    fields = {each.what: each.fields(plan) for each in honoured}
    same = {frozenset(pair) for pair in combinations(fields, 2) if fields[pair[0]] & fields[pair[1]]}
    tables: list[Mapping[str, Sequence[str]]] = [_NOT_WITH] if plan.claims.any_mask else [_NOT_WITH, _BY_MASK]
    return same | {frozenset((a, b)) for table in tables for a, others in table.items() for b in others}


@dataclass(frozen=True)
class _Suspect:
    """One or two settings that a target may refuse, and a row with only these settings.

    of_all_values: whether the two arguments may be refused together whatever their values are.
    """

    settings: Chosen
    row: Chosen
    of_all_values: bool = False


class _Table:
    """The axes of a target's table, and the settings that it takes together.

    apart: pairs of axes that are never put together. refused: further sets of one or two settings that the
    target refuses.
    """

    def __init__(self, plan: Plan, honoured: Sequence[Argument], layouts: Sequence[str]) -> None:
        self.plan, self.honoured = plan, {each.what: each for each in honoured}
        self.axes = _axes(plan, honoured, layouts)
        self.apart = _without_meaning(plan, honoured)
        self.refused: set[frozenset[tuple[str, Any]]] = set()
        causal = plan.claims.causal
        self._masks = {each.what: {mask for mask in causal if each.fits(plan, mask)} for each in honoured}
        sample = plan.run(1, Argument.length(plan, 1))
        self._pads = {
            (each.what, value)
            for each in honoured
            for value in self.axes[each.what][1:]
            if {"pads", "pads_of", "holes"} & each.changes(plan, sample, value).keys()
        }

    def given(self, chosen: Chosen) -> list[str]:
        """Return the names of the arguments that have a value."""
        return [name for name in self.honoured if chosen.get(name) is not None]

    def fits(self, chosen: Chosen) -> bool:
        """Return whether these settings may stand together."""
        given = self.given(chosen)
        masks = {chosen["causal"]} if "causal" in chosen else {*self.plan.claims.causal}
        if not masks.intersection(*(self._masks[name] for name in given)):
            return False
        changes = CALL_PATTERNS[chosen["way"]].changes if chosen.get("way") else {}
        if changes.get("dout") == "ones" and any((name, chosen[name]) in self._pads for name in given):
            return False  # a summed loss has a gradient in rows of padding too
        if DROPOUT.what in given and chosen.get("way") in _WITHOUT_OUT:
            return False
        if changes.get("dlse"):
            given.append("way")
        if any(frozenset(pair) in self.apart for pair in combinations(given, 2)):
            return False
        return not any(pair <= chosen.items() for pair in self.refused)

    def run(self, row: Chosen) -> Run:
        """Return the run with these settings."""
        (H, K), P = row["heads"], row["P"]
        run = self.plan.run(
            P, Argument.length(self.plan, P) + row["more tokens"], layout=row["layout"], causal=row["causal"], dtype=row["dtype"],
            scale=row["scale"], H=H, K=K, B=row["sequences"], strided=row["strides"],
        )  # fmt: skip
        changes: dict[str, Any] = {}
        for name in self.given(row):
            changes |= self.honoured[name].changes(self.plan, run, row[name])
        if way := row["way"]:
            changes |= {"use": way, **CALL_PATTERNS[way].changes}
        return replace(run, **changes)

    def single(self) -> list[Chosen]:
        """Return rows in which one setting is not the simplest one, with several dtypes, masks and numbers of ranks.

        The simplest settings may take a fast path, such as torch's attention on one rank for ungrouped heads.
        Rows with several other settings do not take it. In the quick tier, only the first value of each
        argument comes with half dtypes and several ranks.
        """
        quick, axes = self.plan.quick, self.axes
        simplest = {axis: values[0] for axis, values in axes.items()}
        simplest["layout"] = self.plan.claims.layouts[0]
        simplest["heads"] = next(heads for heads in axes["heads"] if heads[0] == heads[1])
        one, dtype, masks = min(axes["P"]), axes["dtype"][0], axes["causal"]
        rows: list[Chosen] = []
        settings = [
            (axis, value) for axis in axes if axis not in ("P", "causal", "dtype") for value in axes[axis]
        ]
        for number, (axis, value) in enumerate(settings):
            of_argument = axis in self.honoured
            if value == simplest[axis] or (
                quick and not of_argument and axis not in ("way", "heads", "scale")
            ):
                continue
            places = [*product((one, axes["P"][0]), (dtype, *self.plan.half), masks)]
            if quick:
                turn, other = masks[number % len(masks)], masks[(number + 1) % len(masks)]
                places = [(one, dtype, mask) for mask in (masks if of_argument else (turn,))]
                if of_argument and value == 0:
                    places += [(one, (*self.plan.half, dtype)[0], turn), (axes["P"][0], dtype, other)]
            rows += [
                {**simplest, "P": P, "dtype": dtype, "causal": causal, axis: value}
                for P, dtype, causal in dict.fromkeys(places)
            ]
        return [row for row in rows if self.fits(row)]

    def alone(self, done: Mapping[Run, Ran]) -> list[Chosen]:
        """Return the rows with one argument whose runs are in `done`."""
        rows = (
            completed(self.axes, self.fits, {name: value})
            for name, each in self.honoured.items()
            for value in range(len(each.values))
        )
        return [row for row in rows if row is not None and self.run(row) in done]

    def suspects(self, refused: Sequence[Chosen], accepted: Sequence[Chosen]) -> list[_Suspect]:
        """Return the settings for which rows may have been refused.

        For each refused row, they are the first of these that exist: its values of arguments that no accepted
        row has; its pairs of arguments that no accepted row has together, each pair of arguments with one pair
        of values; its pairs of settings that no accepted row contains, at least one of them of an argument.
        """
        taken = {(name, row[name]) for row in accepted for name in self.given(row)}
        together = {pair for row in accepted for pair in combinations(self.given(row), 2)}
        contained = {pair for row in accepted for pair in pairs_in(self.axes, row)}
        found: dict[Any, _Suspect] = {}
        for row in refused:
            given = self.given(row)
            new = [((name, row[name]),) for name in given if (name, row[name]) not in taken]
            apart = [pair for pair in combinations(given, 2) if pair not in together]
            left = [
                pair for pair in pairs_in(self.axes, row) if pair not in contained and self.given(dict(pair))
            ]
            keys: Sequence[Any] = new or apart or left
            for key in keys:
                settings = {name: row[name] for name in key} if keys is apart else dict(key)
                alone = completed(self.axes, self.fits, settings)
                if alone is not None:
                    found.setdefault(key, _Suspect(settings, alone, of_all_values=keys is apart))
        return list(found.values())

    def exclude(self, suspect: _Suspect) -> str:
        """Never put these settings together again, and return them in words."""
        if suspect.of_all_values:
            self.apart.add(frozenset(suspect.settings))
            return " with ".join(suspect.settings)
        self.refused.add(frozenset(suspect.settings.items()))
        return " with ".join(self.word(name, value) for name, value in suspect.settings.items())

    def leave_out(self, name: str, layout: str) -> str:
        """Never pass an argument in this layout again, and return both in words."""
        values = self.axes[name][1:]
        self.refused |= {frozenset(((name, value), ("layout", layout))) for value in values}
        return f"{name} with layout={layout}"

    def simpler(self, row: Chosen) -> dict[str, Run]:
        """Return, by axis, the run with the plain value of this axis in place of the row's own."""
        rows = {
            axis: {**row, axis: values[0]} for axis, values in self.axes.items() if row[axis] != values[0]
        }
        return {axis: self.run(row) for axis, row in rows.items() if self.fits(row)}

    def word(self, axis: str, value: Any) -> str:
        """Return a setting in words."""
        if axis not in self.honoured or value is None:
            return f"{axis}={value}"
        P = self.axes["P"][0]
        run = self.plan.run(P, Argument.length(self.plan, P))
        changes = self.honoured[axis].changes(self.plan, run, value)
        return f"{axis} {', '.join(map(in_words, changes.values()))}"


def _judge(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict; first ask for the rows of the table, then for runs that explain wrong or refused rows."""
    plan, done = as_understood(plan, {ran.run: ran for ran in rans})
    plain = done[_first(plan)[0]]
    if plain.trouble is not None:
        return Verdict(False, f"{plain.trouble} ({plain.run})")
    honoured, refusing, missing = _honoured(plan, done)
    if missing:
        return Verdict(True, "", more=missing)
    layouts = [each for each, run in _of_more_layouts(plan).items() if _is_right(done[run])]
    table = _Table(plan, honoured, [*plan.claims.layouts[::-1], *layouts])
    rows: dict[Run, Chosen] = {}
    accepted = table.alone(done)
    apart = [table.leave_out(name, layout) for name, layouts in refusing.items() for layout in layouts]
    asked: Sequence[Chosen] = table.single() or covering_pairs(table.axes, table.fits, accepted)
    while asked:
        todo = [(table.run(row), row) for row in asked]
        rows |= dict(todo)
        if open_or_wrong := _open_or_wrong(plan, table, rows, done):
            return open_or_wrong
        refused = [row for run, row in todo if done[run].trouble is not None]
        accepted += [row for run, row in todo if done[run].trouble is None]
        suspects = [(table.run(each.row), each) for each in table.suspects(refused, accepted)]
        rows |= {run: each.row for run, each in suspects}
        if open_or_wrong := _open_or_wrong(plan, table, rows, done):
            return open_or_wrong
        accepted += [each.row for run, each in suspects if done[run].trouble is None]
        apart += [table.exclude(each) for run, each in suspects if done[run].trouble is not None]
        if len(refused) == len(todo) and not suspects:
            break  # more than two settings are refused together
        asked = covering_pairs(table.axes, table.fits, accepted)
    verdict = by_errors(NAMES)(plan, [done[run] for run in rows if done[run].arrays])
    return replace(
        verdict, evidence=f"{verdict.evidence}{_refusals([done[run] for run in rows], apart)}"[:700]
    )


def _honoured(
    plan: Plan, done: Mapping[Run, Ran]
) -> tuple[list[Argument], dict[str, list[str]], tuple[Run, ...]]:
    """Return the honoured arguments, the layouts that refuse some of them, by the argument's name, and missing runs.

    An argument that the last layout refuses is tested in the other layouts.
    """
    honoured, refusing, missing = list[Argument](), dict[str, list[str]](), list[Run]()
    for each in (each for each in PAIRED if each.needs(plan) is None):
        alone = [done[run] for run in _alone(plan, each)]
        if all(map(_is_right, alone)):
            honoured.append(each)
        elif each.names and all(ran.trouble and ran.trouble.kind == RAISED for ran in alone[1:]):
            others = {layout: each.first_in(plan, layout) for layout in plan.claims.layouts[:-1]}
            missing += [run for runs in others.values() for run in runs if run not in done]
            if missing:
                continue
            right = [layout for layout, runs in others.items() if all(_is_right(done[run]) for run in runs)]
            if right:
                honoured.append(each)
                refusing[each.what] = [layout for layout in plan.claims.layouts if layout not in right]
    return honoured, refusing, tuple(dict.fromkeys(missing))


def _refusals(made: Sequence[Ran], apart: Sequence[str]) -> str:
    """Return words about the calls that were refused, and the settings that are not taken together; or ""."""
    refused = [ran for ran in made if ran.trouble is not None]
    listed = [*apart[:_LISTED], *([f"{len(apart) - _LISTED} more"] if len(apart) > _LISTED else [])]
    words = [f"not taken: {'; '.join(listed)}"] if apart else []
    words += [f"refused in {len(refused)}: {refused[0].trouble} ({refused[0].run})"] if refused else []
    return "".join(f"; {each}" for each in words)


def _open_or_wrong(
    plan: Plan, table: _Table, rows: Mapping[Run, Chosen], done: Mapping[Run, Ran]
) -> Verdict | None:
    """Return a verdict that asks for missing runs, or that reports a wrong row; None if there is neither."""
    if missing := tuple(run for run in rows if run not in done):
        return Verdict(True, "", more=missing)
    made = [done[run] for run in rows]
    for ran in made:
        if ran.trouble is not None and not _is_refusal(ran.trouble, table.given(rows[ran.run])):
            return Verdict(False, f"{ran.trouble} ({ran.run})")
        if noted := [*ran.noted("use"), *ran.noted("state"), *ran.noted("padding")]:
            return Verdict(False, noted[0])
    right = [ran for ran in made if ran.arrays]
    verdict = by_errors(NAMES)(plan, right)
    if verdict.ok or verdict.counter is None:
        return None if verdict.ok or not right else verdict
    wrong = rows[verdict.counter]
    simpler = table.simpler(wrong)
    if missing := tuple(run for run in simpler.values() if run not in done):
        return Verdict(True, "", more=missing)
    needed = [axis for axis, run in simpler.items() if _is_right(done[run])]
    named = [table.word(axis, wrong[axis]) for axis in needed]
    only = f"only where {' comes with '.join(named)}" if len(named) > 1 else f"only with {''.join(named)}"
    cause = f"wrong {only}; " if named else ""
    return replace(verdict, evidence=f"{cause}{verdict.evidence}")


def _is_refusal(trouble: Trouble, given: Sequence[str]) -> bool:
    """Return whether an error refuses a combination of arguments; a call without arguments has none to refuse."""
    return bool(given) and trouble.refuses


def _is_right(ran: Ran) -> bool:
    return ran.trouble is None and all(each.ok for each in measure(ran))


PAIR_CHECKS = (
    Check("pairs", "every two settings together: arguments, ways of calling, dtypes, layouts, masks, heads", "quick", Measure.ARGUMENTS, _first, _judge, tolerant=True, rounds=_ROUNDS),
)  # fmt: skip
