"""Memory that is hidden from its measure is seen, or the answer is not taken."""

from __future__ import annotations

import numpy as np
import pytest

from ringlab_course.checking.failures import Failure
from ringlab_course.judge import process
from ringlab_course.judge.sandbox import Bounds
from ringlab_course.judge.session import SandboxedSubject, Session
from tests.course.judge.hostile.measures import SUBMISSIONS

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
