"""From the suite's finding to the learner's message: the mistake by its name, and the smallest run that shows it.

Wrong rings are imitated in float64 on the shards of a run, each with one thing changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ringlab import oracle
from ringlab.conformance.checks.measuring import expected, measure
from ringlab.conformance.report.findings import Finding
from ringlab.conformance.run.run import Ran, Run
from ringlab_course.checking.backward import Gradients, Problem, sum_over
from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure, reason
from ringlab_course.checking.numbers import State, attend, merged
from ringlab_course.exercises.e21_capstone.suite import BACKWARD, Learners, given, inputs, positions_of

See = Callable[["Held", int, int], np.ndarray]


@dataclass(frozen=True)
class Held:
    """The shards of a run, with the positions of their tokens."""

    run: Run

    @cached_property
    def positions(self) -> list[np.ndarray]:
        """The global positions of each rank's tokens."""
        return [own.numpy() for own in positions_of(self.run)]

    @cached_property
    def shards(self) -> list[tuple[np.ndarray, ...]]:
        """(q, k, v) of each rank, in float64."""
        whole = [oracle.float64(x) for x in inputs(self.run)[:3]]
        return [tuple(x[:, :, own] for x in whole) for own in self.positions]

    def shape(self, rank: int, owner: int) -> tuple[int, int]:
        """Return how many queries of `rank` meet how many keys of `owner`."""
        return len(self.positions[rank]), len(self.positions[owner])

    def visible(self, rank: int, owner: int) -> np.ndarray:
        """Return what the rank's queries may see of the owner's keys."""
        if not self.run.causal:
            return np.ones(self.shape(rank, owner), dtype=bool)
        return self.positions[rank][:, None] >= self.positions[owner][None, :]


def right(held: Held, rank: int, owner: int) -> np.ndarray:
    """Return the mask as it should be."""
    return held.visible(rank, owner)


def under_mask(see: See) -> See:
    """Return `see` where there is a mask; without one all is seen."""
    return lambda held, rank, owner: (see if held.run.causal else right)(held, rank, owner)


def fold(parts: Iterable[State], join: Callable[[State, State], State], empty: State) -> State:
    """Return all partials joined, beginning with none."""
    total = empty
    for number, part in enumerate(parts):
        total = part if number == 0 else join(total, part)
    return total


def ring(
    see: See = right,
    here: Callable[[int, int, int], int] = lambda rank, owner, P: owner,
    steps: Callable[[int], range] = range,
    join: Callable[[State, State], State] = merged,
    scale: float | None = None,
    heads: Callable[[np.ndarray, int], np.ndarray] = lambda x, group: np.repeat(x, group, axis=1),
) -> Callable[..., State]:
    """Return an imitation: (rank, held) → (out, lse).

    see: the mask that is used for the block of `owner`. here: whose K/V really lie there. steps: the steps
    whose block is used. heads: K/V heads spread over the query heads.
    """

    def imitate(rank: int, held: Held) -> State:
        P, q = held.run.P, held.shards[rank][0]
        group = held.run.H // held.run.K
        parts = []
        for step in steps(P):
            owner = (rank - step) % P
            there = here(rank, owner, P)
            if len(held.positions[there]) != len(held.positions[owner]):
                raise ValueError("blocks of other lengths, and this mistake breaks off")
            k, v = (heads(x, group) for x in held.shards[there][1:])
            parts.append(attend(q, k, v, see(held, rank, owner), scale))
        return fold(parts, join, (np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)))

    return imitate


def without_scale(rank: int, held: Problem) -> Gradients:
    """Return gradients whose dS lacks the scale: dQ and dK are 1/scale times too large."""
    dq, dk, dv = (sum_over(parts, n, x[rank]) for n, x, parts in _sums(rank, held))
    scale = held.qs[rank].shape[-1] ** -0.5
    return dq / scale, dk / scale, dv


def _sums(rank: int, held: Problem) -> list[tuple[int, Any, Any]]:
    own, met = held.parts[rank], [parts[rank] for parts in held.parts]
    return [(0, held.qs, own), (1, held.ks, met), (2, held.vs, met)]


def mean_of_heads(rank: int, held: Problem) -> Gradients:
    """Return gradients whose dK and dV are means over the query heads that share a K/V head."""
    dq, dk, dv = (sum_over(parts, n, x[rank]) for n, x, parts in _sums(rank, held))
    group = held.qs[rank].shape[1] // held.ks[rank].shape[1]
    return dq, dk / group, dv / group


def problem(run: Run) -> Problem:
    """Return the run as exercise 09 has it, for its imitations of wrong backward rings."""
    q, k, v, dout = inputs(run)
    owned = positions_of(run)
    cut = [[x.index_select(2, own) for own in owned] for x in (dout, q, k, v, *given(run))]
    return Problem(*cut, owned, str(run))


def answered(ran: Ran, names: tuple[str, ...]) -> list[Answered]:
    """Return what every rank answered in a run beside what it should have, as mistakes are compared with it."""
    run = ran.run
    true, bounds = expected(run.plain)
    inputs_of = problem(run) if names == BACKWARD else Held(run)
    found = []
    for rank, own in enumerate(positions_of(run)):
        index: np.ndarray = own.numpy()
        truth = tuple(getattr(true, name)[:, :, index] for name in names)
        got = tuple(ran.arrays[name][:, :, index] for name in names)
        bound = max(
            bounds[name] * _scale(getattr(true, name)) / _scale(part)
            for name, part in zip(names, truth, strict=True)
        )
        found.append(Answered(got, truth, bound, (rank, inputs_of), names, f"{run}: rank {rank}"))
    return found


def _scale(part: np.ndarray) -> float:
    return float(np.abs(part[np.isfinite(part)]).max(initial=0.0)) or 1.0


BY_FINDING = {
    "types": "another_dtype",
    "scale": "ignores_the_scale",
    "rank dies": "swallows_a_death",
    "dies in backward": "swallows_a_death",
    "wrong shape": "takes_any_length",
    "peak memory": "keeps_every_block",
}
"""What a failure of the suite's check means where nothing says more."""
SMALL = tuple(
    Run(P, S, layout, causal, H=2, K=2, D=4)
    for P, S, layout, causal in (
        (1, 2, "contiguous", True),
        (2, 2, "contiguous", True),
        (2, 4, "contiguous", True),
        (3, 6, "contiguous", True),
        (3, 6, "striped", True),
        (3, 12, "zigzag", True),
        (3, 6, "contiguous", False),
        (4, 8, "zigzag", False),
    )
)
"""The runs that tell mistakes apart, the smallest first; heads are of groups in `GROUPED`."""
GROUPED = (
    Run(2, 4, "contiguous", False, H=4, K=2, D=4),
    Run(2, 4, "contiguous", True, H=4, K=2, D=4),
    Run(3, 6, "striped", True, H=6, K=2, D=4),
)


@dataclass(frozen=True)
class Explainer:
    """Explains what the suite found about one of the two rings."""

    mistakes: tuple[Misconception, ...]
    named: Mapping[str, Misconception]
    compared: tuple[Misconception, ...]

    def failure(self, learners: Learners, finding: Finding) -> Failure:
        """Return what to tell of a check that failed: the mistake, if it is one that is known."""
        ran = _troubled(learners, finding)
        example = _example(finding)
        if ran is not None:
            crash = learners.crashes[ran.run]
            name = reason(crash, ragged=_ragged(ran.run))
            if name is None:
                return Crashed(crash.message, f"{ran.run}\n{crash.counterexample}")
            return self.named[name].failure(f"{ran.run}\n{crash.counterexample}")
        name = _by_evidence(learners, finding) or _by_nan(learners, finding)
        if name is None and finding.name not in BY_FINDING:
            told, small_are_right = self._by_values(learners)
            if told is not None:
                return told
            name = _by_kind(learners, finding) if small_are_right else None
        name = name or BY_FINDING.get(finding.name)
        if name is not None:
            return self.named[name].failure(example)
        asks = finding.asks.removesuffix(" where the target computes that")
        what = (
            f"`{learners.subject.function}`: “{finding.name}” of the conformance suite does not hold: {asks}."
        )
        return Failure(what, example)

    def _by_values(self, learners: Learners) -> tuple[Failure | None, bool]:
        """The failure of a known mistake that gives the same values in all small runs; whether these are right."""
        small_are_right = True
        for runs, mistakes in ((GROUPED, _groups(self.mistakes)), (SMALL, self.compared)):
            wanted = [run for run in runs if run.causal or learners.names != BACKWARD]
            rans = [ran for ran in learners.made(wanted) if ran.trouble is None]
            try:
                compare_all((case for ran in rans for case in answered(ran, learners.names)), mistakes)
            except Failure as failure:
                small_are_right = False
                if failure.misconception is not None:
                    return self.named[failure.misconception].failure(failure.counterexample), False
        return None, small_are_right


def _groups(mistakes: tuple[Misconception, ...]) -> tuple[Misconception, ...]:
    return tuple(
        mistake for mistake in mistakes if mistake.name in ("heads_in_turn", "averages_shared_heads")
    )


def _troubled(learners: Learners, finding: Finding) -> Ran | None:
    """The run without a fault that broke off, if the finding is about that."""
    for ran in learners.rans.values():
        if (
            ran.run in learners.crashes
            and ran.run.fault in ("", "stalls")
            and f"({ran.run})" in finding.evidence
        ):
            return ran
    return None


def _example(finding: Finding) -> str:
    return (
        f"smallest: {finding.counterexample}\n{finding.evidence}"
        if finding.counterexample
        else finding.evidence
    )


def _ragged(run: Run) -> bool:
    return len({len(own) for own in positions_of(run)}) > 1


def _by_evidence(learners: Learners, finding: Finding) -> str | None:
    """What the suite's own figures say."""
    if finding.name == "rounds":
        return "gathers_everything" if "no neighbour" in finding.evidence else "too_many_messages"
    if finding.name != "bytes":
        return None
    beyond = {ran.run: _beyond(ran, learners.names) for ran in learners.rans.values() if ran.run.meter}
    wide = {run: ratio for run, ratio in beyond.items() if run.dtype != "bfloat16" and ratio > 0}
    if not wide:
        return "widens_the_blocks"
    return "sends_kv_home" if all(ratio == 1 for ratio in wide.values()) else "repeats_heads_on_the_wire"


def _beyond(ran: Ran, names: tuple[str, ...]) -> float:
    """How many K/V blocks more than needed a rank has sent."""
    run, meters = ran.run, ran.forward or ran.backward
    if not meters or run.P == 1:
        return 0.0
    tokens = 2 * run.B * run.K * (run.S // run.P) * run.D
    block = tokens * getattr(torch, run.dtype).itemsize
    needed = (run.P - 1) * block + (run.P * tokens * 4 if names == BACKWARD else 0)
    return (max(meter.sent for meter in meters) - needed) / block


def _by_nan(learners: Learners, finding: Finding) -> str | None:
    """Which runs hold a NaN, or an infinity that is none, of those that the finding is about."""
    broken = [ran for ran in learners.rans.values() if _broken(ran)]
    if not broken or finding.name in BY_FINDING:
        return None
    if all(ran.run.values != "normal" for ran in broken):
        return "overflows"
    if all(ran.run.causal or ran.run.values != "normal" for ran in broken):
        return "nan_in_blind_rows"
    return "reads_before_waiting" if all(ran.run.P > 1 for ran in broken) else None


def _by_kind(learners: Learners, finding: Finding) -> str | None:
    """What values say that are wrong in some kinds of runs only."""
    wrong = [ran.run for ran in learners.rans.values() if not ran.run.fault and is_wrong(ran)]
    if wrong and all(run.values == "negative" or run.values == "falling" for run in wrong):
        return "finite_mask"
    if finding.name in ("large logits", "sloped logits", "blind rows"):
        return "overflows"
    if all(run.dtype == "bfloat16" for run in wrong) and (wrong or finding.name == "error growth"):
        return "narrow_state" if learners.names[0] == "out" else "narrow_sums"
    return None


def _broken(ran: Ran) -> bool:
    return any(np.isnan(x).any() or np.isposinf(x).any() for x in ran.arrays.values())


def is_wrong(ran: Ran) -> bool:
    """Return whether a run ended, with a value beyond its bound."""
    return ran.trouble is None and any(not each.ok for each in measure(ran, tuple(ran.arrays)))
