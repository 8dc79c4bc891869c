"""Turn the suite's finding into a message: the named mistake, and the smallest run that shows it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ringlab.conformance.checks.measuring import expected, measure
from ringlab.conformance.report.findings import Finding
from ringlab.conformance.run.run import Ran, Run
from ringlab_course.checking.answers import resembles
from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure, reason
from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.checking.loading import load_stage
from ringlab_course.checking.wrong_answers import WrongAnswer, namespace_of, wrong_answers
from ringlab_course.exercises.e21_capstone.suite import BACKWARD, Learners, claims, positions_of

Adapt = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Wrong:
    """A wrong answer whose runs can be compared with the learner's.

    adapted: makes a ring of another exercise take the arguments of this stage. causal: whether the wrong answer
    can be run only with a causal mask (True), only without one (False), or with both (None).
    """

    answer: WrongAnswer
    adapted: Adapt | None = None
    causal: bool | None = None

    @property
    def name(self) -> str:
        return str(self.answer.misconception)

    def runs_with(self, run: Run) -> bool:
        """Return whether the wrong answer can be run with the mask of this run."""
        return self.causal in (None, run.causal)


@lru_cache(maxsize=4096)
def _made(wrong: Wrong, names: tuple[str, ...], run: Run) -> Ran:
    """Return the outcome of a run of a wrong answer."""
    stage = load_stage("21.backward" if names == BACKWARD else "21.forward")
    own = load_stage(wrong.answer.stage)
    space = namespace_of(wrong.answer.source, f"<{wrong.answer.submission}>")
    if wrong.adapted is not None:
        space = {stage.function: wrong.adapted(space[own.function])}
    (ran,) = Learners(InProcessSubject(stage, space), names, claims(names)).made([run])
    return ran


def wrong_rings(names: tuple[str, ...], own: Collection[str], borrowed: Collection[str]) -> list[Wrong]:
    """Return the wrong answers with these mistakes: edits of this stage, and answers of exercise 05 or 09.

    The borrowed answers are wrong rings of exercises that learners did earlier. They do not cut shards into
    stretches, but can make the same runs.
    """
    lenders: list[tuple[str, Adapt, bool | None]]
    if names == BACKWARD:
        lenders = [("09.couriers", _without_a_window, None)]
    else:
        lenders = [("05.forward", _without_a_mask, False), ("05.causal", _with_positions, True)]
    home = "21.backward" if names == BACKWARD else "21.forward"
    found = [Wrong(each) for each in wrong_answers("21") if each.stage == home and each.misconception in own]
    for stage, adapted, causal in lenders:
        found += [
            Wrong(each, adapted, causal)
            for each in wrong_answers(stage[:2])
            if each.stage == stage and each.misconception in borrowed
        ]
    return found


def _without_a_mask(program: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ring, q, k, v, positions, causal, scale: program(ring, q, k, v)


def _with_positions(program: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ring, q, k, v, positions, causal, scale: program(ring, q, k, v, positions)


def _without_a_window(program: Callable[..., Any]) -> Callable[..., Any]:
    def ring_backward(ring, dout, q, k, v, out, lse, positions, causal, scale):
        return program(ring, dout, q, k, v, out, lse, positions, None)

    return ring_backward


def answered(ran: Ran, names: tuple[str, ...]) -> list[Answered]:
    """Return, for each rank of a run, the answer and the right answer, in the form for comparing mistakes."""
    run = ran.run
    true, bounds = expected(run.plain)
    found = []
    for rank, own in enumerate(positions_of(run)):
        index: np.ndarray = own.numpy()
        truth = tuple(getattr(true, name)[:, :, index] for name in names)
        got = tuple(ran.arrays[name][:, :, index] for name in names)
        bound = max(
            bounds[name] * _scale(getattr(true, name)) / _scale(part)
            for name, part in zip(names, truth, strict=True)
        )
        found.append(Answered(got, truth, bound, names=names, text=f"{run}: rank {rank}"))
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
"""The mistake that a failed check of the suite shows, if nothing else explains the failure."""
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
"""The runs that distinguish mistakes, in order of size. Runs with grouped heads are in `GROUPED`."""
GROUPED = (
    Run(2, 4, "contiguous", False, H=4, K=2, D=4),
    Run(2, 4, "contiguous", True, H=4, K=2, D=4),
    Run(3, 6, "striped", True, H=6, K=2, D=4),
)


@dataclass(frozen=True)
class Explainer:
    """Explains the suite's findings about a learner's forward or backward ring."""

    named: Mapping[str, Misconception]
    compared: Callable[[], list[Wrong]]
    of_groups: Collection[str]
    """The mistakes that show only if query heads share K/V heads."""

    def failure(self, learners: Learners, finding: Finding) -> Failure:
        """Return the failure that explains a failed check, with the name of the mistake if it is known."""
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
        """Return the failure of a known mistake, or None, and whether the values of all small runs are right.

        The mistake is the one that gives the same values as the learner's ring in all small runs.
        """
        small_are_right = True
        for runs, of_groups in ((GROUPED, True), (SMALL, False)):
            wanted = [run for run in runs if run.causal or learners.names != BACKWARD]
            rans = [ran for ran in learners.made(wanted) if ran.trouble is None]
            try:
                compare_all(case for ran in rans for case in answered(ran, learners.names))
            except Failure as failure:
                small_are_right = False
                suspects = [each for each in self.compared() if (each.name in self.of_groups) == of_groups]
                fitting = {each.name for each in suspects if _fits(each, rans, learners.names)}
                if len(fitting) == 1:
                    return self.named[fitting.pop()].failure(failure.counterexample), False
        return None, small_are_right


def _fits(wrong: Wrong, rans: Sequence[Ran], names: tuple[str, ...]) -> bool:
    """Return whether the wrong answer gives the same values as the learner's ring in all runs that it can make."""
    like = [ran for ran in rans if wrong.runs_with(ran.run)]
    return bool(like) and all(_alike(ran, _made(wrong, names, ran.run), names) for ran in like)


def _alike(ran: Ran, other: Ran, names: tuple[str, ...]) -> bool:
    if other.trouble is not None:
        return False
    pairs = zip(answered(ran, names), answered(other, names), strict=True)
    return all(resembles(each.answer, made.answer, each.bound) for each, made in pairs)


def _troubled(learners: Learners, finding: Finding) -> Ran | None:
    """Return the run in the finding's evidence that crashed, or None. Runs whose fault should end them do not count."""
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
    """Return the mistake that the suite's own figures show, or None."""
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
    """Return how much more than needed the busiest rank sent, in K/V blocks."""
    run, meters = ran.run, ran.forward or ran.backward
    if not meters or run.P == 1:
        return 0.0
    tokens = 2 * run.B * run.K * (run.S // run.P) * run.D
    block = tokens * getattr(torch, run.dtype).itemsize
    needed = (run.P - 1) * block + (run.P * tokens * 4 if names == BACKWARD else 0)
    return (max(meter.sent for meter in meters) - needed) / block


def _by_nan(learners: Learners, finding: Finding) -> str | None:
    """Return the mistake that the runs with NaN, or with +∞, have in common, or None."""
    broken = [ran for ran in learners.rans.values() if _broken(ran)]
    if not broken or finding.name in BY_FINDING:
        return None
    if all(ran.run.values != "normal" for ran in broken):
        return "overflows"
    if all(ran.run.causal or ran.run.values != "normal" for ran in broken):
        return "nan_in_blind_rows"
    return "reads_before_waiting" if all(ran.run.P > 1 for ran in broken) else None


def _by_kind(learners: Learners, finding: Finding) -> str | None:
    """Return the mistake that explains why values are wrong only in some kinds of runs, or None."""
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
    """Return whether a run ended with a value beyond its bound."""
    return ran.trouble is None and any(not each.ok for each in measure(ran, tuple(ran.arrays)))
