"""Checks of arguments: whatever a target accepts must change the result as the oracle says, or be refused.

Each check makes a plain run and the same one with the argument. Three verdicts are wrong: another result than the oracle's,
the plain result again, which means that the argument is accepted and ignored, and a refusal on some layouts only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringlab.conformance.given import (
    CU_PADDED,
    DOCUMENTS,
    JOINT_KEYS,
    PADDING,
    PREFIXES,
    SINKS,
    SOFTCAPS,
    VALID,
    WINDOWS,
)
from ringlab.conformance.plan_runs import Check, Plan, Verdict, by_errors, needs_own_tensors
from ringlab.conformance.runs import RAISED, Ran, Run
from ringlab.conformance.target import THROUGH
from ringlab.conformance.tolerance import NAMES

Changes = Callable[[Run], dict[str, Any]]

_LENGTH = 24


@dataclass(frozen=True)
class Argument:
    """An argument: what the report calls it, the names of its parameters, and what it changes in a plain run.

    names: any target takes it if there are none, as the form of q, k and v says it. causal: the mask it needs, None for
    the last one that is claimed. by_mask: a target that takes ringlab's Mask is given it so. every_layout: asked on each.
    """

    what: str
    names: tuple[str, ...]
    values: tuple[Changes, ...]
    causal: bool | None = None
    by_mask: bool = True
    every_layout: bool = True

    def layouts(self, plan: Plan) -> tuple[str, ...]:
        """Return the layouts on which it is asked."""
        return plan.claims.layouts if self.every_layout else plan.claims.layouts[-1:]

    def runs(self, plan: Plan) -> list[Run]:
        """Return the run with each value of the argument, after the same run without it, for every layout."""
        P = plan.ranks(3, 2)[0]
        causal = plan.claims.causal[-1] if self.causal is None else self.causal
        found = []
        for layout in self.layouts(plan):
            length = max(32, 16 * P) if plan.claims.whole_documents else max(_LENGTH, 6 * P)
            plain = plan.run(P, length, layout=layout, causal=causal)
            found += [
                plain,
                *(replace(plain, **_whole(plan, plain, changes(plain))) for changes in self.values),
            ]
        return found

    def needs(self, plan: Plan) -> str | None:
        """Return why the target is not asked, if so."""
        claims = plan.claims
        if self.causal is not None and self.causal not in claims.causal:
            return f"the target computes {'no' if self.causal else 'nothing without a'} causal mask"
        if not self.names:
            return needs_own_tensors(plan)
        taken = {*self.names} & {*claims.takes}
        through = {*self.names} & {*THROUGH} and "**" in claims.takes
        return (
            None
            if taken or through or (self.by_mask and claims.takes_mask)
            else f"the target takes no {self.what}"
        )

    def judge(self, plan: Plan, rans: Sequence[Ran]) -> Verdict:
        """Return whether on each layout results are the oracle's for every value, or each value raises."""
        given, refused = [], []
        for layout in self.layouts(plan):
            before, *with_it = (ran for ran in rans if ran.run.layout == layout)
            if wrong := self._wrong(before, with_it):
                return wrong
            refused += [ran for ran in with_it if ran.trouble is not None]
            given += [ran for ran in with_it if ran.trouble is None]
        verdict = by_errors(NAMES)(plan, given) if given else Verdict(True, "")
        if not verdict.ok or not refused:
            return verdict
        troubles = [str(ran.trouble) for ran in refused]
        if self.names and not given and all(any(form in text for form in _FORMS) for text in troubles):
            other = f"does not apply: could not be asked, {self.what} may have another form: {troubles[0]}"
            return Verdict(True, other[:300])
        words = [verdict.evidence, f"refused: {troubles[0]} ({refused[0].run.layout})"]
        return Verdict(True, "; ".join(words).removeprefix("; ")[:400])

    def _wrong(self, before: Ran, with_it: Sequence[Ran]) -> Verdict | None:
        """The verdict that one layout's runs settle, if they do: crashes, a refusal of some values, unchanged results."""
        raised = [ran for ran in with_it if ran.trouble is not None]
        if before.trouble is not None:
            return Verdict(False, f"{before.trouble} ({before.run})", before.run)
        for ran in raised:
            if ran.trouble is not None and ran.trouble.kind != RAISED:
                return Verdict(False, f"{ran.trouble} ({ran.run})", ran.run)
        if raised and len(raised) < len(with_it):
            first = raised[0]
            text = f"{self.what}, refused here and not elsewhere: {first.trouble} ({first.run})"
            return Verdict(False, text, first.run)
        for ran in with_it:
            if ran.trouble is None and _unchanged(before, ran):
                text = f"{self.what}, accepted and ignored: no result changes ({ran.run})"
                return Verdict(False, text, ran.run)
        return None


_FORMS = ("TypeError", "IndexError", "AttributeError", "unpack", "MismatchError")
"""Parts of errors that come of a value in another form than the function takes."""


def _unchanged(before: Ran, after: Ran) -> bool:
    right, found = before.arrays["out"], after.arrays["out"]
    return right.shape == found.shape and bool((right == found).all())


def _always(**changes: Any) -> Changes:
    return lambda run: changes


def _whole(plan: Plan, run: Run, changes: dict[str, Any]) -> dict[str, Any]:
    """The changes, with documents that divide by twice the ranks if the target needs them: as many, and empty ones too."""
    if not plan.claims.whole_documents or "pads" in changes or "documents" not in changes:
        return changes
    *lengths, _ = changes["documents"]
    lengths = [-(-length // (2 * run.P)) * 2 * run.P for length in lengths]
    return {"documents": (*lengths, run.S - sum(lengths))}


def _documents(*lengths: int) -> Changes:
    """These documents, and a last one that fills the sequence."""
    return lambda run: {"documents": (*lengths, run.S - sum(lengths))}


def _padded(run: Run, *lengths: int) -> dict[str, Any]:
    """Documents that are padded to multiples of 2 P, as kernels for packed sequences want them; the last one fills the sequence."""
    pads = [-length % (2 * run.P) for length in lengths]
    last = run.S - sum(lengths) - sum(pads) - 1
    return {"documents": (*lengths, last), "pads": (*pads, 1)}


def _check(name: str, asks: str, argument: Argument) -> Check:
    return Check(name, asks, "quick", argument.runs, argument.judge, argument.needs, tolerant=True)


ARGUMENT_CHECKS = (
    _check("window", "a window that it takes: the oracle's result, or an error", Argument("window", WINDOWS, (_always(window=7),))),
    _check("soft cap", "a soft cap that it takes: the oracle's result, or an error", Argument("soft cap", SOFTCAPS, (_always(softcap=0.75),), by_mask=False)),
    _check("prefix", "a prefix that every row sees: the oracle's result, or an error", Argument("prefix", PREFIXES, (_always(prefix=5),), causal=True)),
    _check("sinks", "sinks that it takes: the oracle's result, or an error", Argument("sinks", SINKS, (_always(sinks=True),), by_mask=False)),
    _check("documents", "packed documents that it takes: even ones; an empty one, one token, one longer than a shard", Argument("packed documents", DOCUMENTS, (_documents(12), _documents(5, 0, 1, 13)))),
    _check("padded documents", "packed documents with padding behind each", Argument("padded documents", CU_PADDED, (lambda run: _padded(run, 7, 3),), by_mask=False)),
    _check("padding", "padding at the end, by a mask that it takes", Argument("padding mask", (*PADDING, *VALID), (_always(pads=(5,)),), by_mask=False)),
    _check("joint tokens", "keys that all ranks hold, in front and at the end: each counts once", Argument("joint tokens", JOINT_KEYS, tuple(_always(joint=at) for at in ("front", "rear")), causal=False, by_mask=False)),
    _check("value dims", "a head dim of v that is not that of q and k: the oracle's result, or an error", Argument("head dim of v", (), (_always(dv=8),), every_layout=False)),
    _check("cross-attention", "keys of another sequence, longer than the queries': the oracle's result, or an error", Argument("other sequence", (), (lambda run: {"keys": 2 * run.S, "backward": False},), causal=False, every_layout=False)),
)  # fmt: skip
