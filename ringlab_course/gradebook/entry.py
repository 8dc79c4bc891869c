"""The gradebook's record of one learner in one exercise, in the form that other modules read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """The result that counts for one learner in one exercise, with lateness and overrides applied.

    id: the result's row in the gradebook, or 0 if there is no result.
    learner: the name that the path gives.
    digest: SHA-256 of the notebook as graded.
    contract: the version of the exercise's checks.
    graded_at, submitted_at: UTC, ISO 8601.
    seconds: the time that grading took.
    report: `GradeReport.as_dict()`.
    late_s: the seconds after the deadline.
    helped: the points that stages earn in addition with the reference's functions in place of wrong helpers, or 0
    if the gradebook does not count these.
    penalty: the points that lateness costs.
    override: the score that an instructor has set instead.
    older_checks: whether the checks have changed since this result.
    """

    learner: str
    exercise: str
    path: str
    digest: str
    graded_at: str
    seconds: float
    report: dict[str, Any]
    earned: float
    maximum: float
    submitted_at: str | None = None
    late_s: float = 0.0
    helped: float = 0.0
    penalty: float = 0.0
    override: float | None = None
    override_reason: str = ""
    contract: str = ""
    seed: int = 0
    older_checks: bool = False
    id: int = 0

    @property
    def score(self) -> float:
        """The score that counts: the override, otherwise all earned points less the penalty, at least 0."""
        if self.override is not None:
            return self.override
        return max(0.0, self.earned + self.helped - self.penalty)

    @property
    def counts_reference(self) -> bool:
        """Whether the score includes all points with the reference's functions; True if there are none to add."""
        return self.helped > 0 or self.earned_with_reference == self.earned

    @property
    def earned_with_reference(self) -> float:
        """The points earned with the reference's functions in place of wrong helpers, whether these count or not.

        Reports of earlier versions lack this number; then it is `earned`.
        """
        if self.report.get("reason"):
            return self.earned
        return max(self.earned, float(self.report.get("earned_with_reference", 0)))

    @property
    def failed(self) -> tuple[dict[str, Any], ...]:
        """The checks that fail, in the contract's order, each with the `stage` that it belongs to."""
        return failed_checks(self.report)


@dataclass(frozen=True)
class Ungraded:
    """A submission that we failed to grade, the reason, and the number of tries.

    It does not count as zero.
    """

    learner: str
    exercise: str
    path: str
    digest: str
    reason: str
    at: str
    tries: int = 1


@dataclass(frozen=True)
class Override:
    """A score that an instructor has set, or None to take an earlier one back.

    The reason, the instructor and the time (UTC, ISO 8601) are recorded with the score.
    """

    learner: str
    exercise: str
    score: float | None
    reason: str
    by: str
    at: str = field(compare=False, default="")


def failed_checks(report: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the checks of `report` that fail, each with the `stage` that it belongs to."""
    return tuple(
        {"stage": stage["stage"], **check}
        for stage in report.get("stages", ())
        for check in stage["checks"]
        if not check["ok"]
    )
