"""Checks of how code calls a ring: ways of calling that change no result, and arguments that must change it or be refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ringlab.conformance.plan_runs import Check, Judge, Plan, Runs, Verdict, by_errors, needs_backward
from ringlab.conformance.rank import DOCUMENTS, GROUPS, SOFTCAPS, WINDOWS
from ringlab.conformance.runs import RAISED, TWO_RINGS, Ran, Run
from ringlab.conformance.target import TORCH
from ringlab.conformance.tolerance import NAMES
from ringlab.conformance.uses import USES

_LENGTH = 24
_WINDOW = 7
_SOFTCAP = 0.75
_DOCUMENTS = (5, 0, 1, 13, 5)
"""An empty one, one of one token, one longer than a shard, and none that the ranks divide."""

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
        claims, P = plan.claims, plan.ranks(*((4, 8) if TWO_RINGS in names else (2,)))[0]
        plain = plan.run(P, _LENGTH, layout=claims.layouts[-1], causal=claims.causal[-1])
        return [
            replace(plain, use=name, **USES[name].changes)
            for name in names
            if claims.autograd or not USES[name].autograd
        ]

    return runs


def _as_called(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    for ran in rans:
        if notes := ran.noted("use"):
            return Verdict(False, notes[0], ran.run)
    refused = [text for ran in rans for text in ran.noted("refused")]
    if not any(ran.arrays for ran in rans):
        return Verdict(True, f"does not apply: {refused[0]}")
    verdict = by_errors(NAMES)(plan, rans)
    return replace(verdict, evidence="; ".join([verdict.evidence, *refused[:1]])) if verdict.ok else verdict


def _needs(names: Sequence[str], plan: Plan) -> str | None:
    if any(not USES[name].autograd for name in names) and "inference" == USES[names[0]].check:
        return None
    if TWO_RINGS in names and (reason := _no_rings(plan)):
        return reason
    if not plan.claims.autograd and all(USES[name].autograd for name in names):
        return "gradients come from a function of their own, not from autograd"
    return needs_backward(plan)


def _no_rings(plan: Plan) -> str | None:
    claims = plan.claims
    if claims.over == TORCH and not set(GROUPS) & set(claims.takes):
        return "the target takes no process group"
    return None if {4, 8} & set(claims.ranks) else "the target claims neither 4 nor 8 ranks"


def _by_check() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, use in USES.items():
        found.setdefault(use.check, []).append(name)
    return found


CALL_CHECKS = tuple(
    Check(check, _ASKS[check], "quick", _called(names), _as_called, partial(_needs, names))
    for check, names in _by_check().items()
)


def _with_argument(**given: object) -> Runs:
    """The run with this argument, after the same run without it, for every layout."""

    def runs(plan: Plan) -> list[Run]:
        claims, P = plan.claims, plan.ranks(3, 2)[0]
        plain = [plan.run(P, _LENGTH, layout=layout, causal=claims.causal[-1]) for layout in claims.layouts]
        return [run for each in plain for run in (each, replace(each, **given))]  # type: ignore[arg-type]

    return runs


def _honoured(what: str) -> Judge:
    """With the argument, results must be the oracle's, or every run must raise; unchanged results have a name of their own."""

    def judge(plan: Plan, rans: Sequence[Ran]) -> Verdict:
        plain, given = rans[::2], rans[1::2]
        refused = [ran for ran in given if ran.trouble is not None]
        for ran in refused:
            if ran.trouble is not None and ran.trouble.kind != RAISED:
                return Verdict(False, f"{ran.trouble} ({ran.run})", ran.run)
        if any(ran.trouble is not None for ran in plain):
            return Verdict(
                False, f"without {what}: {next(r.trouble for r in plain if r.trouble is not None)}"
            )
        for before, ran in zip(plain, given, strict=True):
            if ran.trouble is None and all(
                (ran.arrays[name] == before.arrays[name]).all() for name in ran.arrays
            ):
                return Verdict(
                    False, f"{what} is accepted and ignored: no result changes ({ran.run})", ran.run
                )
        if refused:
            return Verdict(True, f"refused: {refused[0].trouble}"[:200])
        return by_errors(NAMES)(plan, given)

    return judge


def _takes(names: Sequence[str], what: str) -> Callable[[Plan], str | None]:
    def needs(plan: Plan) -> str | None:
        if plan.claims.takes_mask and what != "a soft cap":
            return None
        return (
            None if set(names) & set(plan.claims.takes) else f"the target takes no {what.removeprefix('a ')}"
        )

    return needs


ARGUMENT_CHECKS = (
    Check("window", "a window that it takes: the oracle's result, or an error", "quick", _with_argument(window=_WINDOW), _honoured("the window"), _takes(WINDOWS, "a window"), tolerant=True),
    Check("soft cap", "a soft cap that it takes: the oracle's result, or an error", "quick", _with_argument(softcap=_SOFTCAP), _honoured("the soft cap"), _takes(SOFTCAPS, "a soft cap"), tolerant=True),
    Check("documents", "packed documents that it takes: empty, of one token, longer than a shard", "quick", _with_argument(documents=_DOCUMENTS), _honoured("the packing"), _takes(DOCUMENTS, "packed documents"), tolerant=True),
)  # fmt: skip
