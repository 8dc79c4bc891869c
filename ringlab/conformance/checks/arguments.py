"""Checks of arguments: an accepted argument must change the result as in the oracle, or be refused.

Each check makes a plain run, and the same run with the argument. Three outcomes are wrong: a result that is
not the oracle's; a result equal to the plain run's, which means that the argument is accepted and ignored;
and a refusal of only some of the argument's values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ringlab.conformance.checks.check import (
    UNGUARDED,
    Check,
    Measure,
    Plan,
    Verdict,
    by_errors,
    needs_backward,
    needs_own_tensors,
)
from ringlab.conformance.checks.measuring import gradient_of_trained, measure
from ringlab.conformance.run.run import (
    ENDLESS,
    NUMBERED,
    RAISED,
    SAME_MEMORY,
    SPELLINGS,
    Ran,
    Run,
)
from ringlab.conformance.target.argument_names import (
    ALIBI,
    BIASES,
    CU_PADDED,
    CU_SEQLENS,
    DOCUMENTS,
    FLEX_SCORES,
    IDS,
    JOINT_KEYS,
    NEUTRAL,
    OF_KEYS,
    PADDING,
    PREFIXES,
    SCALES,
    SIDES,
    SINKS,
    SOFTCAPS,
    VALID,
    WINDOWS,
)
from ringlab.conformance.target.claims import BOTH, BOTTOM_RIGHT, LEFT, PAST, TOP_LEFT
from ringlab.conformance.tolerance import NAMES
from ringlab.errors import apart

Changes = Callable[[Run], dict[str, Any]]
Place = tuple[str, bool, int]
"""A layout, whether the mask is causal, and a number of ranks."""

ARGUMENT_LENGTH = 24
"""The least number of tokens of most runs with an argument."""


@dataclass(frozen=True)
class Argument:
    """An argument: its check, the names of its parameters, and its changes to a plain run.

    check, asks: the check's name and description. what: the argument's name in evidence. names: the names of
    its parameters; empty for a property of the shapes of q, k and v. values: a change of the run for each
    value; if the argument has a natural scale, such as the length of a shard, some values are below it and some
    above. others: further values for the table of pairs only, because they change no result, or may be refused
    where `values` are not. causal: the mask that the argument needs, or None for any mask. form_of: the
    argument of which this is another form; if one form is honoured, faults of another form do not count.
    by_mask: whether a target that takes ringlab's Mask, or FlexAttention's, gets the argument in the mask.
    also: further parameter names, of which the target must have at least one. paired: whether the argument is
    in the table of pairs. of_heads: whether it is a number of heads that the ranks do not divide.
    """

    check: str
    asks: str
    what: str
    names: tuple[str, ...]
    values: tuple[Changes, ...]
    causal: bool | None = None
    by_mask: bool = True
    others: tuple[Changes, ...] = ()
    also: tuple[str, ...] = ()
    paired: bool = True
    form_of: str = ""
    of_heads: bool = False

    def places(self, plan: Plan, layout: str = "") -> list[Place]:
        """Return the places for tests: a layout, by default the last one, with each mask.

        By default, an argument outside the table of pairs is tested on one rank too, except for numbers of
        heads.
        """
        at, P = layout or plan.claims.layouts[-1], plan.ranks(*((4, 3) if self.of_heads else (3, 2)))[0]
        masks = [mask for mask in plan.claims.causal[::-1] if self.fits(plan, mask)]
        alone = P > 1 and 1 in plan.claims.ranks and not (self.paired or layout or self.of_heads)
        return [(at, mask, ranks) for ranks in ((P, 1) if alone else (P,)) for mask in masks]

    def fits(self, plan: Plan, causal: bool) -> bool:
        """Return whether the argument can be tested with this mask.

        Without a causal mask, `window_left` alone does not define how far the window reaches to the right.
        """
        only_left = self._taken(plan) == {"window_left"} and not plan.claims.any_mask
        return self.causal in (None, causal) and (causal or not only_left)

    def _taken(self, plan: Plan) -> set[str]:
        return {*self.names} & {*plan.claims.takes, *plan.claims.through}

    @staticmethod
    def length(plan: Plan, P: int) -> int:
        """Return the number of tokens of a run on P ranks."""
        return max(32, 16 * P) if plan.claims.whole_documents else max(ARGUMENT_LENGTH, 6 * P)

    def runs(self, plan: Plan, layout: str = "") -> list[Run]:
        """Return, for every place, a run without the argument, and a run with each of its values."""
        return [run for place in self.places(plan, layout) for run in self.runs_in(plan, place)]

    def first_in(self, plan: Plan, layout: str) -> list[Run]:
        """Return a plain run and one with the first value, in this layout with one mask."""
        return self.runs_in(plan, self.places(plan, layout)[0])[:2]

    def made(self, plan: Plan, done: Mapping[Run, Ran], layouts: Sequence[str] = ()) -> list[Ran]:
        """Return the outcomes in `done` of this argument's runs in these layouts, by default in all layouts."""
        places = layouts or ("", *plan.claims.layouts[::-1])  # "" adds the places on one rank
        every = [run for layout in places for run in self.runs(plan, layout)]
        return [done[run] for run in dict.fromkeys(every) if run in done]

    def runs_in(self, plan: Plan, place: Place) -> list[Run]:
        """Return a run without the argument in this place, and a run with each of its values."""
        layout, causal, P = place
        ungrouped = {"K": 2} if P == 1 else {}  # by default, torch's attention takes no grouped heads
        plain = plan.run(P, self.length(plan, P), layout=layout, causal=causal, **ungrouped)
        with_it = (replace(plain, **self.changes(plan, plain, value)) for value in range(len(self.values)))
        return [plain, *with_it]

    def changes(self, plan: Plan, run: Run, value: int) -> dict[str, Any]:
        """Return the changed fields of `run` for the value with this index in `values` followed by `others`."""
        return _whole(plan, run, (*self.values, *self.others)[value](run))

    def fields(self, plan: Plan) -> set[str]:
        """Return the names of the fields that the argument changes."""
        run = plan.run(1, self.length(plan, 1), causal=bool(self.causal))
        return {
            name for value in range(len(self.values + self.others)) for name in self.changes(plan, run, value)
        }

    def needs(self, plan: Plan) -> str | None:
        """Return the reason why the argument is not tested, or None."""
        if not self.names and (reason := needs_own_tensors(plan)):
            return reason
        if self.names and not self._taken(plan) and not (self.by_mask and plan.claims.any_mask):
            return f"the target takes no {self.what}"
        if self.also and not {*self.also} & {*plan.claims.takes}:
            return f"the target takes no {self.what}"
        changed = self.fields(plan)
        if "B" in changed and plan.claims.axes == "LHD":
            return "the target takes one sequence"
        if self.of_heads and not plan.claims.split_heads:
            return "the target does not claim that ranks divide the heads"
        if self.of_heads and not plan.claims.grouped and self.what != UNEVEN:
            return "the target claims no grouped heads"
        if {"key_documents", "documents_of"} & changed and plan.claims.whole_documents:
            return "a layout cuts the documents of queries"
        if self.places(plan):
            return None
        return f"the target computes {'no' if self.causal else 'nothing without a'} causal mask"

    def judge(self, plan: Plan, rans: Sequence[Ran]) -> Verdict:
        """Return the verdict: in each place, all values must give the oracle's results, or all must raise.

        If the last layout refuses all values, the verdict asks for runs in the other layouts.
        """
        given, refused = [], []
        places = dict.fromkeys(place_of(ran.run) for ran in rans)
        for place in places:
            before, *with_it = (ran for ran in rans if place_of(ran.run) == place)
            if wrong := self._wrong(before, with_it):
                return wrong
            refused += [ran for ran in with_it if ran.trouble is not None]
            given += [ran for ran in with_it if ran.trouble is None]
        verdict = self._of_values(plan, given) if given else Verdict(True, "")
        if not verdict.ok or not refused:
            return verdict
        others = [each for each in plan.claims.layouts[:-1] if each not in {layout for layout, *_ in places}]
        if not given and self.names and others:
            return Verdict(True, "", more=tuple(run for each in others for run in self.first_in(plan, each)))
        troubles = [str(ran.trouble) for ran in refused]
        if self.names and not given and all(any(form in text for form in FORMS) for text in troubles):
            other = f"does not apply: could not be asked, {self.what} may have another form: {troubles[0]}"
            return Verdict(True, other[:300])
        only, where = _apart([ran.run for ran in given], [ran.run for ran in refused])
        words = [
            f"only {only}: {verdict.evidence}" if given and verdict.evidence else "",
            f"refused: {troubles[0]} ({where})",
        ]
        return Verdict(True, "; ".join(words).removeprefix("; ")[:500])

    def _of_values(self, plan: Plan, given: Sequence[Ran]) -> Verdict:
        """Return the verdict on the values of runs that were not refused."""
        return by_errors(NAMES)(plan, given)

    def _ends(self) -> tuple[str, ...]:
        """Return the kinds of trouble, besides an error, that count as a refusal.

        For a property of shapes, which has no parameter, these include a crash and a run that reaches its time
        limit.
        """
        return () if self.names else ("crashed", *ENDLESS)

    def _wrong(self, before: Ran, with_it: Sequence[Ran]) -> Verdict | None:
        """Return a failing verdict if the runs in one place show a fault, else None.

        The faults are: a plain run without a result, a crash, a refusal of only some values, unchanged results,
        and results in rows of padding that are not finite.
        """
        raised = [ran for ran in with_it if ran.trouble is not None]
        if before.trouble is not None:
            return Verdict(False, f"{before.trouble} ({before.run})", before.run)
        for ran in raised:
            if ran.trouble is not None and ran.trouble.kind not in (RAISED, *self._ends()):
                return Verdict(False, f"{ran.trouble} ({ran.run})", ran.run)
        if raised and len(raised) < len(with_it):
            first = raised[0]
            text = f"{self.what}, refused here and not elsewhere: {first.trouble} ({first.run})"
            return Verdict(False, text, first.run)
        for ran in with_it:
            if noted := ran.noted("padding"):
                return Verdict(False, noted[0], ran.run)
            if ran.trouble is None and _unchanged(before, ran):
                text = f"{self.what}, accepted and ignored: no result changes ({ran.run})"
                return Verdict(False, text, ran.run)
        return None


def _honoured(verdict: Verdict) -> bool:
    """Return whether the verdict says that an argument gives the oracle's results somewhere."""
    return verdict.ok and not verdict.more and not verdict.evidence.startswith(("refused", "does not apply"))


def place_of(run: Run) -> Place:
    """Return the layout, the mask and the number of ranks of a run."""
    return run.layout, run.causal, run.P


def _apart(given: Sequence[Run], refused: Sequence[Run]) -> tuple[str, str]:
    """Return the places of both in words, with the numbers of ranks only if nothing else tells them apart."""

    def words(runs: Sequence[Run], P: str = "") -> dict[str, None]:
        masks = ("full", "causal")
        return dict.fromkeys(f"{P and f'P={run.P} '}{run.layout} {masks[run.causal]}" for run in runs)

    places = words(given), words(refused)
    if places[0].keys() & places[1].keys():
        places = words(given, "P"), words(refused, "P")
    return ", ".join(places[0]), ", ".join(places[1])


FORMS = ("TypeError", "IndexError", "AttributeError", "unpack", "MismatchError")
"""Parts of errors that are raised if the form of a value differs from the one that the function expects."""


def _unchanged(before: Ran, after: Ran) -> bool:
    right, found = before.arrays["out"], after.arrays["out"]
    return right.shape == found.shape and bool((right == found).all())


def _always(**changes: Any) -> Changes:
    return lambda run: changes


def _whole(plan: Plan, run: Run, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes; if the target needs it, round documents' lengths up to multiples of 2 P.

    Empty documents stay empty.
    """
    if not plan.claims.whole_documents or "pads" in changes or "documents" not in changes:
        return changes
    *lengths, _ = changes["documents"]
    lengths = [-(-length // (2 * run.P)) * 2 * run.P for length in lengths]
    if "S" in changes:
        changes = {**changes, "S": sum(lengths) + 2 * run.P}
    return {**changes, "documents": (*lengths, changes.get("S", run.S) - sum(lengths))}


def _documents(*lengths: int) -> Changes:
    """Return a change to documents of these lengths, followed by a last one that fills the sequence."""
    return lambda run: {"documents": (*lengths, run.S - sum(lengths))}


def _many_documents(run: Run) -> dict[str, Any]:
    """Return more documents than a byte can count, each of 0 to 2 tokens, and a longer last one."""
    lengths = [1 + (number % 3 == 0) - (number % 7 == 3) for number in range(300)]
    S = -(-(sum(lengths) + 5) // (2 * run.P)) * 2 * run.P
    return {"S": S, "documents": (*lengths, S - sum(lengths))}


def _documents_of_each(run: Run) -> dict[str, Any]:
    """Return documents that differ between two sequences."""
    return {"B": 2, "documents_of": ((5, run.S - 5), (run.S - 13, 0, 13))}


def _reordered(*inner: int) -> Changes:
    """Return a change to documents of which the first and the last are always the same.

    inner: the lengths of the documents between these two, in units of 2 P tokens.
    """

    def changes(run: Run) -> dict[str, Any]:
        unit = 2 * run.P
        lengths = (unit - 1, *(length * unit for length in inner), unit + 1)
        return {"S": sum(lengths), "documents": lengths}

    return changes


_ORDERS = _reordered(4, 2, 5, 1), _reordered(5, 1, 4, 2)
"""Two orders of documents with the same number, first, last and longest length, and sum of lengths; even the
sums of all ends are equal."""


def _in_reverse(changes: Changes, field: str) -> Changes:
    """Return these changes with the values of `field`, one for each sequence, in reverse order."""

    def reversed_(run: Run) -> dict[str, Any]:
        found = changes(run)
        return {**found, field: found[field][::-1]}

    return reversed_


def _trained(**given: Any) -> tuple[Changes, Changes]:
    """Return two changes to an argument that needs a gradient: one call, and two calls with other values in place."""
    return _always(**given), _always(**given, use=SAME_MEMORY)


def _of_heads(**given: Any) -> tuple[Changes, Changes]:
    """Return two changes to an argument with a value for each head: more heads, and the inner values in reverse order."""

    def changes(run: Run) -> dict[str, Any]:
        return {**given, "H": 2 * run.H, "K": run.K * (1 if run.H > run.K else 2)}

    return changes, lambda run: {**changes(run), "turned": True}


def _numbered(numbers: str, run: Run) -> dict[str, Any]:
    """Return documents with these numbers as segment ids."""
    return {"documents": (4, 3, 5, 2, 4, run.S - 18), "numbered": numbers}


def _numbered_in_each(numbers: str, run: Run) -> dict[str, Any]:
    """Return documents that differ between two sequences, with these numbers as segment ids."""
    lengths = (4, 3, 5, 2, 4, run.S - 18)
    return {"B": 2, "documents_of": (lengths, lengths[::-1]), "numbered": numbers}


UNEVEN = "query heads that the ranks do not divide"


def _uneven_heads(run: Run) -> dict[str, Any]:
    """Return P + 1 query heads and as many key/value heads, which P ranks do not divide."""
    return {"H": run.P + 1, "K": run.P + 1}


def _uneven_key_heads(run: Run) -> dict[str, Any]:
    """Return P + 1 key/value heads, which P ranks do not divide, and P (P + 1) query heads, which they do."""
    K = run.P + 1
    return {"H": K * run.P, "K": K}


def _few_key_heads(run: Run) -> dict[str, Any]:
    """Return two key/value heads if P is even and above 2, else one; P ranks divide the query heads."""
    return {"H": 2 * run.P, "K": 2 if run.P % 2 == 0 and run.P > 2 else 1}


def _padded(run: Run, *lengths: int) -> dict[str, Any]:
    """Return documents that are padded to multiples of 2 P, as kernels for packed sequences require.

    The last document fills the sequence.
    """
    pads = [-length % (2 * run.P) for length in lengths]
    last = run.S - sum(lengths) - sum(pads) - 1
    return {"documents": (*lengths, last), "pads": (*pads, 1)}


def _padding(more: int, shards: int = 0) -> Changes:
    """Return a change to padding of `shards` shards and `more` tokens, where rows see it unless it is masked.

    Under a causal mask, the padding is in front of the sequence, otherwise behind it.
    """

    def changes(run: Run) -> dict[str, Any]:
        pad = min(shards * shard_of(run) + more, run.S - 5)
        return {"pads": (-pad if run.causal else pad,)}

    return changes


def _ended_early(run: Run) -> dict[str, Any]:
    """Return documents that end before the sequence does, as in a batch of a fixed size."""
    return {"documents": (2 * run.P, run.S - 4 * run.P), "pads": (0, 2 * run.P)}


def _sides(causal: tuple[int, int], full: tuple[int, int]) -> Changes:
    """Return a change to a window with the sides `causal` under a causal mask, and `full` without one."""
    return lambda run: {"sides": causal if run.causal else full}


_LIMITS: dict[str, Callable[[Run], int]] = {
    "none": lambda run: -1,
    "0": lambda run: 0,
    "few": lambda run: 3,
    "beyond a shard": lambda run: shard_of(run) + 2,
}
"""The limits of one side of a window, by words for a report."""


def _limited(left: str, right: str) -> Changes:
    """Return a change to a window with these limits before and after a row's own key."""
    return lambda run: {"sides": (_LIMITS[left](run), _LIMITS[right](run))}


def _padding_of_each(run: Run) -> dict[str, Any]:
    """Return padding of the first of two sequences."""
    return {"B": 2, "pads_of": (-7, 0) if run.causal else (7, 0)}


def _with_holes(run: Run) -> dict[str, Any]:
    """Return padding inside three sequences: in stretches, in a whole contiguous shard, and in every second token.

    A fourth sequence consists of padding only, as in the last batch of a data set.
    """
    S, shard = run.S, shard_of(run) if run.P > 1 else run.S // 3
    ones = S // 2 | 1  # an odd number, so that the last stretch consists of tokens
    in_turn = (0, *[1] * ones, S - ones)
    return {"B": 4, "holes": ((3, 2, 4, 1, S - 10), (shard, shard, S - 2 * shard), in_turn, (0, S))}


def _cut_keys(run: Run) -> dict[str, Any]:
    """Return documents whose queries and keys differ in number."""
    keys = 2 * run.S
    return {"documents": (5, 7, run.S - 12), "keys": keys, "key_documents": (keys - 16, 12, 4)}


def _meanings(plan: Plan, runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the meanings that a window may have in these runs.

    Without a causal mask, one number has several possible meanings unless the target claims one.
    """
    one_number = not {"window_left", "window_size"} & {*plan.claims.takes} and not plan.claims.any_mask
    if not one_number or all(run.causal for run in runs):
        return ("",)
    return (plan.claims.window,) if plan.claims.window else (BOTH, LEFT, PAST)


def _meaning(ran: Ran, meaning: str) -> Ran:
    """Return the outcome with this meaning of its run's window; unchanged under a causal mask."""
    if ran.run.causal or not ran.run.window or meaning == BOTH:
        return ran
    return replace(ran, run=replace(ran.run, window_of=meaning))


def window_is_clear(plan: Plan, run: Run) -> bool:
    """Return whether it is known before any comparison which keys a window hides in this run."""
    return all(each.fits(plan, run.causal) for each in ARGUMENTS if each.what == "window") and (
        len(_meanings(plan, [run])) == 1
    )


def asked_of(plan: Plan, names: Sequence[str]) -> list[Argument]:
    """Return the arguments of these names that the target takes, without those whose checks it allows to fail."""
    return [
        each
        for each in ARGUMENTS
        if each.what in names and each.needs(plan) is None and each.check not in dict(plan.claims.allow)
    ]


def takes_lengths(plan: Plan) -> bool:
    """Return whether the target gets the lengths of all packed documents."""
    return bool({*CU_SEQLENS} & {*plan.claims.takes}) or plan.claims.any_mask


class WindowArgument(Argument):
    """A window. Without a causal mask, one number may have several meanings, see `_meanings`."""

    def changes(self, plan: Plan, run: Run, value: int) -> dict[str, Any]:
        """Return the fields of `run` that the value with this index changes, with the claimed meaning."""
        meanings = _meanings(plan, [run])
        claimed = {"window_of": meanings[0]} if meanings in ((LEFT,), (PAST,)) else {}
        return {**super().changes(plan, run, value), **claimed}

    def _of_values(self, plan: Plan, given: Sequence[Ran]) -> Verdict:
        """Return the verdict by the claimed meaning, or else by the first one that fits all results."""
        verdicts = {
            each: super(WindowArgument, self)._of_values(plan, [_meaning(ran, each) for ran in given])
            for each in _meanings(plan, [ran.run for ran in given])
        }
        found = next((each for each in verdicts if verdicts[each].ok), next(iter(verdicts)))
        fits = verdicts[found].ok and len(verdicts) > 1 and found != BOTH
        said = f"without a causal mask, one number limits {_WORDS[found]}: " if fits else ""
        return replace(verdicts[found], evidence=f"{said}{verdicts[found].evidence}")


_WORDS = {LEFT: "earlier keys only", PAST: "earlier keys and hides later ones"}


def as_understood(plan: Plan, done: Mapping[Run, Ran]) -> tuple[Plan, dict[Run, Ran]]:
    """Return the plan and the outcomes with the meaning of a window that these outcomes show."""
    runs = [run for run in done if run.window and not run.causal and not run.window_of and not run.use]
    meanings = _meanings(plan, runs) if runs else ("",)
    for each in meanings if len(meanings) > 1 else ():
        rans = [_meaning(done[run], each) for run in runs]
        if all(ran.trouble is None and all(error.ok for error in measure(ran)) for ran in rans):
            claims = replace(plan.claims, window=each)
            return replace(plan, claims=claims), {**done, **{ran.run: ran for ran in rans}}
    return plan, dict(done)


def _more_keys(run: Run) -> dict[str, Any]:
    return {"keys": 2 * run.S, "alignment": BOTTOM_RIGHT}


class _Sides(Argument):
    """A window with a limit on each side. A limit on later keys hides no key under a causal mask."""

    def _wrong(self, before: Ran, with_it: Sequence[Ran]) -> Verdict | None:
        """Return a failing verdict if the runs in one place show a fault; a window that hides no key changes nothing."""
        seen = before.run.visible()
        hiding = [ran for ran in with_it if ran.trouble or not np.array_equal(ran.run.visible(), seen)]
        return super()._wrong(before, hiding)

    def _of_values(self, plan: Plan, given: Sequence[Ran]) -> Verdict:
        """Return the verdict without evidence of right results, because there are many of these windows."""
        verdict = super()._of_values(plan, given)
        return replace(verdict, evidence="") if verdict.ok else verdict


class _Cross(Argument):
    """Keys of another sequence. A ring for self-attention may accept them and return wrong results."""

    def needs(self, plan: Plan) -> str | None:
        """Return the reason why the keys are not tested, or None."""
        if plan.claims.cross is False:
            return "the target claims self-attention only"
        return super().needs(plan)

    def judge(self, plan: Plan, rans: Sequence[Ran]) -> Verdict:
        """Return the verdict; wrong results fail only a target that claims such keys."""
        claimed = bool(plan.claims.cross or plan.claims.alignment)
        return _unless_claimed(super().judge(plan, rans), claimed, rans)


def _unless_claimed(verdict: Verdict, claimed: bool, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict; turn a failure into a note if the argument is not claimed and plain runs have no trouble."""
    plain = all(ran.trouble is None for ran in rans if not ran.run.keys and not ran.run.slopes_of_each)
    if verdict.ok or claimed or not plain:
        return verdict
    return Verdict(True, f"{UNGUARDED}{verdict.evidence}"[:500])


class _SlopesOfEach(Argument):
    """Slopes of ALiBi that differ between sequences, (B, H).

    A ring that takes slopes (H,) may accept them and return wrong results.
    """

    def needs(self, plan: Plan) -> str | None:
        """Return the reason why such slopes are not tested, or None."""
        if plan.claims.slopes_of_each is False:
            return "the target claims slopes of heads only"
        return super().needs(plan)

    def judge(self, plan: Plan, rans: Sequence[Ran]) -> Verdict:
        """Return the verdict; wrong results fail only a target that claims such slopes."""
        return _unless_claimed(super().judge(plan, rans), bool(plan.claims.slopes_of_each), rans)


class _Aligned(_Cross):
    """Keys of a longer sequence under a causal mask, which may be aligned in two ways."""

    def changes(self, plan: Plan, run: Run, value: int) -> dict[str, Any]:
        """Return the fields of `run` that the value with this index changes, aligned as the target claims."""
        found = super().changes(plan, run, value)
        return {**found, "alignment": plan.claims.alignment or found["alignment"]}

    def _of_values(self, plan: Plan, given: Sequence[Ran]) -> Verdict:
        """Return the verdict by the alignment that is claimed, or else by the one that fits the results."""
        claimed = plan.claims.alignment
        verdicts = {
            each: by_errors(NAMES)(
                plan, [replace(ran, run=replace(ran.run, alignment=each)) for ran in given]
            )
            for each in ((claimed,) if claimed else (BOTTOM_RIGHT, TOP_LEFT))
        }
        found = next((each for each in verdicts if verdicts[each].ok), next(iter(verdicts)))
        aligned = f"aligned {found}: " if verdicts[found].ok else ""
        return replace(verdicts[found], evidence=f"{aligned}{verdicts[found].evidence}")


@dataclass(frozen=True)
class _Dtypes(Argument):
    """Queries, keys or values in different dtypes. claimed: the dtypes that a target has to claim for that."""

    claimed: tuple[str, ...] = ()

    def places(self, plan: Plan, layout: str = "") -> list[Place]:
        """Return places with one mask: whether a row sees a key does not depend on dtypes."""
        places = super().places(plan, layout)
        return [place for place in places if place[1] == places[0][1]]

    def needs(self, plan: Plan) -> str | None:
        """Return the reason why the dtypes are not tested, or None."""
        if {*self.claimed} <= {*plan.claims.dtypes}:
            return super().needs(plan)
        return f"the target does not claim {' and '.join(self.claimed)}"


class _TwoOrders(Argument):
    """Two values with the same numbers in different orders, in two successive calls.

    A function that keeps a value by a sum of its numbers takes the first value for the second.
    """

    def _of_values(self, plan: Plan, given: Sequence[Ran]) -> Verdict:
        """Return the verdict on both calls; its evidence says if only one of the results is wrong."""
        verdict = super()._of_values(plan, given)
        right = [all(each.ok for each in measure(ran)) for ran in given]
        if verdict.ok or not any(right):
            return verdict
        words = f"{self.what}, in calls one after the other: one of the results is wrong, as if kept from the other call"
        return replace(verdict, evidence=f"{words}; {verdict.evidence}")


class _Trained(Argument):
    """An argument that needs a gradient, as a parameter of a model does."""

    def needs(self, plan: Plan) -> str | None:
        """Return the reason why the gradient is not tested, or None."""
        own = (
            None if plan.claims.autograd else "gradients come from a function of their own, not from autograd"
        )
        if self.names == SCALES and not plan.claims.tensor_scale:
            return "no annotation says that the scale may be a tensor"
        return super().needs(plan) or needs_backward(plan) or own

    def _of_values(self, plan: Plan, given: Sequence[Ran]) -> Verdict:
        """Return the verdict: each rank's gradient, or their sum over the ranks, must be the true one."""
        verdict = super()._of_values(plan, given)
        for ran in given if verdict.ok else ():
            if wrong := _wrong_gradient(ran):
                return Verdict(False, f"{wrong} ({ran.run})")
        return verdict


def _wrong_gradient(ran: Ran) -> str:
    """Return words for a wrong gradient of the trained argument, or "" if it is right."""
    what, parts = ran.run.trained, [part for part in ran.of_trained if part is not None]
    verb = "get" if what in ("sinks", "ALiBi slopes") else "gets"
    if not parts:
        return f"the trained {what} {verb} no gradient, and no error says so"
    if len(parts) < len(ran.of_trained):
        return f"the trained {what} {verb} a gradient on some ranks only"
    true, most = gradient_of_trained(ran.run)
    if what == "additive bias":  # each rank has the rows of its own queries
        of_rows = [true[:, :, own] for own in ran.positions], [most[:, :, own] for own in ran.positions]
        total, true, most = (np.concatenate(each, axis=2) for each in (parts, *of_rows))
        of_each = of_sum = np.abs(total - true)
    else:
        total = np.sum(parts, axis=0)
        of_sum = np.abs(total - true)
        of_each = np.max([np.abs(part - true) for part in parts], axis=0)
    if (of_sum <= most).all() or (of_each <= most).all():
        return ""
    at = np.unravel_index(int((of_sum - most).argmax()), of_sum.shape)
    found, right = apart(float(total[at]), float(true[at]))
    head = f" at head {at[1 if len(at) > 1 else 0]}" if at else ""
    summed = "" if what == "additive bias" else ", summed over the ranks,"
    return f"the gradient of {what}{summed} is {found} for {right}{head}"


def _of_dtypes(of_queries: str, of_keys: str, of_values: str) -> tuple[Changes, ...]:
    """Return changes to these dtypes, with usual scores and with scores of some hundreds.

    At large scores, rounded keys change out most.
    """
    changes = {"dtype": of_queries, "of_keys": (of_keys, of_values)}
    return _always(**changes), _always(**changes, values="large")


def shard_of(run: Run) -> int:
    """Return the tokens of a mean shard, rounded down."""
    return run.S // run.P


ARGUMENTS = (
    WindowArgument("window", "windows that it takes, shorter and longer than a shard; each pair of no limit, 0, a few keys and more than a shard on its two sides: the oracle's result, or an error", "window", WINDOWS, (_always(window=3), lambda run: {"window": shard_of(run) + 2}), others=(lambda run: {"window": run.S + 5},)),
    Argument("window", "", "window sides", SIDES, (_sides((5, -1), (3, 7)),), by_mask=False, others=(lambda run: {"sides": (shard_of(run) + 1, 0) if run.causal else (-1, 2)}, _always(sides=(-1, -1)))),
    *(_Sides("window", "", f"window sides ({left}, {right})", SIDES, (_limited(left, right),), by_mask=False, paired=False) for left in _LIMITS for right in _LIMITS if {left, right} != {"none"}),
    Argument("soft cap", "soft caps that it takes: the oracle's result, or an error", "soft cap", (*SOFTCAPS, *FLEX_SCORES), (_always(softcap=0.75), _always(softcap=30.0)), by_mask=False),
    Argument("prefix", "a prefix that every row sees: the oracle's result, or an error", "prefix", PREFIXES, (_always(prefix=3), lambda run: {"prefix": run.S - 3}), causal=True),
    Argument("sinks", "sinks that it takes, with scores of some hundreds too: the oracle's result, or an error", "sinks", SINKS, (_always(sinks=True), _always(sinks=True, values="large")), by_mask=False),
    Argument("alibi", "slopes of ALiBi, by distance in both directions, for each head or for each sequence and head, or a bias of each score: the oracle's result, or an error", "ALiBi slopes", (*ALIBI, *FLEX_SCORES), (_always(alibi=1.0), _always(alibi=2.0**-4)), by_mask=False),
    _SlopesOfEach("alibi", "", "ALiBi slopes of each sequence", ALIBI, (lambda run: {"B": 3, "alibi": 1.0, "slopes_of_each": True},), by_mask=False, paired=False),
    Argument("alibi", "", "additive bias", BIASES, (_always(bias=True),), by_mask=False),
    _TwoOrders("sinks", "", "sinks in two orders", SINKS, _of_heads(sinks=True), by_mask=False, paired=False),
    _TwoOrders("alibi", "", "ALiBi slopes in two orders", (*ALIBI, *FLEX_SCORES), _of_heads(alibi=1.0), by_mask=False, paired=False),
    _TwoOrders("alibi", "", "additive bias in two orders", BIASES, _of_heads(bias=True), by_mask=False, paired=False),
    _Trained("trained arguments", "sinks, a bias, slopes of ALiBi or a scale that need a gradient, and that change in place between two calls: the true one, or an error", "sinks", SINKS, _trained(sinks=True, trained="sinks"), by_mask=False, paired=False),
    _Trained("trained arguments", "", "additive bias", BIASES, _trained(bias=True, trained="additive bias"), by_mask=False, paired=False),
    _Trained("trained arguments", "", "ALiBi slopes", ALIBI, _trained(alibi=1.0, trained="ALiBi slopes"), by_mask=False, paired=False),
    _Trained("trained arguments", "", "scale", SCALES, _trained(scale=0.3, trained="scale"), by_mask=False, paired=False),
    Argument("documents", "packed documents that it takes: even ones; an empty one, one token, one longer than a shard; 300 of them; the same ones in another order; ids beyond 2²⁴, 2³¹ and 2⁵³, with gaps, and in no order; other ones of the keys", "packed documents", DOCUMENTS, (_documents(12), _documents(5, 0, 1, 13)), others=(_ended_early, _documents(0, 1, 1, 0, 0, 2, 1, 3, 7, 1))),
    Argument("documents", "", "many documents", DOCUMENTS, (_many_documents,), paired=False),
    Argument("documents", "", "documents of each sequence", IDS, (_documents_of_each,), by_mask=False, form_of="packed documents"),
    _TwoOrders("documents", "", "packed documents in two orders", DOCUMENTS, _ORDERS, paired=False),
    _TwoOrders("documents", "", "documents of each sequence in two orders", IDS, (_documents_of_each, _in_reverse(_documents_of_each, "documents_of")), by_mask=False, paired=False, form_of="packed documents in two orders"),
    *(Argument("documents", "", f"segment ids {numbers}", IDS, (partial(_numbered, numbers),), by_mask=False, paired=False) for numbers in NUMBERED),
    *(Argument("documents", "", f"segment ids {numbers} of each sequence", IDS, (partial(_numbered_in_each, numbers),), by_mask=False, paired=False, form_of=f"segment ids {numbers}") for numbers in NUMBERED),
    Argument("documents", "", "documents of keys", tuple(name for name in CU_SEQLENS if name.endswith(OF_KEYS)), (_cut_keys,), causal=False, by_mask=False, also=tuple(name for name in CU_SEQLENS if name.endswith("_q"))),
    Argument("padded documents", "packed documents with padding behind each", "padded documents", CU_PADDED, (lambda run: _padded(run, 7, 3),), by_mask=False),
    Argument("padding", "padding, by a mask that it takes: in front under a causal mask, otherwise at the end; less than a shard and more; of one sequence only; with holes", "padding mask", (*PADDING, *VALID), (_padding(5), _padding(3, shards=1)), by_mask=False),
    Argument("padding", "", "padding of one sequence", (*PADDING, *VALID), (_padding_of_each,), by_mask=False),
    Argument("padding", "", "padding with holes", (*PADDING, *VALID), (_with_holes,), by_mask=False),
    _TwoOrders("padding", "", "padding in two orders", (*PADDING, *VALID), (_with_holes, _in_reverse(_with_holes, "holes")), by_mask=False, paired=False),
    Argument("joint tokens", "keys that all ranks hold, in front and at the end: each counts once", "joint tokens", JOINT_KEYS, tuple(_always(joint=at) for at in ("front", "rear")), causal=False, by_mask=False),
    Argument("uneven heads", "if ranks divide the heads: fewer key/value heads than ranks, and heads that the ranks do not divide: the oracle's result, or an error", UNEVEN, (), (_uneven_heads,), paired=False, of_heads=True),
    Argument("uneven heads", "", "key/value heads that the ranks do not divide", (), (_uneven_key_heads,), paired=False, of_heads=True),
    Argument("uneven heads", "", "fewer key/value heads than ranks", (), (_few_key_heads,), paired=False, of_heads=True),
    Argument("uneven heads", "", "one key/value head", (), (lambda run: {"H": 2 * run.P, "K": 1},), paired=False, of_heads=True),
    Argument("value dims", "a head dim of v that is not that of q and k: the oracle's result, or an error", "head dim of v", (), (_always(dv=8), _always(dv=24))),
    _Dtypes("mixed dtypes", "keys, values or both in bfloat16 beside float32, in float32 beside float64, and values in bfloat16 beside float16: the oracle's result, or an error", "dtype of keys and values", (), _of_dtypes("float32", "bfloat16", "bfloat16"), paired=False, claimed=("float32", "bfloat16")),
    _Dtypes("mixed dtypes", "", "dtype of keys", (), _of_dtypes("float32", "bfloat16", "float32"), paired=False, claimed=("float32", "bfloat16")),
    _Dtypes("mixed dtypes", "", "dtype of values", (), _of_dtypes("float32", "float32", "bfloat16"), paired=False, claimed=("float32", "bfloat16")),
    _Dtypes("mixed dtypes", "", "dtype of queries", (), _of_dtypes("float64", "float32", "float32"), paired=False, claimed=("float64", "float32")),
    _Dtypes("mixed dtypes", "", "half dtype of values", (), (_always(dtype="float16", of_keys=("float16", "bfloat16")),), paired=False, claimed=("float16", "bfloat16")),
    _Cross("cross-attention", "keys of another sequence, more and fewer than the queries; more of them under a causal mask: the oracle's result, or an error", "other sequence", (), (lambda run: {"keys": 2 * run.S}, lambda run: {"keys": run.S // (4 * run.P) * 2 * run.P}), causal=False),
    _Aligned("cross-attention", "", "more keys", (), (_more_keys,), causal=True),
)  # fmt: skip
"""All arguments. Arguments with the same check are tested together; the first one has the check's
description."""


def _check(name: str) -> Check:
    """Return the check of all arguments of this name."""
    arguments = [each for each in ARGUMENTS if each.check == name]

    def needs(plan: Plan) -> str | None:
        reasons = [each.needs(plan) for each in arguments]
        return None if None in reasons else reasons[0]

    def runs(plan: Plan) -> list[Run]:
        return [run for each in arguments if each.needs(plan) is None for run in each.runs(plan)]

    def judge(plan: Plan, rans: Sequence[Ran]) -> Verdict:
        done = {ran.run: ran for ran in rans}
        asked = [each for each in arguments if each.needs(plan) is None]
        found = {each: each.judge(plan, each.made(plan, done)) for each in asked}
        families = [each.form_of or each.what for each in asked if _honoured(found[each])]
        verdicts = [
            found[each] for each in asked if found[each].ok or (each.form_of or each.what) not in families
        ]
        if wrong := next((each for each in verdicts if not each.ok), None):
            return wrong
        if more := tuple(run for each in verdicts for run in each.more):
            return Verdict(True, "", more=more)
        said = [
            each.evidence
            for each in verdicts
            if each.evidence and not each.evidence.startswith("does not apply")
        ]
        unguarded = [each.evidence for each in verdicts if each.evidence.startswith(UNGUARDED)]
        also = [each.removeprefix("does not apply: ") for each in unguarded if said]
        return Verdict(True, "; ".join([*said, *also] or [*unguarded, verdicts[0].evidence][:1])[:700])

    asks = arguments[0].asks
    return Check(name, asks, "quick", Measure.ARGUMENTS, runs, judge, needs, tolerant=True)


def _neutral(plan: Plan) -> list[Run]:
    takes = {*plan.claims.takes, *plan.claims.through}
    P = plan.ranks(2)[0]
    plain = plan.run(P, ARGUMENT_LENGTH, layout=plan.claims.layouts[-1], causal=plan.claims.causal[-1])
    spelled = [each for each in SPELLINGS if each] if {"causal", "is_causal"} & takes else []
    return [
        *(replace(plain, neutral=name) for name in sorted({*NEUTRAL} & takes)),
        *(replace(plain, spelled=each) for each in spelled),
    ]


def as_without(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict: each neutral value, form of a bool, or offset must give the plain result or be refused."""
    right = [ran for ran in rans if ran.trouble is None]
    for ran in rans:
        if ran.trouble is not None and not ran.trouble.refuses:
            return Verdict(False, f"{ran.trouble} ({ran.run})", ran.run)
    if not right:
        return Verdict(True, f"refused: {rans[0].trouble}"[:500])
    verdict = by_errors(NAMES)(plan, right)
    neutral = [f"{ran.run.neutral}={NEUTRAL[ran.run.neutral]}" for ran in right if ran.run.neutral]
    spelled = [f"causal as {ran.run.spelled}" for ran in right if ran.run.spelled]
    offsets = dict.fromkeys(f"positions from {ran.run.offset:,}" for ran in right if ran.run.offset)
    return replace(verdict, evidence=f"{', '.join([*neutral, *spelled, *offsets])}: {verdict.evidence}")


def _needs_neutral(plan: Plan) -> str | None:
    return None if _neutral(plan) else "the target takes no argument that a number may switch off"


ARGUMENT_CHECKS = (
    *(_check(name) for name in dict.fromkeys(each.check for each in ARGUMENTS)),
    Check("neutral values", "numbers with which callers switch an argument off, such as a soft cap of 0, and causal as 1: the plain result, or an error", "quick", Measure.ARGUMENTS, _neutral, as_without, _needs_neutral, tolerant=True),
)  # fmt: skip
