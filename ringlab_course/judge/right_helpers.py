"""Grade a stage again with the reference's functions in place of helpers that a submission got wrong.

So the report can say what the stage earns by itself. The worker of such a run holds the reference's source. So
nothing of the run is kept but its points.
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
"""The right answer that is the reference, by exercise; elsewhere it is the first one.

A reference suits callers of every style: it takes blocks without rows, and answers with arrays.
"""


def reference_cell(exercise_id: str, functions: Sequence[str]) -> str:
    """Return a cell that defines `functions` as the reference does, and changes no other name of a notebook."""
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
    """Return the reports and the reason why nothing counts, or "" if there is none.

    The reports of stages with wrong helpers have `earned_again`.

    A helper is wrong if a check of it fails, also with the reference's functions in place of its own helpers.
    opened: returns the Session of the submission followed by one more cell. graded: returns a stage's report.
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
    """Return a stage's report with what the stage earned again, unless nobody has written it."""
    if again.status == "not written":
        return report
    if report.status == "not written":  # it was taken for unwritten because its helper is
        report = after_helpers(stage, replace(report, status="wrong"), whole)
    return replace(report, replaced=wrong, earned_again=again.earned)
