"""Checks of how code calls a ring: ways of calling that change no result, and arguments that must change it or be refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ringlab.conformance.plan_runs import (
    Check,
    Judge,
    Plan,
    Runs,
    Verdict,
    by_errors,
    needs_backward,
    needs_own_tensors,
)
from ringlab.conformance.rank import DOCUMENTS, GROUPS, SOFTCAPS, WINDOWS
from ringlab.conformance.runs import RAISED, TWO_RINGS, Ran, Run
from ringlab.conformance.target import THROUGH, TORCH
from ringlab.conformance.tolerance import NAMES
from ringlab.conformance.uses import USES

_LENGTH = 24
_WINDOW = 7
_SOFTCAP = 0.75
_DOCUMENTS = ((12, 12), (5, 0, 1, 13, 5))
"""An even packing; and one with an empty one, one of one token, one longer than a shard, and none that the ranks divide."""

_ASKS = {
    "summed loss": "gradients of out.sum(): dout is one number with stride 0",
    "loss scale": "gradients 2¹⁶ times as large, as under a loss scale",
    "gradient of lse": "a loss on lse too, or an lse that autograd knows has no gradient",
    "backward again": "a second backward of the same forward",
    "calls in flight": "three forwards, then their backwards, the first one first",
    "inference": "out and lse under no_grad and inference_mode",
    "frozen inputs": "gradients where only some of q, k and v need one",
    "changed in place": "inputs or out changed before backward: the same gradients, or autograd's error",
    "recomputation": "the forward made again in backward, under torch.utils.checkpoint",
    "two rings": "a group that is not the world: even ranks one ring, odd ranks another",
    "same memory": "other values in the same tensors",
    "many calls": "no more memory after each call",
    "side effects": "random numbers, modes and process groups as before a call",
}


def _called(names: Sequence[str]) -> Runs:
    """One run for each of these ways, on the last layout and mask that are claimed."""

    def runs(plan: Plan) -> list[Run]:
        claims = plan.claims
        P = _worlds(plan)[0] if TWO_RINGS in names else plan.ranks(2)[0]
        plain = plan.run(P, _LENGTH, layout=claims.layouts[-1], causal=claims.causal[-1])
        return [
            replace(plain, use=name, **USES[name].changes)
            for name in names
            if claims.autograd or not USES[name].autograd
        ]

    return runs


def _as_called(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Results as those of a plain call. Autograd's own error about a tensor that was changed in place is an answer, too."""
    refused = [text for ran in rans for text in ran.noted("refused")]
    right = []
    for ran in rans:
        if ran.trouble is not None and "inplace" in ran.trouble.text:
            refused.append("autograd refuses to go back after the change")
        elif ran.trouble is not None:
            return Verdict(False, f"{ran.trouble} ({ran.run})")
        elif notes := ran.noted("use"):
            return Verdict(False, notes[0])
        elif ran.arrays:
            right.append(ran)
    if not right:
        return Verdict(True, refused[0] if rans[0].trouble is not None else f"does not apply: {refused[0]}")
    verdict = by_errors(NAMES)(plan, right)
    return replace(verdict, evidence="; ".join([verdict.evidence, *refused[:1]])) if verdict.ok else verdict


def _needs(names: Sequence[str], plan: Plan) -> str | None:
    uses = [USES[name] for name in names]
    if TWO_RINGS in names and (reason := _no_rings(plan)):
        return reason
    if "same memory" in names and (reason := needs_own_tensors(plan)):
        return reason
    if not plan.claims.autograd and all(use.autograd for use in uses):
        return "gradients come from a function of their own, not from autograd"
    return needs_backward(plan) if all(use.backward for use in uses) else None


def _worlds(plan: Plan) -> list[int]:
    """Numbers of ranks that make two rings of a number that is claimed, too."""
    return [P for P in (4, 8) if {P, P // 2} <= set(plan.claims.ranks)]


def _no_rings(plan: Plan) -> str | None:
    claims = plan.claims
    if claims.over == TORCH and not set(GROUPS) & set(claims.takes):
        return "the target takes no process group"
    return None if _worlds(plan) else "the target claims neither 2 and 4 ranks nor 4 and 8"


def _by_check() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, use in USES.items():
        found.setdefault(use.check, []).append(name)
    return found


CALL_CHECKS = tuple(
    Check(
        check, _ASKS[check], "quick", _called(names), _as_called, partial(_needs, names),
        tolerant=check == "changed in place",
    )
    for check, names in _by_check().items()
)  # fmt: skip


def _with(argument: str, *values: Any) -> Runs:
    """The run with each value of this argument, after the same run without it, for every layout."""

    def runs(plan: Plan) -> list[Run]:
        claims, P = plan.claims, plan.ranks(3, 2)[0]
        found = []
        for layout in claims.layouts:
            plain = plan.run(P, _LENGTH, layout=layout, causal=claims.causal[-1])
            chosen = [_filling(plain.S, value) if argument == "documents" else value for value in values]
            found += [plain, *(Run(**{**plain.__dict__, argument: value}) for value in chosen)]
        return found

    return runs


def _filling(S: int, documents: tuple[int, ...]) -> tuple[int, ...]:
    """Return the documents with the last one as long as it takes to fill the sequence."""
    return *documents[:-1], S - sum(documents[:-1])


def _honoured(what: str) -> Judge:
    """On each layout, results are the oracle's for every value of the argument, or each value raises.

    Unchanged results have a name of their own. An error that says only that the value had another form is no answer.
    """

    def judge(plan: Plan, rans: Sequence[Ran]) -> Verdict:
        given, refused = [], []
        for layout in plan.claims.layouts:
            before, *with_it = (ran for ran in rans if ran.run.layout == layout)
            raised = [ran for ran in with_it if ran.trouble is not None]
            bad = [
                ran
                for ran in (before, *raised)
                if ran.trouble is not None and (ran is before or ran.trouble.kind != RAISED)
            ]
            if bad:
                return Verdict(False, f"{bad[0].trouble} ({bad[0].run})", bad[0].run)
            if raised and len(raised) < len(with_it):
                return Verdict(
                    False,
                    f"{what} is refused here and not elsewhere: {raised[0].trouble} ({raised[0].run})",
                    raised[0].run,
                )
            for ran in with_it:
                if ran.trouble is None and _unchanged(before, ran):
                    return Verdict(
                        False, f"{what} is accepted and ignored: no result changes ({ran.run})", ran.run
                    )
            refused += raised
            given += [ran for ran in with_it if ran.trouble is None]
        verdict = by_errors(NAMES)(plan, given) if given else Verdict(True, "")
        if not verdict.ok or not refused:
            return verdict
        troubles = [str(ran.trouble) for ran in refused]
        if not given and all(any(form in text for form in _FORMS) for text in troubles):
            return Verdict(
                True, f"does not apply: could not be asked, {what} may have another form: {troubles[0]}"[:300]
            )
        return Verdict(
            True,
            "; ".join([verdict.evidence, f"refused: {troubles[0]} ({refused[0].run.layout})"]).removeprefix(
                "; "
            )[:400],
        )

    return judge


_FORMS = ("TypeError", "IndexError", "AttributeError", "unpack", "MismatchError")
"""Parts of errors that come of a value in another form than the function takes."""


def _unchanged(before: Ran, after: Ran) -> bool:
    return all((after.arrays[name] == before.arrays[name]).all() for name in after.arrays)


def _takes(names: Sequence[str], what: str, *, masks: bool = True) -> Callable[[Plan], str | None]:
    def needs(plan: Plan) -> str | None:
        claims = plan.claims
        taken = (
            (masks and claims.takes_mask)
            or {*names} & {*claims.takes}
            or ({*names} & {*THROUGH} and "**" in claims.takes)
        )
        return None if taken else f"the target takes no {what}"

    return needs


ARGUMENT_CHECKS = (
    Check("window", "a window that it takes: the oracle's result, or an error", "quick", _with("window", _WINDOW), _honoured("the window"), _takes(WINDOWS, "window"), tolerant=True),
    Check("soft cap", "a soft cap that it takes: the oracle's result, or an error", "quick", _with("softcap", _SOFTCAP), _honoured("the soft cap"), _takes(SOFTCAPS, "soft cap", masks=False), tolerant=True),
    Check("documents", "packed documents that it takes: even ones; an empty one, one token, one longer than a shard", "quick", _with("documents", *_DOCUMENTS), _honoured("the packing"), _takes(DOCUMENTS, "packed documents"), tolerant=True),
)  # fmt: skip
