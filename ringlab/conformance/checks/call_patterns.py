"""Checks that no result depends on the way in which code calls a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ringlab.conformance.checks.check import (
    Check,
    Judge,
    Measure,
    Plan,
    Runs,
    Verdict,
    by_errors,
    needs_backward,
    needs_own_tensors,
)
from ringlab.conformance.checks.values import GROWTH, rms, typed
from ringlab.conformance.run.call_patterns import CALL_PATTERNS, OTHER_GROUP
from ringlab.conformance.run.run import GROWS, HALVED, MANY_MORE_LENGTHS, TWO_AT_ONCE, Ran, Run
from ringlab.conformance.target.argument_names import GROUPS
from ringlab.conformance.target.claims import RING, TORCH
from ringlab.conformance.tolerance import NAMES
from ringlab.errors import apart

_LENGTH = 24

_ASKS = {
    "summed loss": "gradients of out.sum(): dout is one number with stride 0",
    "loss scale": "gradients 2¹⁶ times as large, as under a loss scale",
    "zeros": "a loss of some tokens, which gives whole ranks a gradient of 0; rows of q, k and v that are 0",
    "gradient of lse": "a loss on lse too, or an lse that autograd knows has no gradient",
    "backward again": "a second backward of the same forward",
    "calls in flight": "forwards that differ in arguments, then their backwards, first or last one first; an evaluation, a skipped step or an error between",
    "two groups": "a backward on all ranks after a forward on half of them, and halves after a forward on all",
    "autocast": "bfloat16 inputs under torch.autocast, which rounds products of float32 too",
    "default dtype": "the same while the default dtype of new tensors is bfloat16, as inference engines set it",
    "inference": "out and lse under no_grad and inference_mode, kept through a second call",
    "frozen inputs": "gradients where only some of q, k and v need one",
    "changed in place": "inputs or out changed before backward: the same gradients, or autograd's error",
    "recomputation": "the forward made again in backward, under torch.utils.checkpoint",
    "other threads": "backward in a thread other than that of forward, as autograd runs it on a GPU",
    "compilation": "calls that torch.compile traces, by the backend aot_eager: the same results, or an error",
    "second derivatives": "a loss on gradients: its own gradients, or an error",
    "two rings": "a group that is not the world: even ranks one ring, odd ranks another",
    "two threads": "two calls at once in a process, each on a ring of its own",
    "same memory": "other values in the same tensors, written through .data, which leaves their versions; those of positions too",
    "many calls": "no more memory after each call, nor after each new length of a call",
    "side effects": "arguments, random numbers, settings of the process, process groups as before each call; a right result after one that raised",
}
_STATE = (
    "inference",
    "two rings",
    "two groups",
    "two threads",
    "same memory",
    "many calls",
    "side effects",
    "default dtype",
)
"""The checks of the state that a call leaves or finds; the other checks are about gradients."""
_FULL = ("compilation",)
"""The checks of the full tier: the compiler takes some seconds."""
_OF_HALVES = {*HALVED, OTHER_GROUP, TWO_AT_ONCE}
"""The call patterns that divide the ranks into groups."""


def _called(names: Sequence[str]) -> Runs:
    """Return a function that plans one run for each of these call patterns.

    The runs use the last layout and the last mask that the target claims. A pattern that changes S has a length of
    its own, for which no other run has filled a cache.
    """

    def runs(plan: Plan) -> list[Run]:
        claims = plan.claims
        halved = _OF_HALVES & {*names} and (TWO_AT_ONCE not in names or claims.over == RING)
        P = _worlds(plan)[0] if halved else plan.ranks(2)[0]

        def planned(name: str) -> Run:
            changes = {"P": P, "S": _LENGTH, "layout": claims.layouts[-1], "causal": claims.causal[-1]}
            return plan.run(**{**changes, **CALL_PATTERNS[name].changes}, use=name)

        return [
            run
            for name, run in ((name, planned(name)) for name in names)
            if (claims.autograd or not CALL_PATTERNS[name].autograd)
            and (claims.backward or not CALL_PATTERNS[name].backward)
            and run.dtype in claims.dtypes
            and run.P in claims.ranks
        ]

    return runs


def _as_called(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict: results must be those of a plain call.

    Autograd's own error about a tensor that was changed in place is a right answer too.
    """
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


def _grows_no_more(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict: memory may not grow with each call or length.

    If memory grows at a few lengths, runs of many more lengths must show that the growth ends, as in a cache
    with a limit.
    """
    verdict = _as_called(plan, rans)
    growing = {ran.run.use: ran.noted(GROWS) for ran in rans if ran.noted(GROWS)}
    if not verdict.ok or not growing:
        return verdict
    if all(ran.run.use != MANY_MORE_LENGTHS for ran in rans):
        return replace(verdict, more=tuple(_called([MANY_MORE_LENGTHS])(plan)))
    if MANY_MORE_LENGTHS not in growing:
        return verdict
    return Verdict(False, f"what a call keeps by its length is never freed: {growing[MANY_MORE_LENGTHS][0]}")


SIDE_EFFECTS = "side effects"
_COMPARED = {"autocast": "under autocast", "default dtype": "with bfloat16 as default dtype"}
"""The checks whose runs are compared with plain runs, and their words for such a run."""


def _beside_plain(names: Sequence[str]) -> Runs:
    """Return a function that plans a run for each of these call patterns, and the same one as a plain call."""
    return lambda plan: [
        run for with_it in _called(names)(plan) for run in (replace(with_it, use=""), with_it)
    ]


def _rounds_no_more(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict: errors must be within their bounds, and hardly larger than in a plain call."""
    within = _as_called(plan, rans)
    if not within.ok:
        return within
    without, under = rans if not rans[0].run.use else rans[::-1]
    for name in NAMES:
        if name not in under.arrays:
            continue
        before, after = rms(without, name), rms(under, name)
        if after > GROWTH * before:
            error, allowed = apart(after, GROWTH * before, digits=2)
            words = _COMPARED[CALL_PATTERNS[under.run.use].check]
            text = f"the error of {name} is {error} {words}, and {before:.2g} without (at most {allowed})"
            return Verdict(False, f"{text}: float32 numbers inside are rounded ({under.run})")
    return within


def _of_every_way(plan: Plan) -> list[Run]:
    """Return the runs of `side effects`, plain runs, and runs of other checks, because any call may change state.

    The plain runs contain the first calls of a process.
    """
    own = [name for name, use in CALL_PATTERNS.items() if use.check == SIDE_EFFECTS]
    others = [run for check in CALL_CHECKS if check.tier == "quick" and check.name != SIDE_EFFECTS for run in (
        check.runs(plan) if check.needs(plan) is None else []
    )]  # fmt: skip
    return [*_called(own)(plan), *typed(plan), *others]


def _left_as_before(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict: no call may change the caller's state, and runs of `side effects` must have right results.

    The results of all other runs are judged by their own checks.
    """
    for ran in rans:
        if notes := ran.noted("state"):
            return Verdict(False, notes[0])
    own = [ran for ran in rans if ran.run.use and CALL_PATTERNS[ran.run.use].check == SIDE_EFFECTS]
    return _as_called(plan, own)


def _needs(names: Sequence[str], plan: Plan) -> str | None:
    uses = [CALL_PATTERNS[name] for name in names]
    if _OF_HALVES & {*names} and (reason := _no_rings(plan)):
        return reason
    if "bfloat16" not in plan.claims.dtypes and any(use.check in _COMPARED for use in uses):
        return "the target does not claim bfloat16"
    if "another default dtype" in names and 8 not in plan.claims.ranks:
        return "the target does not claim 8 ranks"
    if "same memory" in names and (reason := needs_own_tensors(plan)):
        return reason
    if not plan.claims.autograd and all(use.autograd for use in uses):
        return "gradients come from a function of their own, not from autograd"
    return needs_backward(plan) if all(use.backward for use in uses) else None


def _worlds(plan: Plan) -> list[int]:
    """Return the claimed numbers of ranks (4 or 8) whose halves are claimed too."""
    return [P for P in (4, 8) if {P, P // 2} <= set(plan.claims.ranks)]


def _no_rings(plan: Plan) -> str | None:
    claims = plan.claims
    if claims.over == TORCH and not set(GROUPS) & set(claims.takes):
        return "the target takes no process group"
    return None if _worlds(plan) else "the target claims neither 2 and 4 ranks nor 4 and 8"


def _by_check() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, use in CALL_PATTERNS.items():
        if name != MANY_MORE_LENGTHS:
            found.setdefault(use.check, []).append(name)
    return found


def _runs_of(check: str, names: Sequence[str]) -> Runs:
    if check == SIDE_EFFECTS:
        return _of_every_way
    return _beside_plain(names) if check in _COMPARED else _called(names)


def _judge_of(check: str) -> Judge:
    if check in _OF_THEIR_OWN:
        return _OF_THEIR_OWN[check]
    return _rounds_no_more if check in _COMPARED else _as_called


_OF_THEIR_OWN: dict[str, Judge] = {SIDE_EFFECTS: _left_as_before, "many calls": _grows_no_more}
CALL_CHECKS = tuple(
    Check(
        check, _ASKS[check], "full" if check in _FULL else "quick", Measure.STATE if check in _STATE else Measure.TRAINING,
        _runs_of(check, names), _judge_of(check), partial(_needs, names), tolerant=check in ("changed in place", SIDE_EFFECTS),
    )
    for check, names in _by_check().items()
)  # fmt: skip
