"""Grade a stage again with the reference's functions in place of helpers that a submission got wrong.

So the report can say what the stage earns by itself. The worker of such a run contains the reference's source, which
its texts might reveal. So only the points of the run are kept.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ringlab_course.checking.contract import Exercise, Stage
from ringlab_course.checking.reports import StageReport, after_helpers
from ringlab_course.checking.wrong_answers import right_answers, used_by
from ringlab_course.judge.session import Session

REFERENCES = {"05": "loops", "08": "vectorised"}
"""The name of the right answer that is the reference, by exercise. By default it is the first right answer.

A reference suits callers of every style: it takes blocks without rows, and returns arrays.
"""


def reference_cell(exercise_id: str, functions: Sequence[str]) -> str:
    """Return a cell that defines `functions` as the reference does, and no other name that a notebook might use."""
    known = right_answers(exercise_id)
    right = known[REFERENCES.get(exercise_id, next(iter(known)))]
    parts = []
    for name in functions:
        body = textwrap.indent(used_by((name,), right), "    ")
        parts.append(f"def _reference_{name}():\n{body}    return {name}\n\n\n{name} = _reference_{name}()\n")
    return "\n\n".join(parts)


def graded_again(
    exercise: Exercise,
    reports: Sequence[StageReport],
    opened: Callable[[str], Session],
    graded: Callable[[Stage, Session], StageReport],
) -> tuple[tuple[StageReport, ...], str]:
    """Return the reports, with `earned_again` for stages with wrong helpers, and the reason why nothing counts.

    The reason is "" if the submission counts. A helper is wrong if it fails a check. If it has wrong helpers
    itself, it is wrong only if it also fails with the reference's functions in their place.
    opened: returns a Session of the submission with one additional cell at its end.
    graded: returns the report of a stage in a Session.
    """
    whole = {stage.function: report for stage, report in zip(exercise.stages, reports, strict=True)}
    right = {function: report.ok for function, report in whole.items()}
    found: list[StageReport] = []
    replaced: tuple[str, ...] = ()
    with contextlib.ExitStack() as opening:
        for stage, report in zip(exercise.stages, reports, strict=True):
            wrong = tuple(name for name in stage.helpers if not right.get(name, True))
            if wrong and stage.waits and not report.ok:
                if wrong != replaced:  # one session at a time, so that the bounds hold for the submission
                    opening.close()
                    session = opening.enter_context(opened(reference_cell(exercise.id, wrong)))
                    session.conceal()
                    replaced = wrong
                again = graded(stage, session)
                if session.condemned:
                    return tuple(reports), session.condemned
                right[stage.function] = again.ok
                report = _with(report, stage, again, wrong, whole)
            found.append(report)
    return tuple(found), ""


def _with(
    report: StageReport,
    stage: Stage,
    again: StageReport,
    wrong: tuple[str, ...],
    whole: Mapping[str, StageReport],
) -> StageReport:
    """Return a stage's report with the points from `again`, or unchanged if the stage is not written."""
    if again.status == "not written":
        return report
    if report.status == "not written":  # only its helper is not written
        report = after_helpers(stage, replace(report, status="wrong"), whole)
    return replace(report, replaced=wrong, earned_again=again.earned)
