"""Honest learners get the same results whether or not the other half of their class is hostile."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ringlab_course.checking.contract import Exercise
from ringlab_course.checking.forbidden import PACKAGES
from ringlab_course.gradebook.collect import collect
from ringlab_course.gradebook.pool import LocalPool
from ringlab_course.gradebook.runner import grade_class
from ringlab_course.gradebook.store import Gradebook
from ringlab_course.judge.judge import GradeReport, grade
from ringlab_course.judge.removal import HOME
from ringlab_course.judge.sandbox import Bounds
from tests.course.judge.hostile import HOSTILE
from tests.course.judge.hostile.files import FILES
from tests.course.judge.hostile.small import stage
from tests.course.judge.small_contract import marked, notebook

pytestmark = pytest.mark.thorough

EXERCISE = Exercise(
    id="01", slug="01_hostile", title="hostile", stages=(replace(stage("double"), id="01.double"),)
)
SECONDS, HONEST_SECONDS, LATE_S, JOBS = 1.0, 30.0, 20.0, 2
BOUNDS = Bounds(memory_bytes=1 << 29)
RIGHT = {
    "adds": "def double(x): return x + x",
    "multiplies": "def double(x): return 2 * x",
    "loops": "def double(x):\n    y = x.copy()\n    for i in range(len(y)): y[i] += x[i]\n    return y",
    "has a helper": "TWO = 2\ndef times(x, n): return x * n\ndef double(x): return times(x, TWO)",
}
WRONG = {
    "squares": "def double(x): return x**2",
    "forgets to return": "def double(x): 2 * x",
    "raises": "def double(x): return x.twice()",
    "has not begun": "def double(x): raise NotImplementedError",
}
NAMES = (
    "is a fork bomb", "kills everybody", "fills the disk", "writes garbage to the judge", "loops with signals ignored",
    "leaves a thread that spins", "leaves an orphan", "prints a gigabyte", "leaves while it is loaded", "writes wherever it can",
    "leaves shared memory", "floods the judge from a thread", "stops itself", "reads another's submission",
)  # fmt: skip
NO_NOTEBOOKS = ("a link to itself", "a pipe", "a folder", "ten gigabytes of holes", "cut off")


def judge(
    path: Path, exercise: str | None, *, unsafe: bool = False, seed: int | None = None, patience: float = 1.0
) -> GradeReport:
    """Grade by the small contract. Honest submissions get more time, because a busy machine may delay them."""
    honest = path.parent.name[3:] in {**RIGHT, **WRONG}
    return grade(
        path, EXERCISE, unsafe=unsafe, seed=seed, timeout=HONEST_SECONDS if honest else SECONDS, bounds=BOUNDS
    )


def hand_in(folder: Path, mark: str, hostile: bool) -> None:
    """Write a folder for every learner, so that hostile and honest learners alternate by name."""
    honest = {**RIGHT, **WRONG}
    for number, (name, source) in enumerate(honest.items()):
        (folder / f"{number:02} {name}").mkdir(parents=True)
        notebook(folder / f"{number:02} {name}", source, grade="01.double", name="01.ipynb")
    if not hostile:
        return
    for number, name in enumerate(NAMES):
        there = folder / f"{number % len(honest):02} {name}"
        there.mkdir()
        source = HOSTILE[name].replace("@FOLDER@/ada/notebook.ipynb", f"{folder}/00 adds/01.ipynb")
        source = source.replace("@FOLDER@", str(folder)).replace("@MARK@", mark)
        notebook(there, source, grade="01.double", name="01.ipynb")
    files = {name: file for group in FILES.values() for name, file in group.items()}
    for number, name in enumerate(NO_NOTEBOOKS):
        there = folder / f"{number:02} {name}"
        there.mkdir()
        files[name].make(there / "01.ipynb")


def graded(folder: Path, book: Path | None) -> dict[str, str]:
    """Grade the class, and return each learner's results without times, paths or seeds.

    Submissions that a busy machine left ungraded are graded again, as the report advises.
    """
    with Gradebook(book) as ours:
        for _ in range(3):
            run = grade_class(ours, collect([folder], exercise="01").submissions, LocalPool(JOBS, judge))
            if not run.ungraded:
                break
        assert run.ungraded == []
        found = {}
        for entry in ours.entries():
            stages = [
                [check["id"], check["ok"], check["message"], check["misconception"]]
                for each in entry.report["stages"]
                for check in each["checks"]
            ]
            found[entry.learner] = json.dumps([entry.score, entry.maximum, entry.report["reason"], stages])
        return found


def children() -> Iterator[tuple[str, str]]:
    """Yield the id and the state letter of each child of this process, including adopted children."""
    for task in Path("/proc/self/task").iterdir():
        for child in _told(task / "children").split():
            status = _told(Path(f"/proc/{child}/stat")).rpartition(")")[2].split()
            if status:
                yield child, status[0]


def left() -> Iterator[str]:
    """Yield the children of this process that are alive."""
    for child, state in children():
        if state != "Z" and "resource_tracker" not in _told(Path(f"/proc/{child}/cmdline")):
            yield child


def _told(path: Path) -> str:
    """Return the text of a file in /proc, or "" if its process has just ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def more_than(before: set[str]) -> set[str]:
    """Return the living children that are not in `before`, after waiting for those that are about to end."""
    deadline = time.monotonic() + LATE_S
    while (more := set(left()) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return more


@pytest.fixture
def heir():
    """Make orphans below this process its children, so that the test sees them."""
    libc, become_subreaper = ctypes.CDLL(None), 36
    before = {child for child, _ in children()}
    libc.prctl(become_subreaper, 1)
    yield
    libc.prctl(become_subreaper, 0)
    # Adopted children that have ended are removed, because other tests would take them for forgotten workers.
    for child, state in children():
        if state == "Z" and child not in before:
            os.waitpid(int(child), 0)


def test_an_orphan_would_be_seen(heir) -> None:
    before = set(left())
    orphan = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)"
    subprocess.run([sys.executable, "-c", orphan], check=True)
    (child,) = set(left()) - before
    os.kill(int(child), signal.SIGKILL)
    assert not more_than(before)


@pytest.mark.needs_bwrap
def test_hostile_submissions_change_nothing_for_the_others(tmp_path, monkeypatch, heir) -> None:
    mark, scratch, before = f"class-{os.getpid()}-mark", tmp_path / "scratch", set(left())
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))  # the folder where the judge keeps its own files
    hand_in(tmp_path / "alone", mark, hostile=False)
    hand_in(tmp_path / "class", mark, hostile=True)
    alone = graded(tmp_path / "alone", tmp_path / "alone.db")
    files = tree(tmp_path / "class")
    begin = time.monotonic()
    together = graded(tmp_path / "class", tmp_path / "class.db")
    took = time.monotonic() - begin
    assert len(alone) == len(RIGHT) + len(WRONG) and len(together) == len(alone) + len(NAMES) + len(
        NO_NOTEBOOKS
    )
    assert {learner: together[learner] for learner in alone} == alone
    scores = {learner[3:]: json.loads(told)[0] for learner, told in together.items()}
    assert {name: scores[name] for name in RIGHT} == dict.fromkeys(RIGHT, 5)
    assert {name: score for name, score in scores.items() if name not in RIGHT and score} == {}
    assert took < (len(NAMES) * 2 * (SECONDS + LATE_S) + len(together) * LATE_S) / JOBS
    assert not more_than(before)
    assert tree(tmp_path / "class") == files
    assert (
        list(scratch.iterdir()) == []
        and marked(mark, tmp_path, *(HOME / package for package in PACKAGES)) == []
    )


def tree(folder: Path) -> dict[str, str]:
    """Return the names, kinds and contents of everything in a folder."""
    found = {}
    for path in folder.rglob("*"):
        small = path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20
        found[str(path)] = (
            hashlib.sha256(path.read_bytes()).hexdigest() if small else str(path.lstat().st_mode)
        )
    return found


def test_no_ended_orphan_is_kept() -> None:
    assert [child for child, state in children() if state == "Z"] == []
