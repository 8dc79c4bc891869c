"""What came of a stage, as the output of its graded cell: the number that nbgrader reads, and words for people."""

from __future__ import annotations

from typing import Any

import nbformat
from markupsafe import Markup
from nbformat import NotebookNode

from ringlab_course.gradebook.entry import Entry
from ringlab_course.gradebook.learner_view import CheckView, EntryView, StageView, entry_view
from ringlab_course.gradebook.readable import points
from ringlab_course.judge.judge import GradeReport

_BOX = "font-family: sans-serif; font-size: 14px; line-height: 1.45; max-width: 52em; color: #1a1a1a"
_PRE = "white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f4f4; border: 0; padding: 0.4em 0.6em; margin: 0.3em 0"
_QUIET = "color: #555"


def view_of(report: GradeReport) -> EntryView:
    """Return what a learner may see of `report`: no probe of a hidden check, no seed."""
    entry = Entry(
        learner="", exercise=report.exercise, path=report.path, digest="", graded_at="", seconds=report.seconds,
        report=report.as_dict(), earned=report.earned, maximum=report.points,
    )  # fmt: skip
    return entry_view(entry)


def output(score: float, maximum: float, view: EntryView, stage: StageView | None) -> NotebookNode:
    """Return the output of a graded cell. nbgrader takes a result that is a number for the score.

    A cell without an output would get full marks.
    """
    data = {"text/plain": repr(float(score)), "text/html": str(_box(score, maximum, view, stage))}
    return nbformat.v4.new_output("execute_result", data=data, execution_count=1)


def by_hand(said: str) -> NotebookNode:
    """Return the output of a cell that is not ringlab's to grade; nbgrader takes it for no points."""
    return nbformat.v4.new_output("error", ename="NotGraded", evalue=said, traceback=[f"NotGraded: {said}"])


def _box(score: float, maximum: float, view: EntryView, stage: StageView | None) -> Markup:
    parts: list[Markup] = []
    for text in filter(None, (view.reason, view.label)):
        parts.append(Markup("<p><strong>{}</strong></p>").format(text))
    if view.notes:
        parts.append(_list(view.notes))
    if stage is not None:
        parts.append(_stage(stage))
    head = Markup("<p><strong>{} of {} points</strong></p>").format(points(score), points(maximum))
    return Markup('<div class="ringlab-feedback" style="{}">{}{}</div>').format(_BOX, head, _joined(parts))


def _stage(stage: StageView) -> Markup:
    if not stage.written:
        said = stage.checks[0] if stage.checks else None
        told = _why(said) if said else Markup("<p>Not written yet.</p>")
        return told + _hints(stage.hints)
    rows = [Markup('<li style="list-style: none">{}</li>').format(_check(check)) for check in stage.checks]
    return Markup('<ul style="padding-left: 0">{}</ul>{}').format(_joined(rows), _hints(stage.hints))


def _check(check: CheckView) -> Markup:
    mark = "✗" if not check.ok else "✓" if check.counted else "○"
    head = Markup('{} {} <span style="{}">({}, {} of {} points)</span>').format(
        mark, check.title, _QUIET, check.tier, points(check.earned), points(check.points)
    )
    return (
        head
        if mark == "✓"
        else Markup('{}<div style="margin-left: 1.4em">{}</div>').format(head, _why(check))
    )


def _why(check: CheckView) -> Markup:
    if check.repeated:
        return Markup('<p style="{}">For the same reason as above.</p>').format(_QUIET)
    parts = [Markup("<p>{}</p>").format(check.message)] if check.message else []
    if check.misconception:
        parts.append(
            Markup('<p style="{}">A common mistake, called “{}”.</p>').format(_QUIET, check.misconception)
        )
    if check.counterexample:
        parts.append(Markup('<pre style="{}">{}</pre>').format(_PRE, check.counterexample))
    if check.broken:
        parts.append(Markup("<p>The check, not your answer, may be at fault: tell your instructor.</p>"))
    return _joined(parts)


def _hints(hints: tuple[tuple[str, Any], ...]) -> Markup:
    """A ladder: each hint is opened on its own."""
    if not hints:
        return Markup("")
    rungs = [
        Markup("<details><summary>Hint {} of {}: {}</summary><p>{}</p></details>").format(
            number, len(hints), kind, text
        )
        for number, (kind, text) in enumerate(hints, 1)
    ]
    return _joined(rungs)


def _list(texts: tuple[str, ...]) -> Markup:
    return Markup("<ul>{}</ul>").format(_joined([Markup("<li>{}</li>").format(text) for text in texts]))


def _joined(parts: list[Markup]) -> Markup:
    return Markup("").join(parts)
