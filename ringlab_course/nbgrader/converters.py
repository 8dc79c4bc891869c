"""The classes that replace nbgrader's own: they read submissions, have the judge grade them, and save scores.

They never run a submission in nbgrader's process. This module alone imports nbgrader. The configuration
`course.CONFIG` names these classes as text. If they cannot be imported, nbgrader stops, and learners' code is
not executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters import NotebookExporter
from nbformat import NotebookNode
from nbgrader.api import Gradebook
from nbgrader.coursedir import CourseDirectory
from nbgrader.preprocessors import NbGraderPreprocessor, SaveAutoGrades
from traitlets import Bool, Enum, Float

from ringlab_course.checking.contract import Exercise
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.gradebook.store import HELPERS
from ringlab_course.judge.judge import GradeReport, grade
from ringlab_course.nbgrader import submitted
from ringlab_course.nbgrader.submitted import Known

NOT_OURS = "this cell is not one of ringlab's, and nothing is run here: grade it by hand"


class Submitted(NotebookExporter):
    """Replaces nbgrader's exporter and reads any submitted file as data."""

    def from_filename(
        self, filename: str, resources: dict[str, Any] | None = None, **keywords: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the notebook's text and resources, as nbconvert does."""
        course, names = _coursedir(self), (resources or {})["nbgrader"]
        if Path(filename) == _path(course, course.autograded_directory, names):  # this class wrote that file
            return super().from_filename(filename, resources=resources, **keywords)
        known = known_cells(names)
        notebook = submitted.read(filename, known, _released(course, names))
        return self.from_notebook_node(notebook, resources=resources, **keywords)


class Judged(NbGraderPreprocessor):
    """Replaces nbgrader's Execute and writes the judge's results for the submitted file into graded cells."""

    unsafe = Bool(
        False,
        help="Grade without the sandbox if there is none: learners' code then runs with all your rights.",
    ).tag(config=True)

    patience = Float(
        1.0, help="Multiply all time limits by this; 2 for a slow machine.", min=0.1, max=100
    ).tag(config=True)

    helpers = Enum(
        HELPERS,
        HELPERS[0],
        help="Wrong helpers of later stages: reference, replaced by the reference's functions, or own.",
    ).tag(config=True)

    def preprocess(self, notebook: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """Return the notebook with an output in every graded cell.

        Raises: SandboxError if no sandbox can be set up, so that nobody gets a zero because of that.
        """
        names = resources["nbgrader"]
        course = _coursedir(self)
        known = known_cells(names)
        exercise = exercise_of(known)
        looked_at: set[str] = set()
        if exercise is not None:
            path = _path(course, course.submitted_directory, names)
            report = grade(path, exercise, unsafe=self.unsafe, patience=self.patience)
            reference = self.helpers == HELPERS[0]
            earned = report.earned_with_reference if reference else report.earned
            self.log.info("%s: %s of %s points", path, earned, report.points)
            looked_at = write_scores(notebook, known, exercise, report, reference=reference)
        foreign = write_foreign(notebook, known)
        resources["ringlab"] = {"by_hand": foreign | looked_at}
        return notebook, resources


class Saved(SaveAutoGrades):
    """Replaces nbgrader's SaveAutoGrades: saves scores, and marks cells that a person has to grade."""

    def preprocess(self, notebook: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """Return the notebook unchanged, after saving the scores in nbgrader's gradebook."""
        notebook, resources = super().preprocess(notebook, resources)
        names = resources["nbgrader"]
        place = names["notebook"], names["assignment"], names["student"]
        with Gradebook(names["db_url"]) as book:
            for grade_id in sorted(resources["ringlab"]["by_hand"]):
                book.find_grade(grade_id, *place).needs_manual_grade = True
            book.db.commit()
        return notebook, resources


def known_cells(names: dict[str, str]) -> list[Known]:
    """Return the cells of the released notebook from nbgrader's gradebook, which no submission can change."""
    with Gradebook(names["db_url"]) as book:
        notebook = book.find_notebook(names["notebook"], names["assignment"])
        graded = {cell.name: float(cell.max_score) for cell in (*notebook.grade_cells, *notebook.task_cells)}
        grades = {cell.name for cell in notebook.grade_cells}
        solutions = {cell.name for cell in notebook.solution_cells}
        tasks = {cell.name for cell in notebook.task_cells}
        rows = [(c.name, c.cell_type, c.source, c.checksum, bool(c.locked)) for c in notebook.source_cells]
    return [
        Known(
            name, cell_type, source or "", checksum, grade=name in grades, solution=name in solutions,
            task=name in tasks, locked=locked, points=graded.get(name, 0.0), stage=_stage_named(name),
        )
        for name, cell_type, source, checksum, locked in rows
    ]  # fmt: skip


def exercise_of(known: list[Known]) -> Exercise | None:
    """Return the exercise whose points the released notebook's cells hold.

    It is None if the cells belong to no exercise or to several.
    """
    stages = {cell.stage for cell in known if cell.stage and cell.grade}
    ids = {stage.partition(".")[0] for stage in stages}
    return load_exercise(ids.pop()) if len(ids) == 1 else None


def _stage_named(grade_id: str) -> str | None:
    number = grade_id.partition("-")[0]
    if number not in exercise_ids():
        return None
    for stage in load_exercise(number).stages:
        if grade_id in (submitted.solution_id(stage.id), submitted.check_id(stage.id)):
            return stage.id
    return None


def write_scores(
    notebook: NotebookNode, known: list[Known], exercise: Exercise, report: GradeReport, *, reference: bool
) -> set[str]:
    """Write the report into the graded cells. `reference` says whether the reference's helpers count.

    Return the ids of cells where a check itself may be at fault.
    """
    stages, view = submitted.stages_of(known, exercise.stages), submitted.view_of(report, reference=reference)
    results = {stage.stage: stage for stage in report.stages}
    views = {stage.id: stage for stage in view.stages}
    doubtful: set[str] = set()
    for cell in notebook.cells:
        stage = stages.get(cell.metadata.get("nbgrader", {}).get("grade_id", ""))
        if stage is None:
            continue
        marks, result = cell.metadata["nbgrader"], results.get(stage.id)
        maximum = float(marks["points"])
        earned = 0.0
        if result is not None and not report.reason:
            share = result.earned_with_reference if reference else result.earned
            earned = share * maximum / max(1, result.points)
        cell.outputs, cell.execution_count = [submitted.output(earned, maximum, view, views.get(stage.id))], 1
        if result is not None and any(check.broken for check in result.checks):
            doubtful.add(marks["grade_id"])
    return doubtful


def write_foreign(notebook: NotebookNode, known: list[Known]) -> set[str]:
    """Write an output into graded cells that are not ringlab's, and return their ids.

    nbgrader gives full marks to a graded cell without an output.
    """
    foreign = set()
    for cell in notebook.cells:
        marks = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "code" and marks.get("grade") and not marks["solution"] and not cell.outputs:
            cell.outputs = [submitted.by_hand(NOT_OURS)]
            foreign.add(marks["grade_id"])
    return foreign


def _released(course: CourseDirectory, names: dict[str, str]) -> list[str]:
    """Return the Markdown cells of the instructor's own notebook."""
    path = _path(course, course.source_directory, {**names, "student": "."})
    try:
        cells = nbformat.read(path, as_version=4).cells
    except (OSError, ValueError, nbformat.reader.NotJSONError):
        return []
    return [cell.source for cell in cells if cell.cell_type == "markdown"]


def _coursedir(part: Any) -> CourseDirectory:
    """Return the course folder of the converter to which `part`, an exporter or a preprocessor, belongs."""
    while not isinstance(getattr(part, "coursedir", None), CourseDirectory):
        part = part.parent
    return part.coursedir


def _path(course: CourseDirectory, step: str, names: dict[str, str]) -> Path:
    folder = course.format_path(step, names["student"], names["assignment"])
    return Path(folder) / f"{names['notebook']}.ipynb"
