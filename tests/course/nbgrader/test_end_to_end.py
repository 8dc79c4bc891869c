"""After nbgrader's own commands, its gradebook, feedback and CSV of a class all show the judge's verdict."""

from __future__ import annotations

import csv
import hashlib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from ringlab.cli import app
from ringlab_course.judge import grade
from tests.course.nbgrader.a_class import MARKER, SLUG, a_class

pytestmark = [pytest.mark.thorough, pytest.mark.needs_nbgrader, pytest.mark.needs_bwrap, pytest.mark.slow]


@dataclass(frozen=True)
class Course:
    folder: Path
    paths: dict[str, Path]

    def nbgrader(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "nbgrader", *arguments], cwd=self.folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    def feedback(self, learner: str) -> str:
        return (self.folder / "feedback" / learner / SLUG / f"{SLUG}.html").read_text()

    def autograded(self, learner: str) -> list[nbformat.NotebookNode]:
        path = self.folder / "autograded" / learner / SLUG / f"{SLUG}.ipynb"
        return nbformat.read(path, as_version=4).cells


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    folder = tmp_path_factory.mktemp("nbgrader") / "a course"
    for arguments in (["config"], ["release", "02"]):
        done = CliRunner().invoke(app, ["nbgrader", *arguments, "--course", str(folder)])
        assert done.exit_code == 0, done.output
    made = Course(folder, {})
    made.nbgrader("generate_assignment", SLUG)
    made.paths.update(a_class(folder))
    made.nbgrader("autograde", SLUG)
    made.nbgrader("generate_feedback", SLUG)
    made.nbgrader("export")
    return made


def scores(course: Course) -> dict[str, float]:
    with (course.folder / "grades.csv").open() as file:
        return {row["student_id"]: float(row["score"]) for row in csv.DictReader(file)}


def test_the_scores_are_those_of_the_judge(course: Course) -> None:
    judged = {learner: grade(path, "02") for learner, path in course.paths.items()}
    assert scores(course) == {learner: report.earned_with_reference for learner, report in judged.items()}
    assert scores(course) == {
        "right": 29, "rewritten": 29, "wrong": 18, "missing": 21,
        "hostile": 0, "untouched": 0, "broken": 0, "linked": 0,
    }  # fmt: skip


def test_each_stage_has_its_points_in_the_gradebook_and_nothing_waits_for_a_person(course: Course) -> None:
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{course.folder / 'gradebook.db'}") as book:
        found = book.find_submission(SLUG, "wrong").notebooks[0]
        assert {grade.name: grade.score for grade in found.grades} == {
            "02-merge-check": 0, "02-update-check": 8, "02-stream-check": 10,
        }  # fmt: skip
        assert not any(submission.needs_manual_grade for submission in book.assignment_submissions(SLUG))
        comments = book.find_submission(SLUG, "untouched").notebooks[0].comments
        assert {comment.comment for comment in comments} == {"No response."}


def test_no_submission_ran_in_nbgraders_process(course: Course) -> None:
    assert not (course.folder / MARKER).exists()


def test_the_feedback_says_what_is_wrong_which_mistake_it_is_and_gives_hints(course: Course) -> None:
    page = course.feedback("wrong")
    assert "You add the partial outputs." in page
    assert "A common mistake, called “adds”." in page
    assert "got 42.69, expected 24.21" in page
    assert "Hint 3 of 3: a line of mathematics" in page
    assert "(Score: 18.0 / 29.0)" in page
    hidden = re.findall(r"many parts, some without keys.*?</li>", page, re.DOTALL)
    assert hidden and "<pre" not in hidden[0]


def test_what_learners_write_is_shown_and_never_steers_the_page(course: Course) -> None:
    page = course.feedback("hostile")
    assert "<script>document.title" not in page and "<img src=x" not in page
    assert "&lt;script&gt;document.title" in page


@pytest.mark.parametrize(
    "learner",
    [
        "hostile",
        "missing",
        "rewritten",
    ],
)
def test_every_graded_cell_is_there_once_as_released_and_has_an_output(course: Course, learner: str) -> None:
    graded = [c for c in course.autograded(learner) if c.metadata.get("nbgrader", {}).get("grade")]
    assert sorted(c.metadata.nbgrader.grade_id for c in graded) == [
        "02-merge-check", "02-stream-check", "02-update-check",
    ]  # fmt: skip
    for cell in graded:
        assert cell.source == f'check("02.{cell.metadata.nbgrader.grade_id.split("-")[1]}")'
        assert [output.output_type for output in cell.outputs] == ["execute_result"]


def test_what_was_handed_in_stays_as_it_was(course: Course) -> None:
    """Submitted notebooks are not changed, and a second run grades only new ones unless it is forced."""
    before = {learner: _digest(path) for learner, path in course.paths.items()}
    said = course.nbgrader("autograde", SLUG)
    assert said.count("Skipping existing assignment") == len(course.paths)
    assert {learner: _digest(path) for learner, path in course.paths.items()} == before


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
