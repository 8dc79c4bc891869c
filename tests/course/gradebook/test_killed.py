"""After kill -9 at any moment no result is lost or doubled, and no process is left running."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringlab_course.gradebook.store import Gradebook
from ringlab_course.judge.processes import status_text

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[3]
COMMAND = """
import signal
from ringlab.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell started with &
main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in memory if the system has one, because on a disk every result waits for a write."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    # The prefix differs from that of ranks' shared memory. The name is random, because a killed run may leave
    # its folder behind.
    with tempfile.TemporaryDirectory(prefix="gradebook-", dir=memory) as path:
        yield Path(path)


def kill(folder: Path, submissions: int, what: str) -> dict:
    command = [sys.executable, "-m", "tests.course.gradebook.killing", str(folder), str(submissions), what]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["grade", "regrade"])
def test_a_kill_at_every_line_of_a_run(folder: Path, what: str) -> None:
    found = kill(folder, 2, what)
    assert found["moments"] > 200 and found["wrong"] == found["lost"] == [], found


def fields_of(stat: Path) -> list[str]:
    """Return the fields after the name in a process's stat file, [] if the process has ended.

    The name is skipped because it may be no valid text.
    """
    return status_text(stat).rpartition(")")[2].split()


def descendants(pid: int) -> dict[int, str]:
    """Return the processes below `pid` with their start times, because a process id may be used again."""
    parents, started = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        if not (fields := fields_of(path)):
            continue
        parents[int(path.parent.name)], started[int(path.parent.name)] = int(fields[1]), fields[19]
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {each: started[each] for each in found - {pid}}


def alive(processes: dict[int, str]) -> list[int]:
    found = []
    for pid, started in processes.items():
        fields = fields_of(Path(f"/proc/{pid}/stat"))
        if fields and fields[19] == started and fields[0] not in "ZX":
            found.append(pid)
    return found


def comparable(path: Path) -> list[tuple]:
    with Gradebook(path, create=False) as book:
        assert book.ungraded() == []
        entries = book.entries()
        assert all(len(book.history(entry.learner, entry.exercise)) == 1 for entry in entries)
        return [
            (e.learner, e.exercise, e.digest, e.seed, e.score, e.maximum, [c["id"] for c in e.failed])
            for e in entries
        ]


def sandboxes(processes: dict[int, str]) -> list[int]:
    return [pid for pid in processes if status_text(Path(f"/proc/{pid}/comm")).strip() == "bwrap"]


@pytest.mark.slow
@pytest.mark.needs_bwrap
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT], ids=lambda s: s.name)
def test_a_real_run_that_is_stopped_goes_on_and_leaves_no_process(
    tmp_path: Path, stop: signal.Signals
) -> None:
    right = CHECKOUT / "solutions" / "01_naive_attention.ipynb"
    skeleton = CHECKOUT / "exercises" / "01_naive_attention.ipynb"
    for number in range(6):
        path = tmp_path / "class" / f"learner {number}" / right.name
        path.parent.mkdir(parents=True)
        shutil.copy(skeleton if number % 3 == 2 else right, path)
    (tmp_path / "class" / "learner 0" / right.name).write_text("{")
    book = tmp_path / "book"
    start = [sys.executable, "-c", COMMAND, "grade", str(tmp_path / "class")]
    words = [*start, "--book", str(book), "--seed", "5", "--jobs", "2"]
    for least in (0, 1):  # the run is stopped when it has this many results
        # The run gets a new session, so that Ctrl-C reaches all its processes and no others, as in a
        # terminal.
        running = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        below: dict[int, str] = {}
        while running.poll() is None:
            below = descendants(running.pid)
            if sandboxes(below) and results(book) >= least:
                break
            time.sleep(0.02)
        assert running.poll() is None, "it ended before it was stopped"
        os.killpg(running.pid, stop) if stop == signal.SIGINT else os.kill(running.pid, stop)
        assert running.wait() == (-9 if stop == signal.SIGKILL else 128 + stop)
        deadline = time.monotonic() + 30
        while alive(below) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert alive(below) == []
    assert subprocess.run(words, capture_output=True).returncode == 0
    other = tmp_path / "undisturbed"
    assert (
        subprocess.run(
            [*start, "--book", str(other), "--seed", "5", "--jobs", "1"], capture_output=True
        ).returncode
        == 0
    )
    assert comparable(book) == comparable(other) and len(comparable(book)) == 6


def results(path: Path) -> int:
    if not path.exists() or not path.stat().st_size:
        return 0
    with Gradebook(path, create=False) as book:
        return len(book.entries())
