"""The judge limits the sums over all ranks and child processes, because limits on single processes do not
bound sums.

Other tests grade exercises with faults that only the judge can see, because the judge is the network and
reads memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringlab_course.checking.failures import Crashed
from ringlab_course.checking.loading import load_stage
from ringlab_course.checking.reports import run_stage
from ringlab_course.judge import spawn
from ringlab_course.judge.judge import grade
from ringlab_course.judge.processes import cpu_seconds, descendants, end_all, held, memory
from ringlab_course.judge.sandbox import Bounds, _own_tasks
from ringlab_course.judge.session import SandboxedSubject, Session
from tests.course.judge.small_contract import EXERCISE, notebook, processes, turn
from tests.course.submissions_of import submission

inside = pytest.mark.needs_bwrap
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

EATS_IN_CHILDREN = """
import os, time
def double(x):
    for _ in range(8):
        if os.fork() == 0:
            hoard = [bytearray(b"x" * (1 << 20)) for _ in range(100)]
            time.sleep(10**6)
    time.sleep(10**6)
"""
FORKS = """
import os, time
def double(x):
    for _ in range(20):
        if os.fork() == 0:
            time.sleep(10**6)
    time.sleep(10**6)
"""
EATS = """
import time
HOARD = []
def eat(mib):
    HOARD.append(b"x" * (mib << 20))
    time.sleep(10**6)
def hold(mib):
    HOARD.append(b"x" * (mib << 20))
"""


@inside
@pytest.mark.parametrize(
    ("source", "bounds", "said"),
    [
        (EATS_IN_CHILDREN, Bounds(1 << 29, total_memory_bytes=1 << 28), "together held more than 0.25 GiB"),
        (FORKS, Bounds(1 << 29, total_tasks=12), "together ran more than 12 processes and threads"),
    ],
    ids=["memory", "tasks"],
)
def test_children_count_where_processes_can_be_started(tmp_path, monkeypatch, source, bounds, said) -> None:
    monkeypatch.setattr(spawn, "filter_program", lambda **_: None)  # as if there were no system-call filters
    report = grade(notebook(tmp_path, source), EXERCISE, bounds=bounds, timeout=60)
    (first, *others) = report.stages[0].checks
    assert said in first.message and report.earned == 0
    assert all("Not run" in check.message and said in check.message for check in others)


@inside
def test_the_workers_of_a_submission_count_together() -> None:
    bounds = Bounds(memory_bytes=1 << 30, total_memory_bytes=1 << 28)
    with Session([EATS], ["eat", "hold"], torch=False, bounds=bounds, seconds=60) as session:
        first, second = session.workers(2)
        SandboxedSubject(session, "hold").call(180)
        session._loaded.reverse()
        with pytest.raises(Crashed, match="together held more than 0.25 GiB"):
            SandboxedSubject(session, "eat").call(180)
        with pytest.raises(Crashed, match="Not run"):
            SandboxedSubject(session, "hold").call(1)
        first.kill()
        assert not _living([first.pid, second.pid])


NAMED = """
import ctypes, time
HOARD = []
def eat(mib):
    ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)
    HOARD.append(b"x" * (mib << 20))
    time.sleep(10**6)
"""
NAMES = {"a line of its own": b"x\rRssAnon:0 kB"}


@inside
@pytest.mark.parametrize("name", NAMES)
def test_what_a_worker_calls_itself_hides_nothing(name) -> None:
    bounds = Bounds(memory_bytes=1 << 30, total_memory_bytes=1 << 28)
    source = NAMED.format(name=NAMES[name])
    with (
        Session([source], ["eat"], torch=False, bounds=bounds, seconds=60) as session,
        pytest.raises(Crashed, match="together held more than 0.25 GiB"),
    ):
        SandboxedSubject(session, "eat").call(400)


@linux
def test_a_process_of_somebody_elses_may_have_any_name() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff\\xfe', 0, 0, 0); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert memory(other.pid, "VmRSS") > 0 and held([other.pid])[1] == 1 and cpu_seconds(other.pid) >= 0
        assert _own_tasks() > 1
        assert other.pid not in processes(turn()), "a test that looks for remaining processes does not end it"
        other.kill()


HIDES = """
import os, signal, subprocess, sys
LOOP = "import signal,sys,time\\n" \\
    "open(sys.argv[1] + '/' + str(__import__('os').getpid()), 'w').close()\\n" \\
    "for n in range(1, 65):\\n" \\
    "    try: signal.signal(n, signal.SIG_IGN)\\n" \\
    "    except (OSError, ValueError): pass\\n" \\
    "time.sleep(10**6)\\n"
def double(x):
    kill = 0
    {how}
    while not os.listdir({folder}): pass
    if kill: os.kill(kill, 9)
    return 2 * x
"""
WAYS = {
    "a child": "subprocess.Popen([sys.executable, '-c', LOOP, {0!r}])",
    "a session of its own": "subprocess.Popen([sys.executable, '-c', LOOP, {0!r}], start_new_session=True)",
    "an orphan": 'os.system(f\'setsid "{{sys.executable}}" -c "{{LOOP}}" "{0}" & disown 2>/dev/null\')',
    "an orphan that has no environment": (
        "subprocess.run(['setsid', '--fork', sys.executable, '-c', LOOP, {0!r}], env={{}})"
    ),
    "one whose parents were killed by it": (
        "subprocess.run(['setsid', '--fork', sys.executable, '-c', LOOP, {0!r}]); kill = os.getppid()"
    ),
}


def _living(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        found += [pid] * (state not in "ZX")
    return found


@linux
@pytest.mark.parametrize("way", WAYS)
def test_without_a_sandbox_nothing_that_was_started_outlives_the_grading(tmp_path, way) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    source = HIDES.replace("{how}", WAYS[way].format(str(pids))).replace("{folder}", repr(str(pids)))
    report = grade(notebook(tmp_path, source), EXERCISE, unsafe=True, timeout=60)
    started = [int(path.name) for path in pids.iterdir()]
    assert started and not _living(started) and "WITHOUT" in report.label


pytestmark = pytest.mark.needs_bwrap


@linux
def test_what_is_ended_and_what_is_not(tmp_path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(10**6)"]
    begin = [sys.executable, "-c", f"import subprocess; subprocess.run({sleep})"]
    root = subprocess.Popen(begin)
    marked = subprocess.Popen(sleep, env={"MARK": "a mark of its own 1"}, start_new_session=True)
    other = subprocess.Popen(sleep, env={"MARK": "another"})
    try:
        while not (below := descendants(root.pid)):
            time.sleep(0.01)
        alone = held([root.pid])[0]  # measured first, because the process may still grow
        size, tasks = held([root.pid, *below])
        assert tasks >= 2 and size > alone > 1 << 20
        end_all(root.pid, b"a mark of its own 1")
        assert root.wait(60) == marked.wait(60) == -9 and not _living(below)
        assert _living([other.pid]) and _living([os.getpid()])
    finally:
        for each in (root, marked, other):
            each.kill()
            each.wait()


def failing(stage_id: str, cells: str) -> dict[str, str | None]:
    """Return the checks of a stage that fail in the judge, each with the mistake that it names."""
    stage = load_stage(stage_id)
    names = [stage.function, *stage.helpers]
    with Session([cells], names, torch=True, seconds=120, total_seconds=1200) as session:
        report = run_stage(stage, SandboxedSubject(session, stage.function), "all", seed=5)
    assert not any(check.broken for check in report.checks)
    return {check.id: check.misconception for check in report.checks if not check.ok}


def source(name: str) -> str:
    return submission(name).source


@pytest.mark.thorough
def test_what_is_changed_while_it_travels_is_seen_where_posts_are_late() -> None:
    """A change through .data leaves no trace in torch, but is seen if the judge takes the message late."""
    cleared = source("06/wrong_overlap_writes_what_is_sent").replace("piece[0].zero_", "piece[0].data.zero_")
    assert failing("06.overlap", cleared) == {"any_network": "writes_what_is_sent"}


@pytest.mark.thorough
def test_computing_in_name_alone_hides_no_hop() -> None:
    """Processor time shows if a ring reports an empty computation and does the work elsewhere."""
    told = source("06/right_slices").replace('ring.compute(f"step {step}", attend, ', "told(ring, ")
    told = told.replace('ring.compute("last", attend, ', "told(ring, ")
    assert told.count("told(ring, ") == 2
    computed = "\n\ndef told(ring, *own):\n    ring.compute('block', int)\n    return attend(*own)\n"
    unseen = "computes_unseen"
    assert failing("06.overlap", told + computed) == {"order": unseen, "eight_ranks": unseen}
