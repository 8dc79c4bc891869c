"""A book whose results came from older checks opens, keeps its scores, and says so until they are graded again.

`older_book.sql` was written by ringlab before the course had a package of its own, with the judge of `stub`.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringlab.cli import app
from ringlab_course.gradebook.export import json_text
from ringlab_course.gradebook.pages import write_pages
from ringlab_course.gradebook.pool import Here
from ringlab_course.gradebook.runner import Run, grade_class
from ringlab_course.gradebook.store import Gradebook
from ringlab_course.gradebook.versions import Today, contract_version
from tests.course.gradebook.stub import judge, submissions, write

SCORES = {("ada", "05"): 10.0, ("ada", "06"): 10.0, ("bob", "05"): 7.0, ("cy", "05"): 0.0}
WORDS = {("ada", "05"): "10", ("ada", "06"): "10", ("bob", "05"): "5", ("cy", "05"): "0"}
NAMES = {"05": "05_emulated_ring", "06": "06_what_it_costs"}
NOTE = "graded by older checks, and kept as they are: 3 of exercise 05, 1 of exercise 06; --regrade 05 --regrade 06 grades them again"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The book, and beside it the folder `class` with the notebooks that it has results of."""
    with sqlite3.connect(tmp_path / "older.db") as book:
        book.executescript(Path(__file__).with_name("older_book.sql").read_text())
    book.close()
    for (learner, exercise), word in WORDS.items():
        write(tmp_path / "class", learner, word, NAMES[exercise])
    return tmp_path / "older.db"


def graded(book: Gradebook, folder: Path, **options) -> Run:
    return grade_class(book, submissions(folder), Here(judge), **options)


def scores(book: Gradebook) -> dict[tuple[str, str], float]:
    return {(entry.learner, entry.exercise): entry.score for entry in book.entries()}


def test_it_opens_with_all_that_it_held(path: Path) -> None:
    with Gradebook(path, create=False) as book:
        assert scores(book) == SCORES and book.class_seed == 12345
        assert [each.learner for each in book.ungraded()] == ["dan"]
        assert book.policy("05")[0].startswith("2026-11-30T23:59")
        assert "seen by the examiner" in book.entries("05", "bob")[0].override_reason
        assert all(entry.older_checks for entry in book.entries())


def missed_by(kind: type[Gradebook], path: Path) -> list[str]:
    """Return what a run into a book of this kind gets wrong."""
    with kind(path) as book:
        before = [entry.contract for entry in book.entries()]
        run = graded(book, path.parent / "class")
        wrong = []
        if (len(run.graded), len(run.kept)) != (0, 4) or [e.contract for e in book.entries()] != before:
            wrong.append("graded without being asked")
        if run.notes != [NOTE] or scores(book) != SCORES:
            wrong.append("kept in silence")
        return wrong


def test_a_run_keeps_its_results_and_says_how_to_have_new_ones(path: Path) -> None:
    assert missed_by(Gradebook, path) == []


class GradesInSilence(Gradebook):
    """Mutant: a result counts only under the very checks that gave it."""

    def is_graded(self, learner, exercise, digest, contract, submitted_at=None) -> bool:
        return self._is_kept(learner, exercise, digest, contract, submitted_at)


def test_a_book_that_grades_anew_in_silence_is_noticed(path: Path) -> None:
    assert "graded without being asked" in missed_by(GradesInSilence, path)


def test_a_book_that_keeps_in_silence_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Today, "differs", lambda *_: False)
    assert missed_by(Gradebook, path) == ["kept in silence"]


def test_only_what_is_asked_for_is_graded_again(path: Path) -> None:
    folder = path.parent / "class"
    with Gradebook(path) as book:
        run = graded(book, folder, regrade=["05"])
        assert len(run.graded) == 3 and len(run.kept) == 1
        assert run.notes == [
            "graded by older checks, and kept as they are: 1 of exercise 06; --regrade 06 grades them again"
        ]
        assert scores(book) == SCORES, "the override counts on"
        assert {entry.contract for entry in book.entries("05")} == {contract_version("05")}
        assert [entry.older_checks for entry in book.history("ada", "05")] == [True, False]
        assert graded(book, folder, regrade=["06"]).notes == []
        assert not any(entry.older_checks for entry in book.entries())


def test_a_changed_notebook_meets_todays_checks(path: Path) -> None:
    folder = path.parent / "class"
    write(folder, "cy", "5")
    with Gradebook(path) as book:
        run = graded(book, folder)
        assert [(entry.learner, entry.score) for entry in run.graded] == [("cy", 5)]
        assert book.entries("05", "cy")[0].contract == contract_version("05")
        assert "2 of exercise 05" in run.notes[0]


def test_a_result_without_a_sandbox_gives_way_to_one_with_it(path: Path) -> None:
    with sqlite3.connect(path) as file:
        file.execute("UPDATE results SET contract = contract || '+unsafe' WHERE learner = 'cy'")
    file.close()
    with Gradebook(path) as book:
        assert book.entries("05", "cy")[0].older_checks
        assert [entry.learner for entry in graded(book, path.parent / "class").graded] == ["cy"]


def test_an_exercise_that_is_gone_has_no_newer_checks(path: Path) -> None:
    assert not Today().differs("99", "99-0123456789abcdef") and not Today().differs("05", "")
    assert Today().differs("05", "05-0123456789abcdef") and not Today().differs("05", contract_version("05"))


def test_the_commands_say_so(path: Path) -> None:
    said = CliRunner().invoke(app, ["grade", str(path.parent / "class"), "--book", str(path)])
    assert said.exit_code == 0 and NOTE in said.stderr and "0 graded, 4 had their result" in said.stdout
    said = CliRunner().invoke(app, ["gradebook", "show", str(path), "--learner", "ada", "--explain"])
    assert said.stdout.count("graded by older checks") == 2
    said = CliRunner().invoke(app, ["gradebook", "show", str(path), "--json"])
    assert all(entry["older_checks"] for entry in json.loads(said.stdout)["entries"])


def test_pages_and_files_say_so_until_it_is_graded_again(path: Path) -> None:
    folder = path.parent / "class"
    with Gradebook(path) as book:
        for again, marked in ((["06"], 3), (["05"], 0)):
            graded(book, folder, regrade=again)
            entries = book.entries()
            write_pages(entries, path.parent / "pages", "Class")
            pages = path.parent / "pages"
            report, index = (pages / "class.html").read_text(), (pages / "index.html").read_text()
            assert report.count("Graded by older checks") == report.count("--regrade 05") == min(marked, 1)
            assert "--regrade 06" not in report
            assert index.count('<span class="marks quiet">V</span>') + index.count("O V</span>") == marked
            assert sum(e["older_checks"] for e in json.loads(json_text(entries))["entries"]) == marked
