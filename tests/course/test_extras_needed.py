"""If an extra or Triton is missing, a lesson ends with the command to type, and the judge with an error.

If everything is required, the notebook of the lesson fails instead of being left out.
"""

from __future__ import annotations

import re
import tomllib

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


def test_the_judge_names_what_is_missing(without: None) -> None:
    with pytest.raises(CourseError, match="Triton"):
        requirements.require_triton()
