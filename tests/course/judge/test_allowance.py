"""Each tier has its own limit of processor time, so one tier that uses up its limit leaves the others theirs.

Each rank's work is counted as well: as multiplications in the notebook, and as processor time by the judge.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from ringlab.errors import SandboxError
from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.checking.failures import Crashed
from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.checking.loading import load_stage
from ringlab_course.judge import allowance, deadline, judge
from ringlab_course.judge.allowance import UnreadableAnswer, reading
from ringlab_course.judge.deadline import Deadline
from ringlab_course.judge.judge import grade
from ringlab_course.judge.process import Overdue
from ringlab_course.judge.session import SandboxedSubject, Session
from tests.course.judge.small_contract import HINTS, notebook

pytestmark = pytest.mark.needs_bwrap

CODE = """
import os, time
def computes(seconds):
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        pass
    return 1
def sleeps(seconds):
    time.sleep(seconds)
    return 1
def by_a_thread(seconds):
    import threading
    def work():
        begin = time.thread_time()
        while time.thread_time() - begin < seconds:
            pass
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return 1
"""


def calls(*seconds: float):
    def run(subject, rng):
        for each in seconds:
            subject.call(each)

    return run


def exercise(function: str, *checks: Check) -> Exercise:
    stage = Stage("90.slow", function, "slow", checks, HINTS)
    return Exercise("90", "90_slow", "slow", (stage,))


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    monkeypatch.setattr(allowance, "SECONDS", {"visible": 0.5, "stress": 30.0, "held-out": 30.0})


FOUR = (
    Check("first", 1, "visible", "t", calls(0.01, 0.8)),
    Check("second", 1, "visible", "t", calls(0.01)),
    Check("large", 1, "stress", "t", calls(0.01, 0.8, 0.01)),
    Check("hidden", 1, "held-out", "t", calls(0.01)),
)


@pytest.mark.thorough
@pytest.mark.parametrize("function", ["by_a_thread"])
def test_a_tier_that_has_used_up_its_seconds_is_not_run_on_and_the_next_begins_anew(
    tmp_path, function
) -> None:
    report = grade(notebook(tmp_path, CODE, grade="90.slow"), exercise(function, *FOUR), timeout=60)
    checks = {check.id: check for check in report.stages[0].checks}
    assert [check.ok for check in checks.values()] == [True, False, True, True]
    assert "visible checks of one function may take 0.5 s of computing" in checks["second"].message


def test_patience_multiplies_what_a_tier_may_compute(tmp_path) -> None:
    path = notebook(tmp_path, CODE, grade="90.slow")
    assert grade(path, exercise("computes", *FOUR), timeout=60, patience=20.0).ok


def test_what_an_ended_worker_computed_still_counts_and_loading_does_not() -> None:
    slow_to_load = CODE + "\nwaste = computes(0.8)\n"
    with Session([slow_to_load], ["computes"], torch=False, seconds=60) as session:
        session.allowance.begin("visible")
        for seconds in (0.01, 0.8):  # the second call would be refused if loading counted
            SandboxedSubject(session, "computes").call(seconds)
        session.discard(session._loaded[0])
        with pytest.raises(Crashed, match="Not run: the visible checks"):
            SandboxedSubject(session, "computes").call(0.01)


SOURCE = """
import torch
def ring_forward(ring, x):
    (arrived,) = ring.shift(x)
    for _ in range(200 * ring.rank):
        y = ring.compute("product", torch.matmul, x, arrived)
    return arrived
"""


def shards() -> list[torch.Tensor]:
    return [torch.ones(1, 1, 128, 128)] * 3


def test_products_of_each_rank_are_counted_in_the_notebook() -> None:
    space: dict = {}
    exec(SOURCE.replace("200 *", ""), space)
    outcome, efforts = InProcessSubject(load_stage("21.forward"), space).efforts(3, shards())
    assert len(outcome.results) == 3
    assert efforts == [0, 2 * 128**3, 2 * 2 * 128**3]


@pytest.mark.needs_bwrap
def test_the_processors_time_of_each_rank_is_read_from_outside() -> None:
    with Session([SOURCE.replace('ring.compute("product", torch.matmul, x, arrived)', "x @ arrived")], ["ring_forward"], torch=True) as session:  # fmt: skip
        subject = SandboxedSubject(session, "ring_forward")
        runs = [subject.efforts(3, shards())[1] for _ in range(4)][1:]
        # The least time of each rank over all runs, because the clock may add interrupts and switches between
        # processes.
        idle, _, busy = map(min, zip(*runs, strict=True))
        assert 0 <= idle < busy / 2
        assert sum(run[2] for run in runs) < sum(worker.computed() for worker in session.workers(3))


def test_an_answer_that_takes_the_judge_too_long_is_the_submissions_fault() -> None:
    with pytest.raises(UnreadableAnswer, match=r"more than 0.1 s to read"), reading(0.1):
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))
    with reading(0.1):
        time.sleep(0.3)  # waiting does not count as reading
    sum(range(10**6))  # no exception is raised after the reading


PROFILED = """
import contextlib, sys
from ringlab_course.judge.allowance import UnreadableAnswer, reading
with reading():
    pass
with contextlib.suppress(UnreadableAnswer), reading(0.1):
    while True:
        pass
sys.setprofile(lambda *_: None)
(lambda: None)()
"""


def test_after_the_judge_has_read_an_answer_a_profiled_call_returns() -> None:
    """A profiled call, as in check(), does not hang in CPython on an exception that the judge has withdrawn."""
    subprocess.run([sys.executable, "-c", PROFILED], timeout=60, check=True)


def test_an_answer_that_takes_the_judge_too_much_memory_is_the_submissions_fault() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    for make in (lambda: np.ones(1 << 27), lambda: [0] * (1 << 27), lambda: torch.ones(1 << 28)):
        with pytest.raises(UnreadableAnswer, match=r"0.25 GiB of memory to read"), reading(nbytes=1 << 28):
            make()
    with reading(nbytes=1 << 28), reading(nbytes=1 << 20):
        np.ones(1 << 22)  # the outer bound counts
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_check_is_not_to_blame_for_what_it_cannot_digest(tmp_path, monkeypatch) -> None:
    """If a check takes too long over a huge answer, the submission is blamed, and the next check runs."""
    monkeypatch.setattr(judge, "READING_S", 0.2)

    def unfold(subject, rng):
        list(range(int(subject.call(0)[0])))

    checks = (
        Check("huge", 1, "visible", "t", unfold),
        Check("small", 1, "visible", "t", lambda subject, rng: subject.call(0)),
    )
    source = "import numpy as np\ndef runs(x): return np.full((100_000, 3), 10**15)[:, 0]"
    report = grade(notebook(tmp_path, source, grade="90.slow"), exercise("runs", *checks))
    huge, small = report.stages[0].checks
    assert "too large" in huge.message and not huge.broken and small.ok


def test_after_a_call_that_hung_the_next_ones_have_less_time() -> None:
    with Session([], [], torch=False, seconds=20) as session:
        for seconds in (20, 10, 5, 5):
            assert session.call_seconds == seconds
            assert f"within {seconds} s" in session.lost("`f`", Overdue("an answer in time", "none")).message


@pytest.fixture
def busy():
    """Yield a session of one worker on a processor that six other processes use. Calls may take a second."""
    core = min(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(other.wait)
            stack.callback(other.kill)
            os.sched_setaffinity(other.pid, {core})
        session = stack.enter_context(Session([CODE], ["computes", "sleeps"], torch=False, seconds=1.0))
        (worker,) = session.workers(1)
        os.sched_setaffinity(worker.pid, {core})
        yield session


def test_waiting_for_a_processor_is_not_taken_from_a_calls_seconds(busy: Session) -> None:
    assert SandboxedSubject(busy, "computes").call(0.6) == 1


@pytest.mark.parametrize(
    "function",
    [
        "computes",
    ],
)
def test_on_a_busy_machine_a_call_without_end_ends(busy: Session, function: str) -> None:
    with pytest.raises(Crashed, match="did not end within 1 s"):
        SandboxedSubject(busy, function).call(1e6)


def test_where_the_machine_is_too_busy_nothing_is_graded(
    busy: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "BUSY", 0.5)
    with pytest.raises(SandboxError, match="the machine was busy"):
        SandboxedSubject(busy, "computes").call(0.9)


def test_a_deadline_is_put_off_by_the_time_without_a_processor_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waited, computed = [100.0], [7.0], [3.0]
    monkeypatch.setattr(deadline.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(deadline.os, "cpu_count", lambda: 2)
    whole = Deadline(25.0, lambda: waited[0])
    each = Deadline(10.0, lambda: waited[0], lambda: computed[0], whole)
    now[0], waited[0] = 109.0, 15.0
    assert each.left() == 1.0
    now[0] = 112.0
    assert each.left() == 6.0 and not each.over
    now[0] = 118.0
    assert each.over and not whole.over
    now[0], waited[0] = 120.0, 30.0
    assert each.left() == 5.0, "a check has no more time than the whole run"
    now[0] = 126.0
    assert each.left() == 7.0
    # 20 s of CPU time have been used since the start. Two processors cannot use more in 10 s.
    now[0], waited[0], computed[0] = 134.0, 99.0, 23.0
    assert each.over and whole.left() == 14.0
