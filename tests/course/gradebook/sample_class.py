"""Entries made without a sandbox, from the course's own right and wrong submissions, for tests of pages."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from typing import Any

from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.reports import StageReport, run_in_process
from ringlab_course.gradebook.entry import Entry
from ringlab_course.judge.judge import GradeReport
from tests.course.submissions_of import namespace, submission

SEED = 918273645
WRONG = ("wrong_no_scale", "wrong_strict", "wrong_mixes_heads", "wrong_cap_ignored")
HIDDEN = "THE PROBE OF A HIDDEN CHECK"


@cache
def graded(stem: str, exercise_id: str = "01") -> dict[str, Any]:
    """Return the report of a submission, with the hidden checks' counterexamples, which a judge removes."""
    exercise = load_exercise(exercise_id)
    space = namespace(submission(f"{exercise_id}/{stem}"))
    stages = tuple(_marked(run_in_process(stage, space, "all", seed=1)) for stage in exercise.stages)
    return GradeReport(
        f"{stem}.ipynb", exercise_id, stages, exercise.points, seed=SEED, seconds=1.5
    ).as_dict()


def entry(learner: str, stem: str = "right_looped", exercise_id: str = "01", **fields: Any) -> Entry:
    """Return the entry of `learner` who handed in the submission `stem`."""
    report = fields.pop("report", None) or graded(stem, exercise_id)
    made = Entry(
        learner, exercise_id, f"submitted/{learner}/{exercise_id}/x.ipynb", "0123456789abcdef" * 4,
        "2026-11-03T08:00:00+00:00", report["seconds"], report, report["earned"], report["points"], seed=SEED,
    )  # fmt: skip
    return replace(made, **fields)


def a_class() -> list[Entry]:
    """Return the entries of a class: on time, late, overridden, unreadable, and for two exercises."""
    late = {"late_s": 9000.0, "penalty": 2.5, "submitted_at": "2026-11-02T23:59:00+00:00"}
    reason = "the projector caught fire (grace, 2026-11-21T20:37:41.632594+00:00)"
    return [
        entry("Ada"),
        *(entry(f"Learner {number}", stem) for number, stem in enumerate(WRONG)),
        entry("Late", WRONG[0], **late),
        entry("Set", WRONG[1], override=33.0, override_reason=reason),
        entry("Unreadable", report=saying(reason="broken JSON", stages=[])),
        entry("Ada", "right_looped", "02"),
    ]


def saying(message: str = "wrong", counterexample: str = "", **more: Any) -> dict[str, Any]:
    """Return a report of one stage with one failing visible check that gives this message."""
    check = {
        "id": "small", "title": "weights and lse of a few scores", "tier": "visible", "points": 2, "ok": False,
        "message": message, "counterexample": counterexample, "misconception": None, "broken": False, "seconds": 0.1,
    }  # fmt: skip
    report = asdict(GradeReport("x.ipynb", "01", (), 36, seed=SEED, seconds=0.2))
    stages = [{"stage": "01.softmax", "status": "wrong", "checks": [check]}]
    return {**report, "stages": stages, "earned": 0, "ok": False, **more}


def _marked(report: StageReport) -> StageReport:
    return replace(
        report,
        checks=tuple(
            replace(c, counterexample=HIDDEN) if c.tier == "held-out" and not c.ok else c
            for c in report.checks
        ),
    )
