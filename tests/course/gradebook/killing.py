"""A program that kills a grading run, resumes it, and compares the gradebook with that of an undisturbed run.

    python -m tests.course.gradebook.killing FOLDER SUBMISSIONS {grade,regrade}

A moment is a number of lines of Python that the run has executed. The program kills a run at every moment. It is
a process of its own because it forks. It prints JSON: the number of moments, the moments after which the resumed
gradebook differs from that of an undisturbed run (`wrong`), and the moments after which the gradebook lacked a
result that the run had reported as done (`lost`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from ringlab_course.gradebook import versions
from ringlab_course.gradebook.pool import Here
from ringlab_course.gradebook.runner import Watch, grade_class
from ringlab_course.gradebook.store import Gradebook
from tests.course.gradebook.stub import judge, submissions, write

TRACED = ("gradebook/store.py", "gradebook/runner.py")


class Countdown:
    """A trace function that counts executed lines of store and runner, and kills its process after `left` lines."""

    def __init__(self, left: int) -> None:
        self.left, self.lines = left, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.left:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def run(
    path: Path,
    folder: Path,
    regrade: bool,
    trace: Countdown | None = None,
    told: Path | None = None,
) -> None:
    """Grade `folder` into the book at `path`, under `trace`; for each result, append a byte to the file `told`."""
    watch = Watch()
    if told is not None:
        descriptor = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        watch = Watch(ended=lambda job, result: (os.write(descriptor, b"."), None)[1])
    sys.settrace(trace)
    try:
        with Gradebook(path) as book:
            book.use_class_seed(7)
            grade_class(
                book, submissions(folder), Here(judge), regrade=("05",) if regrade else (), watch=watch
            )
    finally:
        sys.settrace(None)


def content(path: Path) -> list[Any]:
    """Return the parts that must be equal in two books: results in order, ungraded submissions, pending regrades."""
    with Gradebook(path) as book:
        results = book._book.execute(
            "SELECT learner, exercise, path, digest, contract, seed, submitted_at, earned, maximum, report"
            " FROM results ORDER BY id"
        ).fetchall()
        ungraded = [(each.learner, each.exercise, each.reason) for each in book.ungraded()]
        return [*results, *ungraded, *sorted(book.wanted())]


def killed(path: Path, folder: Path, regrade: bool, left: int, told: Path) -> None:
    """Run the grading in a child process that kills itself when it has executed `left` lines."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            run(path, folder, regrade, Countdown(left), told)
        os._exit(0)
    os.waitpid(child, 0)


def done(path: Path) -> int:
    """Return the number of results and of failed attempts that the book contains."""
    with Gradebook(path) as book:
        return len(book._book.execute("SELECT id FROM results").fetchall()) + sum(
            e.tries for e in book.ungraded()
        )


def main() -> None:
    """Kill and resume a run at each moment, and print the faults as JSON."""
    versions._sources = cache(versions._sources)  # the course's files do not change during this program
    folder, count, what = sys.argv[1:]
    work, regrade = Path(folder), what == "regrade"
    handed_in, begun, undisturbed = work / "class", work / "begun", work / "undisturbed"
    for number in range(int(count)):
        write(handed_in, f"learner {number:03}", str(number % 11))
    Gradebook(begun).close()
    if regrade:
        run(begun, handed_in, False)
    shutil.copy(begun, undisturbed)
    counted = Countdown(0)
    run(undisturbed, handed_in, regrade, counted)
    expected, before = content(undisturbed), done(begun)
    wrong, lost = [], []
    for moment in range(1, counted.lines + 1):
        path, told = work / f"killed {moment}", work / f"told {moment}"
        shutil.copy(begun, path)
        killed(path, handed_in, regrade, moment, told)
        if told.exists() and done(path) - before < told.stat().st_size:
            lost.append(moment)
        run(path, handed_in, False)
        if content(path) != expected and regrade:  # killed before it recorded the regrade
            run(path, handed_in, True)
        if content(path) != expected:
            wrong.append(moment)
    print(json.dumps({"moments": counted.lines, "wrong": wrong, "lost": lost}))


if __name__ == "__main__":
    main()
