"""Running a stage's checks and reporting what came of them: the notebook and the judge both do this."""

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
"""The text for a check that holds while a check of this kind, which comes first, fails."""


@dataclass(frozen=True)
class CheckReport:
    """What came of one check. `broken` means that the check, not the answer, is at fault.

    `counted` is off where the check holds and still gives nothing, as one of a kind before its own
    fails; `message` then says so.
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
        """The points this check gives."""
        return self.points if self.ok and self.counted else 0


@dataclass(frozen=True)
class StageReport:
    """What came of one stage; `status` is "ok", "wrong" or "not written"."""

    stage: str
    status: str
    checks: tuple[CheckReport, ...]

    @property
    def ok(self) -> bool:
        """Whether every check that was run holds."""
        return self.status == "ok"

    @property
    def points(self) -> int:
        """The points that the checks run here could give."""
        return sum(check.points for check in self.checks)

    @property
    def earned(self) -> int:
        """The points that they gave."""
        return sum(check.earned for check in self.checks)


def run_stage(stage: Stage, subject: Subject, tier: str = "visible", seed: int = 0) -> StageReport:
    """Return the report of `stage`'s checks of `tier` ("all" for every tier), in the contract's order.

    Each check draws its inputs from its own generator, made from `seed` and the check's id, so that
    no check's probes depend on another. If the first check says "not written", the rest is not run. A check of cost
    counts where the visible checks of correctness hold, and one of speed where those of cost hold too.
    """
    if tier not in (*TIERS, "all"):
        raise CourseError(f"a tier out of {', '.join(TIERS)}, all", repr(tier))
    chosen = [check for check in stage.checks if tier in (check.tier, "all")]
    reports: list[CheckReport] = []
    for check in chosen:
        try:
            reports.append(_run_check(stage, check, subject, seed))
        except NotWritten as failure:
            if not reports:
                return not_written(stage, failure, tier)
            reports.append(_failed(check, failure))  # a case that is left open, in a function that is written
    wrong = any(not report.ok for report in reports)
    return StageReport(stage.id, "wrong" if wrong else "ok", gated(reports))


def gated(reports: Sequence[CheckReport]) -> tuple[CheckReport, ...]:
    """Return the reports of one stage, with those not counted that hold while one of a kind before theirs fails.

    Only checks that a learner sees withhold points, so that no green tick is taken back for a hidden reason.
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
    """Return the report of a stage, with no word on its own faults but on the helper that is wrong, if one is.

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
    """Return the report of `stage` for the function found in `namespace`, run in this process within `limits`."""
    try:
        subject = InProcessSubject(stage, namespace, limits)
    except NotWritten as failure:
        return not_written(stage, failure, tier)
    except Failure as failure:
        failed = not_written(stage, failure, tier)
        return StageReport(stage.id, "wrong", failed.checks)
    return run_stage(stage, subject, tier, seed)


def not_written(stage: Stage, failure: Failure, tier: str = "all") -> StageReport:
    """Return the report of a stage that has no code: every check without points, with one message."""
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
    except (NotWritten, SandboxError):  # a worker that does not start is no answer, and no learner's fault
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
