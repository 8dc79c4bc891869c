"""The record of a learner's committed guesses, hints and checks loses nothing and raises no error."""

from __future__ import annotations

import json
import multiprocessing

import pytest

from ringlab_course import check, compare, hint, predict, progress
from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.notebook import checks as notebook
from ringlab_course.notebook import predictions
from ringlab_course.notebook.progressfile import ProgressFile


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    path = tmp_path / "a new folder" / "progress.json"
    monkeypatch.setenv("RINGLAB_PROGRESS", str(path))
    monkeypatch.setattr(predictions, "_asked", {})
    return ProgressFile()


def must_be_four(subject, rng):
    if subject.call() != 4:
        raise Failure("two and two make four.", "got something else", "arithmetic")


STAGE = Stage(
    "91.four", "four", "Four", (Check("is", 1, "visible", "is four", must_be_four),), ("A?", "B", "C")
)
OTHER = Stage(
    "91.five", "five", "Five", (Check("is", 1, "visible", "is four", must_be_four),), ("A?", "B", "C")
)


@pytest.fixture
def exercise(monkeypatch):
    monkeypatch.setattr(
        notebook, "load_exercise", lambda _: Exercise("91", "91_small", "Small", (STAGE, OTHER))
    )
    monkeypatch.setattr(notebook, "exercise_ids", lambda: ("91",))


def test_a_guess_is_kept_once_and_compared(capsys, file):
    predict("91.n", "How many?", unit="GB", answer="2")
    predict("91.n", "How many?", unit="GB", answer=3)
    compare("91.n", 4)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "you predicted: 2 GB. Now run on."
    assert shown[1] == "you predicted: 2 GB."  # the second answer does not replace the first
    assert shown[2] == "measured: 4 GB (you predicted 2 GB: too low by a factor of 2)"
    assert file.get("predictions", "91.n") == {"guess": 2.0, "measured": 4.0, "locked": True}


def test_after_the_measurement_it_is_too_late_to_guess(capsys, file):
    compare("91.n", 4)
    predict("91.n", "How many?", answer=4)
    assert capsys.readouterr().out.splitlines() == [
        "measured: 4 (no prediction was made)",
        predictions.TOO_LATE,
    ]
    assert "guess" not in file.get("predictions", "91.n")


@pytest.mark.parametrize(
    ("guess", "measured", "verdict"),
    [
        (3.0, 3.2, "right"),
        (4.0, 3.2, "too high by a factor of 1.25"),
        (-1.0, 1.0, "off by 2"),
        ("P", "P - 1", "not so"),
    ],
)
def test_verdicts(capsys, guess, measured, verdict):
    choices = ["P", "P - 1"] if isinstance(guess, str) else None
    predict("91.v", "?", choices, answer=guess)
    compare("91.v", measured)
    assert capsys.readouterr().out.splitlines()[1].endswith(f": {verdict})") or verdict == "not so"


def test_the_widget_commits_and_then_rests(monkeypatch, file):
    shown = []
    monkeypatch.setattr(predictions, "is_live", lambda: True)
    monkeypatch.setattr("IPython.display.display", shown.append)
    predict("91.c", "P or P - 1?", ["P", "P - 1"])
    _, buttons, status = shown[0].children
    assert shown[0].layout.min_height == predictions.ROOM  # room for the measured value, which appears below
    buttons.children[1].click()
    assert shown[0].layout.min_height is None
    assert status.value == "you predicted: P - 1. Now run on." and buttons.children[0].disabled
    assert not buttons.children[1].disabled  # it keeps the focus, so that Shift+Enter works there
    buttons.children[1].click()
    assert file.get("predictions", "91.c") == {"guess": "P - 1"}
    predict("91.n", "How many?", unit="GB")
    _, row, status = shown[1].children
    number, _, button = row.children
    number.value = "lots"
    button.click()
    assert "give a number" in status.value and not button.disabled
    assert shown[1].layout.min_height == predictions.ROOM
    number.value = "1,000"
    button.click()
    assert file.get("predictions", "91.n") == {"guess": 1000.0} and number.disabled and not button.disabled
    predict("91.late", "How many?")
    compare("91.late", 3)
    assert shown[2].layout.min_height is None


def test_check_prints_what_is_wrong_and_never_raises(exercise, capsys, file):
    check("91.four", {"four": lambda: 5})
    out = capsys.readouterr().out
    assert "✗ is four" in out and "two and two make four." in out and "got something else" in out
    assert "0 of 1 visible checks hold" in out and "passed" not in out
    check("91.four", {"four": lambda: 4})
    assert "visible checks passed (1 of 1)" in capsys.readouterr().out
    assert file.get("checks", "91.four") == {"status": "ok", "earned": 1, "points": 1}


def test_hints_climb_three_rungs(exercise, capsys):
    for _ in range(4):
        hint("91.four")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "Hint 1 of 3, a question: A?" and out[1].endswith("B") and out[2].endswith("C")
    assert out[3] == out[2] and out[4].endswith("solutions/91_small.ipynb")
    hint("91")
    assert 'hint("91.four")' in capsys.readouterr().out


def test_the_table_of_progress(exercise, capsys, file):
    check("91.four", {"four": lambda: 4})
    hint("91.four")
    file.update("grades", "91.four", earned=1, points=3)
    predict("91.n", "?", answer=1)
    compare("91.n", 1)
    capsys.readouterr()
    progress()
    printed = capsys.readouterr().out.splitlines()
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in printed]
    assert lines[1][0] == "91" and lines[1][2:] == [
        "visible checks pass for 1 of 2 functions",
        "1 of 2",
        "1",
        "1 of 3",
    ]
    assert lines[2] == ["91.four", "visible checks pass", "1 of 1", "1", "1 of 3"]
    assert lines[3] == ["91.five", "not begun", "0 of 1", "0", "–"]
    assert lines[4] == ["predictions: 1 made and measured, 1 of them right"]


@pytest.mark.parametrize(("guess", "right"), [(44, True), (42, False), (43, False)])
def test_a_count_has_to_be_exact(capsys, guess, right):
    predict("91.messages", "?", answer=guess)
    compare("91.messages", 44)
    assert ("right" in capsys.readouterr().out) is right


@pytest.mark.parametrize("damage", ["{", '{"version": 99}', b"\xff\xfe"])
def test_a_damaged_file_is_kept_aside_and_said_so(file, capsys, damage):
    file.path.parent.mkdir()
    content = damage if isinstance(damage, bytes) else damage.encode()
    for name in ("progress.json.bak", "progress.json.bak-2"):
        file.path.write_bytes(content)
        file.update("hints", "x", rung=1)
        assert (file.path.parent / name).read_bytes() == content
        assert f"kept as {name}" in capsys.readouterr().out
        assert ProgressFile().get("hints", "x") == {"rung": 1}


def test_a_place_that_cannot_be_written_costs_no_lesson(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RINGLAB_PROGRESS", str(tmp_path / "file" / "progress.json"))
    compare("91.n", 4)
    out = capsys.readouterr().out
    assert "measured: 4 (no prediction was made)" in out and "progress was not saved" in out


def test_nothing_half_written_is_left_behind(file, monkeypatch):
    file.update("hints", "x", rung=1)
    monkeypatch.setattr(json, "dump", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("out of luck")))
    with pytest.raises(RuntimeError):
        file.update("hints", "x", rung=2)
    assert file.get("hints", "x") == {"rung": 1}
    assert sorted(p.name for p in file.path.parent.iterdir()) == ["progress.json", "progress.json.lock"]


def _write_many(worker):
    for count in range(20):
        ProgressFile().update("hints", f"{worker}.{count}", rung=1)


def test_two_notebooks_at_once_lose_nothing(file):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write_many, args=(n,)) for n in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert len(file.section("hints")) == 40
