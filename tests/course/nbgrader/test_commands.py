"""`ringlab nbgrader` writes the files it announces, overwrites no work, and names the extra if it is missing."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ringlab.cli import app
from ringlab.errors import CourseError
from ringlab_course import check
from ringlab_course.nbgrader.course import CONFIG

SOURCE = Path("source") / "02_online_softmax" / "02_online_softmax.ipynb"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["nbgrader", *arguments])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that nbgrader is installed, since neither command uses it."""
    monkeypatch.setattr("ringlab_course.nbgrader.require_nbgrader", lambda: None)


@pytest.mark.usefixtures("installed")
def test_the_configuration_is_written_once_and_a_foreign_one_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "course" / "nbgrader_config.py"
    assert run("config", "--course", str(path.parent)).exit_code == 0
    assert path.read_text() == CONFIG == run("config", "--show").stdout
    mine = CONFIG + "c.CourseDirectory.course_id = 'ring'\n"
    path.write_text(mine)
    assert run("config", "--course", str(path.parent)).exit_code == 0 and path.read_text() == mine
    path.write_text("c = get_config()\n")
    refused = run("config", "--course", str(path.parent), "--json")
    assert refused.exit_code == 1 and path.read_text() == "c = get_config()\n"
    assert "ringlab nbgrader config --show" in json.loads(refused.stdout)["error"]["remedy"]


@pytest.mark.usefixtures("installed")
def test_exercises_are_written_and_an_edited_one_is_never_overwritten(tmp_path: Path) -> None:
    done = run("release", "02", "05", "--course", str(tmp_path), "--json")
    assert done.exit_code == 0
    paths = json.loads(done.stdout)["paths"]
    assert paths[0] == str(tmp_path / SOURCE) and len(paths) == 2
    first = (tmp_path / SOURCE).read_bytes()
    assert run("release", "02", "--course", str(tmp_path)).exit_code == 0
    assert (tmp_path / SOURCE).read_bytes() == first
    notebook = json.loads(first)
    notebook["cells"][0]["source"] = "# My own title"
    (tmp_path / SOURCE).write_text(json.dumps(notebook))
    refused = run("release", "05", "02", "--course", str(tmp_path))
    assert refused.exit_code == 1 and json.loads((tmp_path / SOURCE).read_text()) == notebook


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["99", "../02"])
def test_an_exercise_that_does_not_exist_is_refused(tmp_path: Path, name: str) -> None:
    assert run("release", name, "--course", str(tmp_path)).exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_without_nbgrader_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for arguments in (["config"], ["release", "02"]):
        refused = run(*arguments, "--course", str(tmp_path))
        assert refused.exit_code == 1 and "ringlab[nbgrader]" in refused.output
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_nbgrader_runs_itself_raises_as_silence_is_full_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without ringlab's settings a check raises an error that names them: everybody gets zero points and the reason.

    nbgrader gives full marks to a check that raises no error.
    """
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    with pytest.raises(CourseError, match="ringlab nbgrader config"):
        check("02.merge", {})


@pytest.mark.usefixtures("installed")
def test_what_the_manual_says_to_type_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manual = (Path(__file__).resolve().parents[3] / "docs/nbgrader.md").read_text()
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^ringlab nbgrader (.*)$", manual, re.MULTILINE)
    assert len(lines) == 2 and all(run(*line.split()).exit_code == 0 for line in lines)
    named = set(re.findall(r"`(source/[^`]+)`|`(\w+/nbgrader_config.py)`", manual))
    assert named == {
        ("source/05_emulated_ring/05_emulated_ring.ipynb", ""),
        ("", "course101/nbgrader_config.py"),
    }
    assert all(
        (tmp_path / "course101" / source).exists() and (tmp_path / config).exists()
        for source, config in named
    )
