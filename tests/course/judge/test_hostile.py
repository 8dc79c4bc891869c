from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ringlab.course.judge import sandbox
from ringlab.course.judge.judge import grade
from ringlab.course.judge.sandbox import Bounds
from tests.course.judge.hostile import HOSTILE
from tests.course.judge.small_contract import EXERCISE, RIGHT, notebook

pytestmark = pytest.mark.needs_bwrap
BOUNDS = Bounds(memory_bytes=1 << 29)
SECONDS = 2.0


def processes() -> set[int]:
    """The processes of all workers, by the uids that only workers have; without root, our descendants."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        worker = int(fields["Uid"].split()[0]) in sandbox._UIDS
        if worker or (fields["Name"] == "bwrap" and int(fields["PPid"]) == os.getpid()):
            found.add(int(fields["Pid"]))
    return found


def mine(before: set[int]) -> set[int]:
    """What is left of this test's processes; other tests may have workers of their own meanwhile."""
    deadline = time.monotonic() + 5
    while (left := processes() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_submissions_earn_nothing_and_leave_nothing(tmp_path, name) -> None:
    before, begin = processes(), time.monotonic()
    report = grade(notebook(tmp_path, HOSTILE[name]), EXERCISE, bounds=BOUNDS, timeout=SECONDS)
    assert report.earned == 0 and not report.ok
    assert all(not check.ok and check.message for stage in report.stages for check in stage.checks)
    assert time.monotonic() - begin < 2 * (SECONDS + 5), (
        "two calls, each ended 5 s after its deadline at most"
    )
    assert not mine(before)
    hidden = [check for stage in report.stages for check in stage.checks if check.tier == "held-out"]
    assert all(check.counterexample == "" and "[" not in check.message for check in hidden)
    assert not Path("/tmp/pwned").exists()


def test_the_next_submission_is_unaffected(tmp_path) -> None:
    for name in ("is a fork bomb", "kills everybody", "fills the disk", "writes garbage to the judge"):
        grade(notebook(tmp_path, HOSTILE[name]), EXERCISE, bounds=BOUNDS, timeout=SECONDS)
        assert grade(notebook(tmp_path, RIGHT), EXERCISE, timeout=60).ok


@pytest.mark.parametrize(
    "name", ["forges a verdict", "writes garbage to the judge", "walks the stack to the channel"]
)
def test_interference_condemns_the_whole_submission(tmp_path, name) -> None:
    report = grade(notebook(tmp_path, HOSTILE[name]), EXERCISE, timeout=10)
    assert "interfered" in report.reason and report.earned == 0
