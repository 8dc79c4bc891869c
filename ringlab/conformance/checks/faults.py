"""Checks of a ring in which one rank dies, stalls, or gets a shard of another length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringlab.comm.processes.children import GRACE
from ringlab.conformance.checks.check import (
    Check,
    Judge,
    Measure,
    Plan,
    Runs,
    Verdict,
    by_errors,
    needs_backward,
    needs_ranks,
)
from ringlab.conformance.checks.measuring import without_a_token
from ringlab.conformance.run.run import ENDLESS, Ran, Run
from ringlab.conformance.tolerance import NAMES

_LENGTH = 24
SHORT = "rank 1 has one token fewer than it should"


def _faulty(kind: str, backward: bool = False) -> Runs:
    """Return a function that plans a run without a fault, followed by the same run with this fault.

    In a target that is not a ring, the rank dies at once, because such a target may send only one message.
    """

    def runs(plan: Plan) -> list[Run]:
        run = plan.run(plan.ranks(3)[0], _LENGTH, backward=backward and plan.claims.backward)
        at_once = kind == "dies" and plan.claims.schedule != "ring"
        return [run, replace(run, fault="dies at once" if at_once else kind)]

    return runs


def _noticed(what: str) -> Judge:
    """Return a judge by which every surviving rank must end with an error.

    A surviving rank must neither return a result nor wait forever.
    """

    def judge(plan: Plan, rans: Sequence[Ran]) -> Verdict:
        right, ran = rans
        others = [rank for rank in ran.returned if rank != 1]
        if right.trouble is not None:
            return Verdict(False, f"no rank had a fault, and yet: {right.trouble} ({right.run})")
        if ran.trouble is not None and ran.trouble.kind in (*ENDLESS, "printed without end"):
            return Verdict(False, f"{what}, and the others never end: {ran.trouble} ({ran.run})")
        waiting = [rank for rank in ran.stopped if rank != 1]
        if waiting:
            evidence = (
                f"{what}, and rank {waiting[0]} goes on until it is stopped, {GRACE:g} s after the last error"
            )
            return Verdict(False, f"{evidence} ({ran.run})", by_time=True)
        if ran.spared:
            return Verdict(True, f"does not apply: rank 1 sends no message at which it could die ({ran.run})")
        if others and ran.arrays and ran.run.fault == "wrong shape":
            return _of_shorter(ran)
        if others:
            return Verdict(False, f"{what}, and rank {others[0]} returns a result all the same ({ran.run})")
        if ran.trouble is None:
            return Verdict(False, f"{what}, and no rank says so ({ran.run})")
        return Verdict(True, f"{what}: {ran.trouble}"[:300])

    return judge


def _of_shorter(ran: Ran) -> Verdict:
    """Return the verdict on results that were returned although rank 1 has one token too few.

    Such results may be right, because ranks may tell each other their lengths.
    """
    (token,) = {*range(ran.run.S)} - {int(each) for own in ran.positions for each in own}
    found = without_a_token(ran, token)
    if not found:  # only a backward returned; it got out and lse of the whole sequence
        return Verdict(
            False, f"{SHORT}, and rank {ran.returned[0]} returns a result all the same ({ran.run})"
        )
    wrong = [each for each in found if not each.ok]
    if wrong:
        return Verdict(False, f"{SHORT}, and no rank says so; of the shorter sequence {wrong[0]}")
    worst = max(found, key=lambda each: each.ratio)
    return Verdict(True, f"{SHORT}: results are those of the shorter sequence; closest to its bound: {worst}")


def _needs_death(plan: Plan) -> str | None:
    killed = None if plan.claims.can_die else "no rank is killed under torchrun; run this check without it"
    return killed or needs_ranks(plan)


def _needs_both(plan: Plan) -> str | None:
    return needs_backward(plan) or _needs_death(plan)


FAULT_CHECKS = (
    Check("rank stalls", "the right result, later, when a rank is late", "quick", Measure.FAULTS, _faulty("stalls", True), by_errors(NAMES), needs_ranks, by_values=False),
    Check("rank dies", "an error on every other rank, in time", "quick", Measure.FAULTS, _faulty("dies"), _noticed("rank 1 dies at one of its first messages"), _needs_death, tolerant=True),
    Check("dies in backward", "an error on every other rank when one dies in backward", "full", Measure.FAULTS, _faulty("dies in backward", True), _noticed("rank 1 dies in backward"), _needs_both, tolerant=True),
    Check("wrong shape", "an error when one rank's shard is a token short, or the results of the shorter sequence", "quick", Measure.FAULTS, _faulty("wrong shape"), _noticed(SHORT), needs_ranks, tolerant=True),
)  # fmt: skip
