"""Files that are no honest notebook earn what they should, and the reason is told."""

from __future__ import annotations

import os

import pytest

from ringlab_course.checking.answers import compare_with
from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.judge.judge import grade
from tests.course.judge.hostile.files import FILES
from tests.course.judge.small_contract import HINTS, marked

ALL = {name: file for group in FILES.values() for name, file in group.items()}


def _double(subject, rng) -> None:
    x = rng.standard_normal(5)
    compare_with(subject.call(x), 2 * x, bound=1e-12)


CHECK = Check("values", 5, "visible", "values", _double)
STAGE = Stage(id="90.double", function="double", title="double", hints=HINTS, checks=(CHECK,))
EXERCISE = Exercise(id="90", slug="90_small", title="small", stages=(STAGE,))


@pytest.mark.needs_bwrap
@pytest.mark.parametrize("name", ALL)
def test_a_file_earns_exactly_this_and_the_reason_is_told(tmp_path, monkeypatch, name) -> None:
    mark = f"file-{os.getpid()}-mark"
    monkeypatch.chdir(tmp_path)
    path, file = tmp_path / "handed_in.ipynb", ALL[name]
    file.make(path)
    if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
        path.write_bytes(path.read_bytes().replace(b"@MARK@", mark.encode()))
    report = grade(path, EXERCISE, timeout=60)
    checks = [check for stage in report.stages for check in stage.checks]
    told = "\n".join([report.reason, *(f"{check.message}\n{check.counterexample}" for check in checks)])
    assert (report.earned, report.points) == (file.earned, 5), told
    assert file.told in told and bool(told.strip()) == (file.earned < 5)
    assert not any(check.broken for check in checks)
    assert told.isprintable() or told.replace("\n", "").isprintable()
    assert marked(mark, tmp_path) == []


def test_every_name_is_used_once() -> None:
    assert len(ALL) == sum(map(len, FILES.values()))
