"""The course's commands: one JSON object on stdout, exit statuses, and errors that help."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.test_cli import call


def test_an_unknown_exercise_is_an_error_with_the_remedy_and_status_1() -> None:
    status, out, err = call("exercise", "fresh", "77", "--json")
    assert status == 1 and json.loads(out)["ok"] is False and "needed" in err


def test_the_lessons_are_listed() -> None:
    status, out, _ = call("exercise", "list", "--json")
    assert status == 0 and [each["id"] for each in json.loads(out)["lessons"]][:2] == ["00", "01"]


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
    call("grade", str(theirs))
    assert json.loads(call("progress", "--json")[1])["grades"] == {}
    status, out, _ = call("grade", str(mine))
    assert status == 1 and "2 of 4 points" in out
    assert json.loads(call("progress", "--json")[1])["grades"] == {"05.step": {"earned": 2, "points": 4}}
    assert "2 of 4" in call("progress")[1]
