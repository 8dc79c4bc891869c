from __future__ import annotations

import os

import numpy as np
import pytest

from ringlab_course.checking.answers import compare_with
from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.judge import process
from ringlab_course.judge.judge import grade
from ringlab_course.judge.sandbox import Bounds
from ringlab_course.judge.session import SandboxedSubject, Session
from tests.course.judge.hostile.files import FILES
from tests.course.judge.hostile.measures import SUBMISSIONS
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


pytestmark = pytest.mark.needs_bwrap


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_memory_that_is_hidden_is_seen_or_the_answer_is_not_taken(name) -> None:
    x = np.arange(5.0)
    with Session([SUBMISSIONS[name]], ["double"], torch=False, bounds=Bounds(), seconds=20) as ours:
        try:
            measured = SandboxedSubject(ours, "double").measure(x)
        except Failure:
            assert name != "hides nothing"
            return
    assert np.array_equal(measured.answer, 2 * x)
    assert measured.peak_bytes > 60 << 20


def test_what_an_answer_itself_takes_is_not_counted_twice() -> None:
    code = "import numpy as np\ndef double(x):\n    return np.ones((2, 1 << 21)).T"
    with Session([code], ["double"], torch=False, seconds=20) as ours:
        measured = SandboxedSubject(ours, "double").measure(1)
    assert 31 << 20 < measured.peak_bytes < 36 << 20


def test_a_peak_that_is_read_once_would_be_hidden_from(monkeypatch) -> None:
    monkeypatch.setattr(process, "ROOM", 1 << 40)  # as if it were not read again with the answer
    with Session([SUBMISSIONS["computes after it is done"]], ["double"], torch=False) as ours:
        measured = SandboxedSubject(ours, "double").measure(np.arange(5.0))
    assert np.array_equal(measured.answer, 2 * np.arange(5.0)) and measured.peak_bytes < 1 << 20
