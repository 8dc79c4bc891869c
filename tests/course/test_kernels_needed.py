"""Where there is no Triton: a notebook ends with a sentence, the judge with an error that names the remedy."""

from __future__ import annotations

import pytest

from ringlab.errors import CourseError
from ringlab_course.checking import requirements


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)


def test_where_triton_is_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: object())
    requirements.needs_triton()
    requirements.require_triton()


def test_a_notebook_ends_with_a_sentence_and_no_traceback(
    without_triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements.sys, "platform", "darwin")
    with pytest.raises(requirements.Stop) as stopped:
        requirements.needs_triton()
    shown = "\n".join(stopped.value._render_traceback_())
    assert "macOS" in shown and "ends here" in shown and "Traceback" not in shown


def test_ipython_shows_the_sentence_only(without_triton, capsys: pytest.CaptureFixture[str]) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    result = shell.run_cell("from ringlab_course import needs_triton\nneeds_triton()\nprint('went on')")
    shown = capsys.readouterr().out
    assert isinstance(result.error_in_exec, requirements.Stop)
    assert "ends here" in shown and "went on" not in shown and "Traceback" not in shown


def test_the_judge_names_what_is_missing(without_triton) -> None:
    with pytest.raises(CourseError, match="Triton"):
        requirements.require_triton()
