"""Runs a stage's checks and reports their results, for both the notebook and the judge."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringlab.errors import CourseError, SandboxError
from ringlab_course.checking.contract import CHECK_KINDS, TIERS, Check, Stage
from ringlab_course.checking.explain import Noted, explained
from ringlab_course.checking.failures import Failure, NotWritten
from ringlab_course.checking.forbidden import OffLimits
from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.checking.subject import Subject

NOT_COUNTED = {
    "correctness": "This holds. Memory, traffic and speed count once the values are right.",
    "cost": "This holds. Speed counts once memory and traffic are right.",
}
"""The message of a check that holds, if a check of this earlier kind fails."""


@dataclass(frozen=True)
class CheckReport:
    """The result of one check. `broken` means that the check, not the answer, is at fault.

    `counted` is False if the check holds but earns no points, because a check of an earlier kind fails.
    `message` says so.
    """

    id: str
    title: str
    tier: str
    points: int
    ok: bool
    message: str = ""
    counterexample: str = ""
    misconception: str | None = None
    broken: bool = False
    seconds: float = 0.0
    kind: str = "correctness"
    counted: bool = True

    @property
    def earned(self) -> int:
        """The points that this check earns."""
        return self.points if self.ok and self.counted else 0


@dataclass(frozen=True)
class StageReport:
    """The result of one stage; `status` is "ok", "wrong" or "not written".

    replaced: the wrong helpers that the judge replaced by the reference's functions to grade this stage again;
    empty if the stage was graded once. earned_again: the points of the second grading.
    """

    stage: str
    status: str
    checks: tuple[CheckReport, ...]
    replaced: tuple[str, ...] = ()
    earned_again: int = 0

    @property
    def ok(self) -> bool:
        """Whether every check that was run holds."""
        return self.status == "ok"

    @property
    def points(self) -> int:
        """The most points that the checks in this report can earn."""
        return sum(check.points for check in self.checks)

    @property
    def earned(self) -> int:
        """The points that the checks in this report earned."""
        return sum(check.earned for check in self.checks)

    @property
    def earned_with_reference(self) -> int:
        """The points earned, or those earned with the reference's helpers if these are more."""
        return max(self.earned, self.earned_again)


def run_stage(stage: Stage, subject: Subject, tier: str = "visible", seed: int = 0) -> StageReport:
    """Return the report of `stage`'s checks of `tier` ("all" for every tier), in the contract's order.

    Each check draws its inputs from its own generator, which is seeded by `seed` and the check's id, so no
    check's inputs depend on another check. If the first check reports "not written", the other checks are not
    run. A check of cost counts only if the visible checks of correctness hold. A check of speed counts only
    if those of cost hold too.
    """
    if tier not in (*TIERS, "all"):
        raise CourseError(f"one of the tiers {', '.join(TIERS)}, all", repr(tier))
    chosen = [check for check in stage.checks if tier in (check.tier, "all")]
    reports: list[CheckReport] = []
    for check in chosen:
        try:
            reports.append(_run_check(stage, check, subject, seed))
        except NotWritten as failure:
            if not reports:
                return not_written(stage, failure, tier)
            reports.append(_failed(check, failure))  # the function is written, but does not handle this case
    wrong = any(not report.ok for report in reports)
    return StageReport(stage.id, "wrong" if wrong else "ok", gated(reports))


def gated(reports: Sequence[CheckReport]) -> tuple[CheckReport, ...]:
    """Return one stage's reports; a check that holds is not counted if one of an earlier kind fails.

    Only a failed visible check has this effect. Otherwise a check could lose its points for a reason that the
    learner cannot see.
    """
    failing = {report.kind for report in reports if not report.ok and report.tier == "visible"}
    counted = []
    for report in reports:
        before = CHECK_KINDS[: CHECK_KINDS.index(report.kind)]
        closed = [kind for kind in before if kind in failing]
        if report.ok and closed:
            report = replace(report, counted=False, message=NOT_COUNTED[closed[0]])
        counted.append(report)
    return tuple(counted)


def after_helpers(stage: Stage, report: StageReport, earlier: Mapping[str, StageReport]) -> StageReport:
    """Return a stage's report. If a helper is wrong, the failed checks tell the learner to mend it first.

    `earlier` holds the reports of the exercise's other stages by the name of their function.
    """
    wrong = [name for name in stage.helpers if name in earlier and _is_wrong(earlier[name])]
    if report.ok or report.status == "not written" or not wrong or not stage.waits:
        return report
    first = " and ".join(f"`{name}` ({earlier[name].stage})" for name in wrong)
    which = "it" if len(wrong) == 1 else "them"
    message = (
        f"First mend {first}: `{stage.function}` may call {which}. Then this check can say what is left."
    )
    checks = [
        check if check.ok else replace(check, message=message, counterexample="", misconception=None)
        for check in report.checks
    ]
    return replace(report, checks=tuple(checks))


def _is_wrong(report: StageReport) -> bool:
    return any(not check.ok and check.kind == "correctness" for check in report.checks)


def run_in_process(
    stage: Stage,
    namespace: Mapping[str, Any],
    tier: str = "visible",
    seed: int = 0,
    limits: OffLimits | None = None,
) -> StageReport:
    """Return the report of `stage` for the function in `namespace`, run in this process within `limits`."""
    try:
        subject = InProcessSubject(stage, namespace, limits)
    except NotWritten as failure:
        return not_written(stage, failure, tier)
    except Failure as failure:
        failed = not_written(stage, failure, tier)
        return StageReport(stage.id, "wrong", failed.checks)
    return run_stage(stage, subject, tier, seed)


def not_written(stage: Stage, failure: Failure, tier: str = "all") -> StageReport:
    """Return the report of a stage that has no code: no check earns points, and all have the same message."""
    checks = tuple(_failed(check, failure) for check in stage.checks if tier in (check.tier, "all"))
    return StageReport(stage.id, "not written", checks)


def _failed(check: Check, failure: Failure) -> CheckReport:
    return CheckReport(
        check.id,
        check.title,
        check.tier,
        check.points,
        False,
        failure.message,
        failure.counterexample,
        kind=check.kind,
    )


def _run_check(stage: Stage, check: Check, subject: Subject, seed: int) -> CheckReport:
    rng = np.random.default_rng([seed, zlib.crc32(check.id.encode())])
    begin = time.perf_counter()
    ok, message, example, misconception, broken = True, "", "", None, False
    noted = Noted(subject)
    try:
        check.run(noted, rng)
    except (NotWritten, SandboxError):  # a worker that does not start is not a wrong answer
        raise
    except Failure as found:
        failure = explained(found, stage, check.id, noted.calls)
        ok, message, example = False, failure.message, failure.counterexample
        misconception = failure.misconception
    except Exception as error:
        ok, broken = False, True
        message = "this check could not read your answer; if you think the answer is right, report the check."
        example = f"{type(error).__name__}: {error}"
    return CheckReport(
        check.id,
        check.title,
        check.tier,
        check.points,
        ok,
        message,
        example,
        misconception,
        broken,
        time.perf_counter() - begin,
        check.kind,
    )
