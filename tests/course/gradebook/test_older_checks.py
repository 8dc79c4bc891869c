"""A gradebook with results of older checks keeps their scores, and reports them until they are regraded."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from ringlab_course.gradebook.pool import Here
from ringlab_course.gradebook.runner import Run, grade_class
from ringlab_course.gradebook.store import Gradebook
from ringlab_course.gradebook.versions import contract_version
from tests.course.gradebook.stub import judge, submissions, write

WORDS = {("ada", "05"): "10", ("ada", "06"): "10", ("bob", "05"): "5", ("cy", "05"): "0"}
SCORES = {("ada", "05"): 10.0, ("ada", "06"): 10.0, ("bob", "05"): 7.0, ("cy", "05"): 0.0}
NAMES = {"05": "05_emulated_ring", "06": "06_what_it_costs"}
NOTE = "graded by older checks, and kept as they are: 3 of exercise 05, 1 of exercise 06; --regrade 05 --regrade 06 grades them again"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a gradebook with results of older checks.

    The graded notebooks are in the folder `class` in the same place.
    """
    for (learner, exercise), word in WORDS.items():
        write(tmp_path / "class", learner, word, NAMES[exercise])
    with Gradebook(tmp_path / "older.db") as book:
        graded(book, tmp_path / "class")
        book.override("bob", "05", 7, "seen by the examiner", "X")
    changed(tmp_path / "older.db", "UPDATE results SET contract = exercise || '-0123456789abcdef'")
    return tmp_path / "older.db"


def changed(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as file:
        file.execute(statement)
    file.close()


def graded(book: Gradebook, folder: Path, **options) -> Run:
    return grade_class(book, submissions(folder), Here(judge), **options)


def scores(book: Gradebook) -> dict[tuple[str, str], float]:
    return {(entry.learner, entry.exercise): entry.score for entry in book.entries()}


def test_a_run_keeps_its_results_and_says_how_to_have_new_ones(path: Path) -> None:
    with Gradebook(path) as book:
        before = [entry.contract for entry in book.entries()]
        run = graded(book, path.parent / "class")
        assert (len(run.graded), len(run.kept)) == (0, 4) and [e.contract for e in book.entries()] == before
        assert run.notes == [NOTE] and scores(book) == SCORES


def test_only_what_is_asked_for_or_was_changed_is_graded_again(path: Path) -> None:
    folder = path.parent / "class"
    with Gradebook(path) as book:
        assert len(graded(book, folder, regrade=["06"]).graded) == 1
        write(folder, "cy", "5")
        run = graded(book, folder)
        assert [(entry.learner, entry.score) for entry in run.graded] == [("cy", 5)]
        assert book.entries("05", "cy")[0].contract == contract_version("05")
        assert "2 of exercise 05;" in run.notes[0]
        assert graded(book, folder, regrade=["05"]).notes == []
        assert [entry.older_checks for entry in book.history("ada", "05")] == [True, False]
        assert scores(book) == {**SCORES, ("cy", "05"): 5.0}, "the override still counts"
        assert not any(entry.older_checks for entry in book.entries())


def test_a_result_without_a_sandbox_gives_way_to_one_with_it(path: Path) -> None:
    changed(path, "UPDATE results SET contract = contract || '+unsafe' WHERE learner = 'cy'")
    with Gradebook(path) as book:
        assert book.entries("05", "cy")[0].older_checks
        assert [entry.learner for entry in graded(book, path.parent / "class").graded] == ["cy"]
