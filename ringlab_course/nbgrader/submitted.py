"""A learner's submission as a notebook that nbgrader can read: the learner's code with ringlab's metadata.

nbgrader trusts the metadata in a submission. If a learner has changed the schema version, the grading of the
whole class stops; if a cell's type was changed or an id occurs twice, a score is lost. nbgrader also shows
Markdown unchanged in the instructor's browser. So only the text of a submission's cells is kept. A stage's
result becomes the output of its graded cell: a number for nbgrader, and an explanation for people.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from markupsafe import Markup
from nbformat import NotebookNode

from ringlab_course.builder.sources import METADATA
from ringlab_course.checking.contract import Stage
from ringlab_course.gradebook.entry import Entry
from ringlab_course.gradebook.learner_view import CheckView, EntryView, StageView, entry_view
from ringlab_course.gradebook.readable import legible, points
from ringlab_course.judge.judge import GradeReport
from ringlab_course.judge.submission import Cell, UnreadableError, read_submission

SHOWN = 20_000
"""The number of characters shown of a text cell."""
_FENCES = re.compile("`+")


@dataclass(frozen=True)
class Known:
    """A cell of the released notebook, as nbgrader keeps it; `stage` is ringlab's name, such as "05.step"."""

    grade_id: str
    cell_type: str
    source: str
    checksum: str | None = None
    grade: bool = False
    solution: bool = False
    task: bool = False
    locked: bool = False
    points: float = 0.0
    stage: str | None = None

    def cell(self, source: str) -> NotebookNode:
        """Return the cell with `source` as its content and with nbgrader's metadata of version 3."""
        marks: dict[str, Any] = {
            "grade_id": self.grade_id,
            "schema_version": 3,
            "cell_type": self.cell_type,
            "checksum": self.checksum,
            "grade": self.grade,
            "solution": self.solution,
            "task": self.task,
            "locked": self.locked,
        }
        if self.checksum is None:
            del marks["checksum"]
        if self.grade or self.task:
            marks["points"] = self.points
        metadata = {"deletable": False, "nbgrader": marks}
        if self.solution and self.stage:
            metadata["grade"] = self.stage
        return _cell(self.cell_type, source, metadata)


def solution_id(stage: str) -> str:
    """Return nbgrader's name of the cell in which the answer to a stage is written."""
    return stage.replace(".", "-")


def check_id(stage: str) -> str:
    """Return nbgrader's name of the cell that holds a stage's points."""
    return solution_id(stage) + "-check"


def stages_of(known: Iterable[Known], stages: Iterable[Stage]) -> dict[str, Stage]:
    """Return the graded ones among `stages`, by the name of the cell that holds their points."""
    graded = {cell.grade_id for cell in known if cell.grade}
    return {check_id(stage.id): stage for stage in stages if check_id(stage.id) in graded}


def read(path: str | os.PathLike[str], known: Sequence[Known], released: Iterable[str] = ()) -> NotebookNode:
    """Return the submission at `path` as a notebook that contains each graded cell of `known` exactly once.

    released: the course's own Markdown, which is shown as Markdown; other Markdown is shown as plain text.
    For an unreadable file, the notebook says why it cannot be read and has every graded cell.
    """
    try:
        submission = read_submission(path)
        names = _names(submission.cells, _own_ids(path), known)
    except UnreadableError as error:
        said = "This submission cannot be read: " + ": ".join(filter(None, (error.got, error.remedy)))
        return _notebook(_with_missing([_cell("markdown", _as_text(said))], known))
    trusted = set(released)
    cells: list[NotebookNode] = []
    for index, cell in enumerate(submission.cells):
        mine = names.get(index)
        if mine is None:
            cells.append(_plain(cell, trusted))
        elif mine.solution:
            as_it_is = cell.code or cell.source == mine.source
            cells.append(mine.cell(cell.source if as_it_is else _as_text(cell.source)))
        else:
            cells.append(mine.cell(mine.source))
    return _notebook(_with_missing(cells, known))


def _names(cells: Sequence[Cell], ids: Sequence[str | None], known: Sequence[Known]) -> dict[int, Known]:
    """Return the known cell for each cell index, matched by name and type.

    Of several matches, the last counts.
    """
    by_id = {each.grade_id: each for each in known}
    if len(ids) != len(cells):
        raise UnreadableError("a Jupyter notebook", "a file that changed while it was read")
    places: dict[str, int] = {}
    for index, (cell, own) in enumerate(zip(cells, ids, strict=True)):
        named = by_id.get(solution_id(cell.grade)) if cell.grade else None
        if named is None or not named.solution:
            named = by_id.get(own or "")
        if named is not None and (cell.code == (named.cell_type == "code")):
            places[named.grade_id] = index
    return {index: by_id[name] for name, index in places.items()}


def _own_ids(path: str | os.PathLike[str]) -> list[str | None]:
    """Return the grade_id in each cell's metadata, or None; the other metadata are ignored."""
    try:
        cells = json.loads(Path(path).read_bytes().decode("utf-8-sig"))["cells"]
        marks = [(cell.get("metadata") or {}).get("nbgrader") for cell in cells]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UnreadableError("a Jupyter notebook", "a file that changed while it was read") from None
    ids = [mark.get("grade_id") if isinstance(mark, dict) else None for mark in marks]
    return [each if isinstance(each, str) else None for each in ids]


def _with_missing(cells: list[NotebookNode], known: Sequence[Known]) -> list[NotebookNode]:
    """Add the cells that the learner deleted.

    A cell with a stage's points goes below the stage's solution cell, if that exists; all other cells go to
    the end.
    """
    there = {_grade_id(cell) for cell in cells}
    for each in known:
        if each.grade_id in there or not (each.grade or each.task or each.locked):
            continue
        before = [
            i for i, cell in enumerate(cells) if each.stage and _grade_id(cell) == solution_id(each.stage)
        ]
        cells.insert(before[0] + 1 if before else len(cells), each.cell(each.source))
    return cells


def _grade_id(cell: NotebookNode) -> str:
    return str(cell.metadata.get("nbgrader", {}).get("grade_id", ""))


def _plain(cell: Cell, trusted: set[str]) -> NotebookNode:
    if cell.code:
        return _cell("code", cell.source)
    return _cell("markdown", cell.source if cell.source in trusted else _as_text(cell.source))


def _as_text(source: str) -> str:
    """Return Markdown that shows `source` literally, whatever it contains."""
    shown = legible(source, SHOWN)
    fence = "`" * (max(map(len, _FENCES.findall(shown)), default=0) + 3)
    return f"{fence}text\n{shown}\n{fence}"


def _cell(cell_type: str, source: str, metadata: dict[str, Any] | None = None) -> NotebookNode:
    make = nbformat.v4.new_code_cell if cell_type == "code" else nbformat.v4.new_markdown_cell
    return make(source, metadata=nbformat.from_dict(metadata or {}))


def _notebook(cells: list[NotebookNode]) -> NotebookNode:
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=nbformat.from_dict(METADATA))
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(cells, 1):
        cell.id = f"cell-{number}"
    return notebook


_BOX = "font-family: sans-serif; font-size: 14px; line-height: 1.45; max-width: 52em; color: #1a1a1a"
_PRE = "white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f4f4; border: 0; padding: 0.4em 0.6em; margin: 0.3em 0"
_QUIET = "color: #555"


def view_of(report: GradeReport, *, reference: bool = True) -> EntryView:
    """Return the part of `report` that a learner may see: no probes of hidden checks, and no seed.

    reference: whether the points with the reference's helpers count.
    """
    entry = Entry(
        learner="", exercise=report.exercise, path=report.path, digest="", graded_at="", seconds=report.seconds,
        report=report.as_dict(), earned=report.earned, maximum=report.points,
        helped=report.earned_with_reference - report.earned if reference else 0.0,
    )  # fmt: skip
    return entry_view(entry)


def output(score: float, maximum: float, view: EntryView, stage: StageView | None) -> NotebookNode:
    """Return the output of a graded cell. nbgrader reads a result that is a number as the score.

    A graded cell without an output would get full marks.
    """
    data = {"text/plain": repr(float(score)), "text/html": str(_box(score, maximum, view, stage))}
    return nbformat.v4.new_output("execute_result", data=data, execution_count=1)


def by_hand(said: str) -> NotebookNode:
    """Return the output of a cell that ringlab does not grade; nbgrader gives it no points."""
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
        text = _why(said) if said else Markup("<p>Not written yet.</p>")
        return text + _hints(stage.hints)
    rows = [Markup('<li style="list-style: none">{}</li>').format(_check(check)) for check in stage.checks]
    again = Markup("<p>{}.</p>").format(stage.again) if stage.again else Markup("")
    return Markup('<ul style="padding-left: 0">{}</ul>{}{}').format(_joined(rows), again, _hints(stage.hints))


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
    """Return the hints as a list in which each hint is opened separately."""
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
