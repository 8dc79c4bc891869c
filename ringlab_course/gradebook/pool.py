"""The local pool: processes that each grade one notebook at a time, and die with the process that started them.

A worker returns a report, or the reason why there is none; it raises nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from ringlab.errors import CourseError, RinglabError, in_one_line
from ringlab_course.gradebook.versions import contract_version, digest_of

Judge = Callable[..., Any]


@dataclass(frozen=True)
class Job:
    """One notebook to grade. digest: that it must have, "" for any. seed: None for a fresh one. patience: see `grade`."""

    number: int
    path: Path
    exercise: str
    digest: str
    seed: int | None
    unsafe: bool = False
    name: str = ""
    patience: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job: `report` (`GradeReport.as_dict()`), or the `reason` why it could not be graded."""

    number: int
    report: dict[str, Any] | None
    digest: str = ""
    contract: str = ""
    reason: str = ""
    error: RinglabError | None = None


class Pool(Protocol):
    """A pool that grades jobs side by side."""

    def run(self, jobs: Sequence[Job], started: Callable[[Job], None]) -> Generator[Outcome, None, None]:
        """Yield an outcome for every job, as they come; `started` hears of each that begins."""
        ...


def carry_out(job: Job, judge: Judge | None = None) -> Outcome:
    """Return what `judge`, by default ours, makes of the job. A failure of ours is no zero: it has a reason."""
    try:
        if judge is None:
            from ringlab_course.judge import grade

            judge = grade
        digest = digest_of(job.path)
        if job.digest and digest != job.digest:
            return Outcome(job.number, None, reason="the file changed after the run began")
        contract = contract_version(job.exercise, unsafe=job.unsafe)
        how: dict[str, Any] = {"unsafe": job.unsafe, "seed": job.seed, "patience": job.patience}
        report = judge(job.path, job.exercise or None, **how).as_dict()
        if digest_of(job.path) != digest:
            return Outcome(job.number, None, reason="the file changed while it was graded")
        return Outcome(job.number, report, digest, contract)
    except RinglabError as error:
        return Outcome(job.number, None, reason=one_line(error), error=error)
    except Exception as error:
        return Outcome(job.number, None, reason=one_line(error))


def carry_out_elsewhere(job: Job, data: bytes, judge: Judge | None = None) -> Outcome:
    """Return the outcome of a job whose notebook came as bytes, to a machine that has no such file."""
    try:
        with tempfile.TemporaryDirectory(prefix="ringlab-") as folder:
            path = Path(folder) / "notebook.ipynb"
            path.write_bytes(data)
            return carry_out(replace(job, path=path), judge)
    except OSError as error:
        return Outcome(job.number, None, reason=one_line(error))


class Here:
    """Grades in this process, one after the other."""

    def __init__(self, judge: Judge | None = None) -> None:
        self.judge = judge

    def run(self, jobs: Sequence[Job], started: Callable[[Job], None]) -> Generator[Outcome, None, None]:
        """Yield an outcome for every job, in their order."""
        for job in jobs:
            started(job)
            yield carry_out(job, self.judge)


def one_line(error: BaseException) -> str:
    """Return an error as a line of bounded length."""
    text = ": ".join(filter(None, (type(error).__name__, in_one_line(error))))
    return "".join(c if c.isprintable() else "�" for c in text[:1000])


def cores() -> int:
    """Return how many processors this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables that say in how many threads NumPy and PyTorch compute."""
_ENVIRONMENT = threading.Lock()
LIMIT_S = 1800.0
"""For one notebook. The judge gives up after minutes; this is for a judge that hangs."""
_SPAWN = multiprocessing.get_context("spawn")  # forking a process that has loaded torch hangs


class LocalPool:
    """`processes` processes. Whatever ends one of them costs the notebook it had, no other.

    Run it from a thread that lives as long as the run: the workers die with it, as do their sandboxes.
    """

    def __init__(self, processes: int, judge: Judge | None = None, limit_s: float = LIMIT_S) -> None:
        self.processes, self.judge, self.limit_s = max(1, processes), judge, limit_s

    def run(self, jobs: Sequence[Job], started: Callable[[Job], None]) -> Generator[Outcome, None, None]:
        """Yield an outcome for every job as they come; stopping early ends the workers and their sandboxes."""
        waiting = list(reversed(jobs))
        workers: list[_Worker] = []
        try:
            for _ in range(min(self.processes, len(waiting))):
                workers.append(_Worker(self.judge))
            while waiting or any(worker.job for worker in workers):
                for worker in workers:
                    if waiting and worker.job is None:
                        started(waiting[-1])
                        worker.begin(waiting.pop(), self.limit_s)
                yield from self._finished(workers)
        finally:
            for worker in workers:
                worker.ask_to_stop()
            for worker in workers:
                worker.stop()

    def _finished(self, workers: list[_Worker]) -> Iterator[Outcome]:
        busy = [worker for worker in workers if worker.job]
        first = min(worker.deadline for worker in busy)
        wait([worker.connection for worker in busy], max(0.0, first - time.monotonic()))
        for worker in busy:
            outcome = worker.outcome()
            if outcome is not None:
                if worker.ended:  # by whatever it was: another takes its place
                    workers[workers.index(worker)] = _Worker(self.judge)
                yield outcome


@contextlib.contextmanager
def _of_one_thread() -> Iterator[None]:
    """Let processes that are started in this block compute in one thread, unless the user says otherwise.

    Threads of processes that grade side by side wait for each other: half of a judge's time on two cores was that.
    """
    with _ENVIRONMENT:
        names = [name for name in THREADS if name not in os.environ]
        os.environ.update(dict.fromkeys(names, "1"))
        try:
            yield
        finally:
            for name in names:
                del os.environ[name]


class _Worker:
    """One process, and the job it has."""

    def __init__(self, judge: Judge | None) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs, os.getpid(), judge), daemon=True)
        try:
            with _of_one_thread():
                self.process.start()
        except OSError as error:
            remedy = "fewer at a time, with --jobs"
            raise CourseError(
                "a process that grades", error.strerror or "none could be started", remedy
            ) from None
        finally:
            theirs.close()
        self.job: Job | None = None
        self.deadline, self.ended = 0.0, False

    def begin(self, job: Job, limit_s: float) -> None:
        self.job, self.deadline = job, time.monotonic() + limit_s
        with contextlib.suppress(OSError):  # it has died; `outcome` finds out
            self.connection.send(job)

    def outcome(self) -> Outcome | None:
        """Return what came of the job; None while there is nothing yet."""
        assert self.job is not None
        number = self.job.number
        try:
            if self.connection.poll():
                found: Outcome = self.connection.recv()
            elif time.monotonic() < self.deadline:
                return None
            else:
                self.ended = True
                found = Outcome(number, None, reason="grading did not end, and was ended")
        except (EOFError, OSError):
            self.ended = True
            self.process.join(5)
            code = self.process.exitcode
            found = Outcome(number, None, reason=f"the process that graded it ended (status {code})")
        if self.ended:
            self.stop()
        self.job = None
        return found

    def ask_to_stop(self) -> None:
        if self.process.is_alive():
            self.process.terminate()

    def stop(self) -> None:
        """End the process. Asked, it ends its sandboxes itself; made to, they end with it."""
        self.ask_to_stop()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


def _serve(connection: Connection, parent: int, judge: Judge | None) -> None:
    """Grade what comes through `connection` until it closes."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides what it means
    signal.signal(signal.SIGTERM, _leave)
    while True:
        try:
            connection.send(carry_out(connection.recv(), judge))
        except (EOFError, OSError):
            return


def _leave(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, kill -9 included."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)
