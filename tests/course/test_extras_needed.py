"""If an extra or Triton is missing, a lesson ends with the command to type, and the judge with an error.

If everything is required, the notebook of the lesson fails instead of being left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ringlab.errors import CourseError
from ringlab_course.builder.build import find_root
from ringlab_course.checking import requirements
from ringlab_course.checking.requirements import Stop

ROOT = find_root()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that no extra is installed."""
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)


def test_where_all_is_installed_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: object())
    requirements.needs_extra("jax")
    requirements.needs_triton()
    requirements.require_triton()
    assert requirements.extra_is_missing("jax") == ""


def test_half_of_an_extra_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: None if name == "jaxlib" else object())
    assert requirements.extra_is_missing("jax").startswith("jaxlib not installed")


def test_the_command_installs_the_locked_extra_of_pyproject(without: None) -> None:
    told = requirements.extra_is_missing("jax")
    (lock, extra) = re.findall(r"pip install -c (\S+) -e '\.\[(\w+)\]'", told)[0]
    assert (ROOT / lock).exists() and extra in PROJECT["optional-dependencies"]


@pytest.mark.parametrize(
    ("need", "told"), [("needs_extra('jax')", "pip install"), ("needs_triton()", "ends here")]
)
def test_a_notebook_ends_with_a_sentence_and_no_traceback(
    without: None, capsys: pytest.CaptureFixture[str], need: str, told: str
) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    source = f"from ringlab_course import needs_extra, needs_triton\n{need}\nprint('went on')"
    result = InteractiveShell().run_cell(source)
    shown = capsys.readouterr().out
    assert isinstance(result.error_in_exec, Stop)
    assert told in shown and "went on" not in shown and "Traceback" not in shown


def test_a_system_without_triton_is_named(without: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.sys, "platform", "darwin")
    with pytest.raises(Stop) as stopped:
        requirements.needs_triton()
    assert "macOS" in "\n".join(stopped.value._render_traceback_())


def test_the_judge_names_what_is_missing(without: None) -> None:
    with pytest.raises(CourseError, match="Triton"):
        requirements.require_triton()


def test_an_extra_that_no_lesson_asks_for_is_an_error() -> None:
    with pytest.raises(CourseError, match="one of the extras jax"):
        requirements.needs_extra("peers")


def test_learners_do_not_get_it_and_every_check_does() -> None:
    assert not any(text.startswith("jax>") for text in PROJECT["dependencies"])
    (ours,) = (text for text in PROJECT["optional-dependencies"]["test"] if text.startswith("ringlab["))
    assert "jax" in ours.removeprefix("ringlab[").removesuffix("]").split(",")


CONFTEST = """
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "jax" else real(name, *more)
exec(compile(open({path!r}).read(), {path!r}, "exec"), globals())
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("required", "collected"), [("0", 1), ("1", 2)])
def test_its_notebook_is_left_out_only_where_not_all_is_required(
    tmp_path: Path, required: str, collected: int
) -> None:
    """The course's conftest.py leaves a notebook out if jax is missing, unless everything is required."""
    (tmp_path / "conftest.py").write_text(CONFTEST.format(path=str(ROOT / "conftest.py")))
    (tmp_path / "notebooks").mkdir()
    cell = '{{"cells": [{{"cell_type": "code", "source": "{}", "metadata": {{}}, "outputs": [], "execution_count": 1}}],'
    rest = ' "metadata": {}, "nbformat": 4, "nbformat_minor": 4}'
    for name, source in (("17_x", "needs_extra('jax')"), ("05_x", "1 + 1")):
        (tmp_path / f"notebooks/{name}.ipynb").write_text(cell.format(source) + rest)
    command = [sys.executable, "-m", "pytest", "--nbval", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "notebooks"],
        cwd=tmp_path,
        env=os.environ | {"RINGLAB_REQUIRE_ALL": required},
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(re.findall(r"<IPyNbCell", done.stdout)) == collected, done.stdout
    assert ("not run, as jax is not installed here: 17_x.ipynb" in done.stdout) == (collected == 1)
