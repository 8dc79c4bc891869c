"""nbgrader's converters work with ringlab's in this process. A stand-in for the judge returns fixed reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest

from ringlab.errors import SandboxError
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.reports import CheckReport, StageReport
from ringlab_course.judge.judge import UNSAFE, GradeReport
from ringlab_course.nbgrader.course import CONFIG, release
from tests.course.nbgrader.a_class import SLUG, code, hand_in, text

pytestmark = pytest.mark.needs_nbgrader
GRADES = ("02-merge-check", "02-update-check", "02-stream-check")
FORGED = "<script>alert('&')</script>"


def a_report(earned: dict[str, int], **fields: Any) -> GradeReport:
    """Return a report with two checks per stage: one passes and gives the points earned, the other fails."""
    exercise = load_exercise("02")
    stages = []
    for stage in exercise.stages:
        held = earned.get(stage.id, 0)
        missed = CheckReport(
            "b", "title of b", "visible", stage.points - held, False, f"message {FORGED}", FORGED, "a_mistake",
            broken="broken" in fields,
        )  # fmt: skip
        checks = (CheckReport("a", "title of a", "visible", held, True), missed)
        stages.append(StageReport(stage.id, "wrong", checks))
    fields.pop("broken", None)
    return GradeReport("x.ipynb", "02", tuple(stages), exercise.points, **fields)


def own_cells(cells: list[dict[str, Any]]) -> None:
    """Double a stage's points, and add a test and a question to answer in words, as an instructor might."""
    for cell in cells:
        if cell["metadata"].get("nbgrader", {}).get("grade_id") == "02-update-check":
            cell["metadata"]["nbgrader"]["points"] = 16
    marks = {"schema_version": 3, "task": False, "points": 5, "grade": True}
    cells.append(code("assert True") | {"id": "own-test"})
    cells[-1]["metadata"]["nbgrader"] = {**marks, "grade_id": "own", "locked": True, "solution": False}
    cells.append(text("Why?") | {"id": "own-essay"})
    cells[-1]["metadata"]["nbgrader"] = {**marks, "grade_id": "essay", "locked": False, "solution": True}


def answered(notebook: dict[str, Any], course: Path) -> None:
    notebook["cells"][-1]["source"] = f"Because. {FORGED}"


class Folder:
    """A course folder in which exercise 02 is released, with some cells that the instructor has added."""

    def __init__(self, root: Path) -> None:
        from nbgrader.converters import GenerateAssignment
        from nbgrader.coursedir import CourseDirectory
        from traitlets.config import Config

        self.root, self.config = root, Config()
        exec(CONFIG, {"get_config": lambda: self.config})
        self.config.Judged.unsafe = True
        self.config.Judged.patience = 2.5
        [source] = release(("02",), root)
        notebook = json.loads(source.read_text())
        own_cells(notebook["cells"])
        source.write_text(json.dumps(notebook))
        self.course = CourseDirectory(config=self.config, root=str(root), assignment_id=SLUG)
        GenerateAssignment(coursedir=self.course, config=self.config).start()

    def autograde(self, judge: Callable[..., GradeReport], learner: str = "*") -> None:
        from nbgrader.converters import Autograde

        self.course.student_id = learner
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ringlab_course.nbgrader.converters.grade", judge)
            Autograde(coursedir=self.course, config=self.config).start()

    def grades(self, learner: str) -> dict[str, tuple[float | None, bool]]:
        from nbgrader.api import Gradebook

        with Gradebook(self.course.db_url) as book:
            [notebook] = book.find_submission(SLUG, learner).notebooks
            return {grade.name: (grade.auto_score, grade.needs_manual_grade) for grade in notebook.grades}

    def cells(self, learner: str) -> dict[str, nbformat.NotebookNode]:
        path = self.root / "autograded" / learner / SLUG / f"{SLUG}.ipynb"
        found = nbformat.read(path, as_version=4).cells
        return {c.metadata["nbgrader"]["grade_id"]: c for c in found if "nbgrader" in c.metadata}

    def said(self, learner: str) -> str:
        """Return the output of the first stage's cell."""
        [output] = self.cells(learner)["02-merge-check"].outputs
        return str(output.data["text/html"])


REPORTS = {
    "ada": a_report({"02.merge": 7, "02.update": 8}, label=UNSAFE),
    "interferes": a_report({"02.merge": 7}, reason=f"interfered {FORGED}"),
    "doubtful": a_report({"02.merge": 7}, broken=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Yield a course folder in which three learners were graded with REPORTS."""
    made = Folder(tmp_path_factory.mktemp("course"))
    paths = {hand_in(made.root, learner, answered): learner for learner in REPORTS}

    def judge(path: Path, exercise: Any, **options: Any) -> GradeReport:
        assert (exercise.id, options) == ("02", {"unsafe": True, "patience": 2.5})
        return REPORTS[paths[path]]

    made.autograde(judge)
    return made


def test_what_was_earned_is_written_in_words_that_are_escaped(folder: Folder) -> None:
    assert folder.grades("ada")["02-merge-check"] == (7, False)
    page = folder.said("ada")
    assert "7 of 11 points" in page and "called “a mistake”" in page and "Hint 1 of 3" in page
    assert "WITHOUT a sandbox" in page
    assert "<script" not in page and page.count("&lt;script&gt;") == 2


@pytest.mark.parametrize(("reference", "points"), [(True, 9.0), (False, 4.0)])
def test_points_with_the_reference_helpers_count_by_choice(reference: bool, points: float) -> None:
    from ringlab_course.nbgrader.converters import write_scores
    from ringlab_course.nbgrader.submitted import Known

    known = [Known("02-stream-check", "code", "", grade=True, points=10.0, stage="02.stream")]
    report = a_report({"02.stream": 4})
    stages = [replace(s, replaced=("merge",), earned_again=9) if s.stage == "02.stream" else s for s in report.stages]  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=[known[0].cell("")])
    helped = replace(report, stages=tuple(stages))
    write_scores(notebook, known, load_exercise("02"), helped, reference=reference)
    [output] = notebook.cells[0].outputs
    assert float(output.data["text/plain"]) == points
    verb = "earns" if reference else "would earn"
    assert f"<code>merge</code>, this stage {verb} 9 of 10 points." in output.data["text/html"]


def test_nothing_counts_where_there_is_a_reason(folder: Folder) -> None:
    grades = folder.grades("interferes")
    assert [grades[name] for name in GRADES] == [(0, False)] * 3
    assert "nterfered &lt;script&gt;" in folder.said("interferes")


def test_a_check_that_is_at_fault_itself_waits_for_a_person(folder: Folder) -> None:
    assert folder.grades("doubtful")["02-merge-check"] == (7, True)
    assert "may be at fault" in folder.said("doubtful")


def test_cells_of_the_instructors_own_are_graded_by_a_person(folder: Folder) -> None:
    """A person grades the instructor's cells, because no code runs here and nbgrader gives silent tests full marks."""
    grades, cells = folder.grades("ada"), folder.cells("ada")
    assert grades["own"] == (0, True) and grades["essay"] == (None, True)
    assert cells["essay"].source == f"```text\nBecause. {FORGED}\n```"
    assert "grade it by hand" in cells["own"].outputs[0].evalue


def test_nobody_gets_a_zero_where_there_is_no_sandbox(folder: Folder) -> None:
    from nbgrader.converters.base import NbGraderException

    def refuses(*_: Any, **__: Any) -> GradeReport:
        raise SandboxError("bubblewrap", "none", "install it")

    hand_in(folder.root, "unlucky", answered)
    with pytest.raises(NbGraderException):
        folder.autograde(refuses, "unlucky")
    assert set(folder.grades("unlucky").values()) == {(None, True)}
    assert not (folder.root / "autograded" / "unlucky" / SLUG).exists()


def test_where_ours_cannot_be_imported_nbgrader_stops_and_runs_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbgrader.converters import Autograde
    from traitlets import TraitError

    monkeypatch.setitem(sys.modules, "ringlab_course.nbgrader.converters", None)
    with pytest.raises((ImportError, TraitError)):
        Autograde(coursedir=folder.course, config=folder.config).start()
