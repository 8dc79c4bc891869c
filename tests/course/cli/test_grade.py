"""`ringlab grade` for a class and `ringlab gradebook` work as documented, with a judge that needs no sandbox.

The course's commands print one JSON object on stdout, and have the right exit statuses and helpful errors.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ringlab_course.judge
from ringlab.cli import app
from ringlab_course.gradebook.pool import Here
from ringlab_course.gradebook.store import Gradebook
from tests.cli.test_cli import ODD, flat
from tests.cli.test_cli import call as said
from tests.course.gradebook.stub import judge, read_csv, write

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ringlab_course.judge, "grade", judge, raising=False)
    monkeypatch.setattr("ringlab_course.gradebook.pool.LocalPool", lambda *_: Here(judge))
    monkeypatch.setattr("ringlab_course.judge.probe.require", lambda: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for learner, word in (("ada", "10"), ("bob", "5"), ("=cy", "0")):
        write(tmp_path / "class", learner, word)
    return tmp_path / "class"


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_without_a_book_every_report_is_told_and_the_json_has_its_keys(folder: Path) -> None:
    status, out, _ = call("grade", folder)
    assert status == 1 and "bob/05_emulated_ring.ipynb: 5 of 10 points" in out.replace("\n", "")
    assert "✗ 05.step check 2 (0 of 5)" in out and "check 2 fails" in out
    status, out, _ = call("grade", folder, "--json")
    found = json.loads(out)
    assert status == 1 and set(found) == {"ok", "submissions"} and found["ok"] is False
    by_name = {Path(each["path"]).parent.name: each for each in found["submissions"]}
    assert {
        "path",
        "exercise",
        "stages",
        "points",
        "earned",
        "ok",
        "reason",
        "notes",
        "label",
        "seed",
    } <= set(by_name["bob"])
    assert (by_name["bob"]["score"], by_name["bob"]["maximum"]) == (5, 10)
    assert [check["id"] for check in by_name["bob"]["failed_checks"]] == ["c2"]
    assert call("grade", folder / "ada", "--json")[0] == 0


def test_points_with_the_reference_helpers_are_told_and_the_book_chooses(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    def helped(*arguments, **options):
        made = judge(*arguments, **options)
        return replace(made, stages=(replace(made.stages[0], replaced=("f", "g"), earned_again=7),))

    monkeypatch.setattr(ringlab_course.judge, "grade", helped)
    monkeypatch.setattr("ringlab_course.gradebook.pool.LocalPool", lambda *_: Here(helped))
    out = call("grade", folder / "bob")[1]
    assert "7 of 10 points, 2 of them with the reference's helpers" in out.replace("\n", "")
    assert "→ 05.step: with the reference's `f` and `g`, this stage earns 7 of 10 points" in out
    assert json.loads(call("grade", folder / "bob", "--json")[1])["submissions"][0]["score"] == 7
    book = tmp_path / "grades.db"
    assert "bob  05: 7 of 10 points  (2 of these points with the reference's helpers)" in call("grade", folder, "--book", book)[1]  # fmt: skip
    assert "helpers: reference" in call("gradebook", "policy", book)[1]
    assert json.loads(call("gradebook", "policy", book, "--helpers", "own", "--json")[1])["helpers"] == "own"
    found = json.loads(call("gradebook", "show", book, "--learner", "bob", "--json")[1])["entries"][0]
    assert (found["score"], found["earned"], found["earned_with_reference"]) == (5, 5, 7)
    assert (
        "this stage would earn 7 of 10" in call("gradebook", "show", book, "--learner", "bob", "--explain")[1]
    )
    assert call("gradebook", "policy", book, "--helpers", "mine")[0] == 1


def test_a_book_is_begun_gone_on_with_and_shown(folder: Path, tmp_path: Path) -> None:
    book = tmp_path / "grades.db"
    status, out, _ = call("grade", folder, "--book", book, "--seed", 3)
    assert status == 0 and "ada  05: 10 of 10 points" in out and "3 graded, 0 had their result" in out
    write(folder, "bob", "10")
    status, out, _ = call("grade", folder, "--book", book, "--json")
    found = json.loads(out)
    assert status == 0 and (found["ok"], found["graded"], found["kept"], found["stopped"]) == (
        True,
        1,
        2,
        False,
    )
    assert [(each["learner"], each["score"], each["maximum"]) for each in found["submissions"]] == [
        ("=cy", 0, 10),
        ("ada", 10, 10),
        ("bob", 10, 10),
    ]
    assert len(found["submissions"][0]["failed_checks"]) == 3 and found["not_graded"] == found["notes"] == []
    status, out, _ = call("gradebook", "show", book)
    assert status == 0 and "=cy" in out and "learner" in out
    shown = json.loads(call("gradebook", "show", book, "--learner", "bob", "--history", "--json")[1])
    assert [each["score"] for each in shown["entries"]] == [5, 10]
    status, out, _ = call("gradebook", "show", book, "--learner", "bobb", "--json")
    assert status == 1 and json.loads(out)["error"]["remedy"] == "near it: bob"
    status, out, _ = call("grade", folder, "--book", book, "--seed", 4, "--json")
    assert status == 1 and "seed" in json.loads(out)["error"]["needed"]


def test_what_could_not_be_graded_is_told_and_is_no_zero(folder: Path, tmp_path: Path) -> None:
    write(folder, "bob", "bug")
    book = tmp_path / "grades.db"
    status, out, _ = call("grade", folder, "--book", book)
    assert status == 1 and "bob  05: not graded: ZeroDivisionError" in out and "1 could not be graded" in out
    assert "bob  05: not graded, 1 times" in call("gradebook", "show", book)[1]
    assert [
        row["score"] for row in read_csv(call("gradebook", "export", book)[1]) if row["learner"] == "bob"
    ] == [""]


def test_regrading_needs_a_book_and_an_exercise_that_is_there(folder: Path, tmp_path: Path) -> None:
    book = tmp_path / "grades.db"
    assert call("grade", folder, "--regrade", "05")[0] == 1
    call("grade", folder, "--book", book)
    assert "there are: 05" in call("grade", folder, "--book", book, "--regrade", "06")[2]
    assert "3 graded" in call("grade", folder, "--book", book, "--regrade", "05")[1]
    assert len(Gradebook(book).history("ada", "05")) == 2


def test_files_are_written_with_and_without_a_book(folder: Path, tmp_path: Path) -> None:
    csv, file = tmp_path / "grades.csv", tmp_path / "grades.json"
    status, out, _ = call("grade", folder, "--csv", csv, "--json-file", file)
    assert status == 0 and "ada  05: 10 of 10 points" in out
    assert [row["learner"] for row in read_csv(csv.read_text())] == ["=cy", "ada", "bob"]
    assert '"\'=cy"' in csv.read_text() and len(json.loads(file.read_text())["entries"]) == 3
    assert not list(tmp_path.glob("*.db"))
    book = tmp_path / "grades.db"
    call("grade", folder, "--book", book)
    other = tmp_path / "other.csv"
    assert call("gradebook", "export", book, "--csv", other)[0] == 0
    assert [row["score"] for row in read_csv(other.read_text())] == ["0", "10", "5"]


def test_explaining_says_message_mistake_and_hint(folder: Path, tmp_path: Path) -> None:
    call("grade", folder, "--book", tmp_path / "grades.db")
    status, out, _ = call("gradebook", "show", tmp_path / "grades.db", "--explain")
    assert (
        status == 0
        and "check 2 fails" in out
        and "[averages_blocks]" in out
        and "→ hint 1 of 3, a question" in out
    )


def test_an_interrupted_run_says_so_keeps_what_it_has_and_goes_on(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    class Interrupted(Here):
        def run(self, jobs, started):
            for count, outcome in enumerate(super().run(jobs, started)):
                if count == 2:
                    raise KeyboardInterrupt
                yield outcome

    book = tmp_path / "grades.db"
    with monkeypatch.context() as patch:
        patch.setattr("ringlab_course.gradebook.pool.LocalPool", lambda *_: Interrupted(judge))
        status, out, _ = call("grade", folder, "--book", book, "--json")
        found = json.loads(out)
        assert status == 130 and found["stopped"] and not found["ok"] and found["graded"] == 2
        assert call("grade", folder)[0] == 130
    assert "1 graded, 2 had their result" in call("grade", folder, "--book", book)[1]


def test_a_folder_without_notebooks_is_no_success(tmp_path: Path) -> None:
    for words in ((), ("--book", tmp_path / "grades.db")):
        status, _, err = call("grade", tmp_path, *words)
        assert status == 1 and "no notebooks found there" in err


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    write(tmp_path / "class", "a\x1b[2J[red]", "5")
    for words in ((), ("--book", tmp_path / "grades.db"), ("--csv", tmp_path / "grades.csv")):
        _, out, err = call("grade", tmp_path / "class", *words)
        assert "\x1b[2J" not in out + err and "[red]" in out
    assert "\x1b[2J" not in call("gradebook", "show", tmp_path / "grades.db")[1]


def test_patience_reaches_the_judge_with_a_book_and_without(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    heard: list[float] = []

    def listening(*paths: object, patience: float, **how: object) -> object:
        heard.append(patience)
        return judge(*paths, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(ringlab_course.judge, "grade", listening)
    monkeypatch.setattr("ringlab_course.gradebook.pool.LocalPool", lambda *_: Here(listening))
    call("grade", folder, "--patience", "2.5")
    call("grade", folder, "--book", tmp_path / "grades.db", "--patience", "2.5")
    assert heard == [2.5] * 6


def test_grading_ones_own_exercise_is_kept_as_progress(monkeypatch, tmp_path: Path) -> None:
    import ringlab.checkout as checkout
    import ringlab_course.judge as judge
    from ringlab_course.checking.reports import CheckReport, StageReport
    from ringlab_course.judge.judge import GradeReport

    def graded(path, only, **options):
        right, wrong = (CheckReport(str(ok), "t", "visible", 2, ok) for ok in (True, False))
        return GradeReport(str(path), "05", (StageReport("05.step", "wrong", (right, wrong)),), 4)

    monkeypatch.setattr(judge, "grade", graded, raising=False)
    monkeypatch.setattr(checkout, "find_checkout", lambda: tmp_path)
    mine, theirs = tmp_path / "exercises" / "05.ipynb", tmp_path / "submitted" / "05.ipynb"
    for path in (mine, theirs):
        path.parent.mkdir()
        path.touch()
    said("grade", str(theirs))
    assert json.loads(said("progress", "--json")[1])["grades"] == {}
    status, out, _ = said("grade", str(mine))
    assert status == 1 and "2 of 4 points" in out
    assert json.loads(said("progress", "--json")[1])["grades"] == {"05.step": {"earned": 2, "points": 4}}
    assert "2 of 4" in said("progress")[1]


@pytest.mark.needs_bwrap
def test_a_book_that_cannot_be_written_is_shown(folder: Path, tmp_path: Path) -> None:
    (place := tmp_path / "a ? place").mkdir()
    book = place / "grades.db"
    call("grade", folder, "--book", book)
    killed = place / "killed.db"
    with Gradebook(book, create=False) as grades:
        grades.override("ada", "05", 3, "as seen", "prof")
        for suffix in ("", "-wal", "-shm"):  # the files of a gradebook whose grading run was killed
            shutil.copy(f"{book}{suffix}", f"{killed}{suffix}")

    def confined(*words: object) -> subprocess.CompletedProcess[str]:
        command = [
            "bwrap",
            "--bind",
            "/",
            "/",
            "--dev",
            "/dev",
            "--ro-bind",
            place,
            place,
            sys.executable,
            "-m",
            "ringlab",
        ]
        return subprocess.run([*map(str, (*command, *words))], capture_output=True, text=True, cwd=CHECKOUT)

    for path in (book, killed):
        shown = confined("gradebook", "show", path, "--json")
        scores = {each["learner"]: each["score"] for each in json.loads(shown.stdout)["entries"]}
        assert scores["ada"] == 3, (path, shown)
    for words in (
        ("gradebook", "override", book, "ada", "05", 9, "--reason", "x"),
        ("grade", folder, "--book", book),
    ):
        refused = confined(*words, "--json")
        error = json.loads(refused.stdout)["error"]
        assert error["needed"] == "a gradebook that can be written" and error["remedy"], refused


@pytest.mark.parametrize(
    "words",
    [
        ("gradebook", "policy", "book", "--due", ODD),
        ("gradebook", "show", "book", "--learner", ODD + "?"),
        ("lab", "preflight", "--transport", ODD),
        ("exercise", "fresh", ODD),
        ("bench", "all", "--output", "new", "--only", ODD),
    ],
    ids=" ".join,
)
def test_an_error_shows_a_text_of_the_user_as_it_is(words, folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder.parent)
    call("grade", folder, "--book", "book")
    status, out, err = call(*words)
    assert status in (1, 2) and flat(ODD) in flat(out + err)
