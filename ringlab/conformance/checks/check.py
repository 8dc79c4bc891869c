"""The parts of a check: the plan of its runs, its judge, and its verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import lcm
from typing import Any

from ringlab.conformance.checks.measuring import Measured, measure
from ringlab.conformance.run.run import Ran, Run
from ringlab.conformance.target.claims import Claims
from ringlab.conformance.tolerance import NAMES

LENGTH = 48
"""The number of tokens of most runs, which is divisible by 2 P for P = 1, 2, 3, 4 and 8."""


@dataclass(frozen=True)
class Plan:
    """The basis for planning runs: the claims, the tier, and the seed of all inputs."""

    claims: Claims
    quick: bool
    seed: int

    def ranks(self, *wanted: int) -> list[int]:
        """Return the wanted numbers of ranks that the target claims.

        If it claims none of them, return only its smallest number above 1, or its first number if none is above
        1.
        """
        have = [P for P in wanted if P in self.claims.ranks]
        above = [P for P in sorted(self.claims.ranks) if P > 1]
        return have or above[:1] or list(self.claims.ranks)[:1]

    def dtypes(self, *wanted: str) -> list[str]:
        """Return the wanted dtypes that the target claims, or its first dtype if it claims none of them."""
        return [d for d in wanted if d in self.claims.dtypes] or list(self.claims.dtypes)[:1]

    @property
    def half(self) -> list[str]:
        """Return the first half dtype that the target claims, as a list; it is empty if there is none."""
        return [d for d in self.claims.dtypes if d in ("bfloat16", "float16")][:1]

    @property
    def mask(self) -> bool:
        """Return whether plain runs are causal. They are if the target computes only causal attention."""
        return False not in self.claims.causal

    def run(self, P: int, S: int = LENGTH, **changes: Any) -> Run:
        """Return a run within the claims, with `changes` to the default fields.

        By default it has the first layout, float32 if that is claimed, and two query heads on one key/value
        head. If grouped heads are not claimed, there are as many key/value heads as query heads. If ranks
        divide the heads, their numbers are rounded up to fit. If ragged lengths are not claimed, S is rounded
        up to a multiple of 2 P.
        """
        plain = Run(
            P, S, self.claims.layouts[0], self.mask, H=2, K=1,
            dtype=self.dtypes("float32")[0], seed=self.seed, backward=self.claims.backward,
        )  # fmt: skip
        run = replace(plain, **changes)
        even = run.S if self.claims.ragged else -(-run.S // (2 * P)) * 2 * P
        run = replace(run, S=even, B=1 if self.claims.axes == "LHD" else run.B)
        K = run.K if self.claims.grouped else run.H
        groups, K = run.H // K, lcm(K, P) if self.claims.split_heads else K
        return replace(run, H=groups * K, K=K)


UNGUARDED = "does not apply: accepted with wrong results: "
"""The beginning of evidence about calls that the target does not claim, and for which it returns wrong results
without an error."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check, with the evidence in words.

    counter: the run from which the search for a smaller counterexample starts. by_time: whether a busy
    machine alone could explain the verdict. If so, the runs are repeated, and the last verdict counts. more:
    runs that must be made before the verdict counts.
    """

    ok: bool
    evidence: str
    counter: Run | None = None
    by_time: bool = False
    more: tuple[Run, ...] = ()


Runs = Callable[[Plan], list[Run]]
Judge = Callable[[Plan, Sequence[Ran]], Verdict]


class Measure(StrEnum):
    """The quantities that a test of a ring has to measure; no single comparison finds every fault."""

    MESSAGES = "messages and bytes are counted"
    MEMORY = "the largest tensor, and the peak"
    MASKS = "masks by global position, in several layouts"
    GRADIENTS = "dQ, dK and dV against the oracle"
    LOGITS = "large and sloped logits"
    ROUNDING = "bounds near rounding, up to P = 8, by dtype"
    LENGTHS = "lengths that do not divide, P = 3 and 4, long ones, and many sequences and heads"
    WORK = "tiles computed"
    CALLER = "the caller's memory left alone, and equal results"
    TRAINING = "gradients as training code asks for them"
    STATE = "the state that a call leaves or finds"
    ARGUMENTS = "arguments honoured or refused"
    FAULTS = "late, early and lost messages, dead ranks"


@dataclass(frozen=True)
class Check:
    """One line of the table of checks.

    needs: returns the reason why the check does not apply, or None. tolerant: whether the check also judges
    runs that failed; any other check fails as soon as one of its runs fails. spares_more: whether it also
    judges failed runs that its own verdict asked for. names: the results that the check compares.
    by_values: whether wrong values start the search for a smaller counterexample. rounds: how many times a
    verdict may ask for more runs, or for the same runs if a busy machine alone could explain it.
    """

    name: str
    asks: str
    tier: str
    measure: Measure
    runs: Runs
    judge: Judge
    needs: Callable[[Plan], str | None] = lambda plan: None
    tolerant: bool = False
    spares_more: bool = False
    names: tuple[str, ...] = NAMES
    by_values: bool = True
    rounds: int = 2

    def settled_by(self, plan: Plan, ran: Ran) -> Verdict | None:
        """Return the verdict if this run alone shows that the check fails, else None."""
        if not getattr(self.judge, "each_run_alone", False):
            return None
        verdict = self.judge(plan, [ran])
        return None if verdict.ok else verdict


def by_errors(names: tuple[str, ...]) -> Judge:
    """Return a judge that compares the errors of the named results of every run with their bounds."""

    def judge(plan: Plan, rans: Sequence[Ran]) -> Verdict:
        found = [each for ran in rans for each in measure(ran, names)]
        if not found:
            return Verdict(False, f"no run gave {', '.join(names)}")
        worst = max(found, key=lambda each: each.ratio)
        beyond = [each for each in found if not each.ok]
        if not beyond:
            return Verdict(True, f"{len(rans)} runs, {ranks_of(rans)}; closest to its bound: {worst}")
        first = min(beyond, key=lambda each: size(each.run))
        also = "" if first is worst else f"; worst: {worst}"
        named = _names_beyond(beyond)
        return Verdict(
            False,
            f"{named} wrong in {_runs(beyond)} of {len(rans)} runs, {ranks_of(rans)}; first: {first}{also}",
            first.run,
        )

    judge.each_run_alone = True  # type: ignore[attr-defined]
    return judge


def ranks_of(rans: Sequence[Ran]) -> str:
    """Return the numbers of ranks of these runs in the words of a report."""
    return f"P = {', '.join(map(str, sorted({ran.run.P for ran in rans})))}"


def _names_beyond(beyond: list[Measured]) -> str:
    return ", ".join(name for name in NAMES if any(each.name == name for each in beyond))


def _runs(found: list[Measured]) -> int:
    return len({each.run for each in found})


def size(run: Run) -> tuple[int, ...]:
    """Return a tuple that orders runs by size; a smaller counterexample has a smaller tuple."""
    return run.P, run.S, run.H, run.D, run.B


def needs_backward(plan: Plan) -> str | None:
    """Return the reason why gradients are not checked, or None."""
    return None if plan.claims.backward else "the target claims no gradients"


def needs_own_tensors(plan: Plan) -> str | None:
    """Return the reason why the caller's own tensors are not checked, or None."""
    packed = {"qkv", "kv"} & set(plan.claims.takes)
    return "the target takes packed tensors, which are made for each call" if packed else None


def needs_causal(plan: Plan) -> str | None:
    """Return the reason why masks are not checked, or None."""
    return None if True in plan.claims.causal else "the target claims no causal mask"


def needs_positions(plan: Plan) -> str | None:
    """Return the reason why positions outside the claimed layouts are not tested, or None."""
    if "positions" in plan.claims.takes and "layout" not in plan.claims.takes:
        return None
    return "the target is not told positions alone"


def needs_ranks(plan: Plan) -> str | None:
    """Return the reason why checks on several ranks are left out, or None."""
    return None if max(plan.claims.ranks) > 1 else "the target claims one rank only"


def needs_ring(plan: Plan) -> str | None:
    """Return the reason why messages and memory are not checked, or None."""
    if plan.claims.split_heads:
        return "the target claims that ranks divide the heads, and the costs of such designs are not checked"
    if plan.claims.schedule != "ring":
        return f"the target claims schedule {plan.claims.schedule!r}, which promises nothing about this"
    return needs_ranks(plan)
