"""The functions that an exercise calls: check, hint, progress. Each prints the same text on every run."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from ringlab.errors import CourseError
from ringlab.viz.frontend import in_notebook
from ringlab_course.checking.contract import Exercise, Stage
from ringlab_course.checking.forbidden import OffLimits
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.reports import CheckReport, StageReport, after_helpers, run_in_process
from ringlab_course.notebook.predictions import is_right
from ringlab_course.notebook.progressfile import ProgressFile

PASS = "visible checks pass"
RUNGS = ("a question", "a direction", "a line of mathematics")


def check(stage_id: str, namespace: Mapping[str, Any] | None = None) -> None:
    """Run the visible checks of a stage ("05.forward"), or of all stages of an exercise ("05").

    One line is printed for each check. A wrong answer is printed, never raised, so that the cells below still
    run. The functions are taken from `namespace`, by default from the notebook.

    Raises: CourseError if nbgrader itself runs the notebook to grade it, because a check that does not raise
    would get full marks.
    """
    # raise an error, because nbgrader gives full marks to a cell that raises none
    if os.environ.get("NBGRADER_EXECUTION") == "autograde":
        needed = "nbgrader's settings by which ringlab's judge does the grading"
        raise CourseError(needed, "nbgrader running the notebook itself", "ringlab nbgrader config")
    if namespace is None:
        namespace = sys._getframe(1).f_globals
    exercise, stages = _stages(stage_id)
    reports: dict[str, StageReport] = {}
    for stage in stages:
        report = _report(exercise, stage, namespace, reports)
        print(described(stage, report))
        ProgressFile().update(
            "checks", stage.id, status=report.status, earned=report.earned, points=report.points
        )
    if len(stages) == len(exercise.stages) > 1:
        print(f"\n`ringlab grade exercises/{exercise.slug}.ipynb` runs the hidden checks as well.")


def _report(
    exercise: Exercise, stage: Stage, namespace: Mapping[str, Any], reports: dict[str, StageReport]
) -> StageReport:
    """Return the report of a stage's visible checks, and keep it in `reports`.

    If a check fails, the helper functions that the stage uses are also checked.
    """
    if stage.function not in reports:
        report = run_in_process(stage, namespace, limits=OffLimits.of(exercise))
        if not report.ok:
            for other in exercise.stages:
                if other.function in stage.helpers:
                    _report(exercise, other, namespace, reports)
        reports[stage.function] = after_helpers(stage, report, reports)
    return reports[stage.function]


def hint(stage_id: str) -> None:
    """Show the next of the stage's three hints."""
    exercise, stages = _stages(stage_id)
    if len(stages) != 1:
        names = ", ".join(f'hint("{stage.id}")' for stage in stages)
        print(f"Which part? Ask for one of {names}.")
        return
    stage, file = stages[0], ProgressFile()
    shown = file.get("hints", stage.id).get("rung", 0)
    rung = min(shown + 1, len(stage.hints))
    file.update("hints", stage.id, rung=rung)
    _show_text(f"Hint {rung} of {len(stage.hints)}, {RUNGS[rung - 1]}: {stage.hints[rung - 1]}")
    if shown >= len(stage.hints):
        print(f"That is the last one. The worked solution is solutions/{exercise.slug}.ipynb")


def progress() -> None:
    """Print a line for each exercise, and a line for each stage of the exercise that was checked last."""
    file = ProgressFile()
    checks, hints, grades = (file.section(name) for name in ("checks", "hints", "grades"))
    current = next(reversed(checks or hints or grades or {"": {}})).partition(".")[0]
    rows: list[tuple[str, ...]] = [("exercise", "status", "visible points", "hints", "grade")]
    for exercise_id in exercise_ids():
        try:
            exercise = load_exercise(exercise_id)
        except Exception as error:  # the other exercises are shown even if one is damaged
            rows.append((exercise_id, f"cannot be loaded: {type(error).__name__}", "–", "–", "–"))
            continue
        rows.append(_exercise_row(exercise, checks, hints, grades))
        if exercise_id == current:
            rows += [_stage_row(stage, checks, hints, grades) for stage in exercise.stages]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(_predictions_line(file))


def described(stage: Stage, report: StageReport) -> str:
    """Return a stage's report as the text that `check` prints."""
    head = f"{stage.id}  {stage.title}"
    if report.status == "not written":
        return f"{head}\n  – not written yet: {_without_prefix(report.checks[0].message, stage)}"
    lines = [head]
    said: set[str] = set()
    for item in report.checks:
        lines += _check_lines(item, said)
    passed = sum(item.ok for item in report.checks)
    if report.ok:
        lines.append(f"  visible checks passed ({passed} of {passed})")
    else:
        lines.append(f'  {passed} of {len(report.checks)} visible checks hold; hint("{stage.id}") helps')
    return "\n".join(lines)


def _check_lines(item: CheckReport, said: set[str]) -> list[str]:
    """Return the lines of one check, without a message that is already in `said`; add new messages to `said`.

    When a message is repeated, its counterexample is left out if the mistake has a name. If the mistake has
    no name, the counterexample is shown if it is new, because it may help.
    """
    if item.ok and item.counted:
        return [f"  ✓ {item.title}"]
    repeated = item.message in said
    message = "the same as above" if repeated else item.message
    example = "" if repeated and (item.misconception or item.counterexample in said) else item.counterexample
    said |= {item.message, item.counterexample}
    return [
        f"  {'○' if item.ok else '✗'} {item.title}",
        *textwrap.wrap(message, 92, initial_indent="      ", subsequent_indent="      "),
        *("        " + line for line in example.splitlines()),
    ]


def _without_prefix(message: str, stage: Stage) -> str:
    return message.removeprefix(f"`{stage.function}` is not written yet: ")


def _stages(stage_id: str) -> tuple[Exercise, tuple[Stage, ...]]:
    exercise = load_exercise(stage_id.partition(".")[0])
    return exercise, exercise.stages if "." not in stage_id else (exercise.stage(stage_id),)


def _exercise_row(exercise: Exercise, checks: dict, hints: dict, grades: dict) -> tuple[str, ...]:
    begun = [checks[stage.id] for stage in exercise.stages if stage.id in checks]
    right = sum(entry.get("status") == "ok" for entry in begun)
    status = f"{PASS} for {right} of {len(exercise.stages)} functions" if begun else "not begun"
    return _row(f"{exercise.id}  {exercise.title}", status, exercise.stages, checks, hints, grades)


def _stage_row(stage: Stage, checks: dict, hints: dict, grades: dict) -> tuple[str, ...]:
    status = checks.get(stage.id, {}).get("status", "not begun")
    return _row(f"    {stage.id}", PASS if status == "ok" else status, (stage,), checks, hints, grades)


def _row(
    label: str, status: str, stages: tuple[Stage, ...], checks: dict, hints: dict, grades: dict
) -> tuple[str, ...]:
    graded = [grades[stage.id] for stage in stages if {"earned", "points"} <= set(grades.get(stage.id, {}))]
    return (
        label,
        status,
        f"{sum(checks.get(stage.id, {}).get('earned', 0) for stage in stages)} of {sum(map(_visible_points, stages))}",
        str(sum(hints.get(stage.id, {}).get("rung", 0) for stage in stages)),
        f"{sum(g['earned'] for g in graded)} of {sum(g['points'] for g in graded)}" if graded else "–",
    )


def _visible_points(stage: Stage) -> int:
    return sum(item.points for item in stage.checks if item.tier == "visible")


def _predictions_line(file: ProgressFile) -> str:
    made = [p for p in file.section("predictions").values() if "guess" in p and "measured" in p]
    right = sum(is_right(p["guess"], p["measured"]) for p in made)
    return f"predictions: {len(made)} made and measured, {right} of them right"


def _show_text(text: str) -> Any:
    """Show text that may contain mathematics: as Markdown in a notebook, otherwise printed."""
    if not in_notebook():
        print(text)
        return
    from IPython.display import Markdown, display

    display(Markdown(text))
