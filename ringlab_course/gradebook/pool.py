"""The local pool of processes. Each grades one notebook at a time, and ends with the process that started it.

A worker returns a report, or the reason why there is no report. It raises no exception.
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
    """One notebook to grade.

    digest: the digest that the notebook must have; "" allows any.
    seed: None for a fresh seed.
    patience: see `grade`.
    """

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
    """The outcome of a job: `report` (`GradeReport.as_dict()`), or the `reason` why there is no report."""

    number: int
    report: dict[str, Any] | None
    digest: str = ""
    contract: str = ""
    reason: str = ""
    error: RinglabError | None = None


class Pool(Protocol):
    """An object that grades several jobs at once."""

    def run(self, jobs: Sequence[Job], started: Callable[[Job], None]) -> Generator[Outcome, None, None]:
        """Yield an outcome for every job as jobs finish; `started` is called with each job that begins."""
        ...


def carry_out(job: Job, judge: Judge | None = None) -> Outcome:
    """Return the outcome of grading a job with `judge`, by default the course's own.

    If we fail to grade the notebook, the outcome has a reason instead of zero points.
    """
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
    """Return the outcome of a job whose notebook was sent as bytes to another machine."""
    try:
        with tempfile.TemporaryDirectory(prefix="ringlab-") as folder:
            path = Path(folder) / "notebook.ipynb"
            path.write_bytes(data)
            return carry_out(replace(job, path=path), judge)
    except OSError as error:
        return Outcome(job.number, None, reason=one_line(error))


class Here:
    """Grades jobs in this process, one after the other."""

    def __init__(self, judge: Judge | None = None) -> None:
        self.judge = judge

    def run(self, jobs: Sequence[Job], started: Callable[[Job], None]) -> Generator[Outcome, None, None]:
        """Yield an outcome for every job, in the order of the jobs."""
        for job in jobs:
            started(job)
            yield carry_out(job, self.judge)


def one_line(error: BaseException) -> str:
    """Return an error as one line of limited length."""
    text = ": ".join(filter(None, (type(error).__name__, in_one_line(error))))
    return "".join(c if c.isprintable() else "�" for c in text[:1000])


def cores() -> int:
    """Return the number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables that set the number of threads of NumPy and PyTorch."""
_ENVIRONMENT = threading.Lock()
LIMIT_S = 1800.0
"""The time limit for one notebook.

The judge itself gives up after minutes, so this is for a judge that hangs.
"""
_SPAWN = multiprocessing.get_context("spawn")  # forking a process that has loaded torch hangs


class LocalPool:
    """A pool of `processes` processes. If one of them ends early, only the notebook that it graded is lost.

    Run it in a thread that lives as long as the run, because the workers and their sandboxes die with the
    thread.
    """

    def __init__(self, processes: int, judge: Judge | None = None, limit_s: float = LIMIT_S) -> None:
        self.processes, self.judge, self.limit_s = max(1, processes), judge, limit_s

    def run(self, jobs: Sequence[Job], started: Callable[[Job], None]) -> Generator[Outcome, None, None]:
        """Yield an outcome for every job as jobs finish; stopping early ends workers and sandboxes."""
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
                if worker.ended:  # a new process replaces it, whatever the reason
                    workers[workers.index(worker)] = _Worker(self.judge)
                yield outcome


@contextlib.contextmanager
def _of_one_thread() -> Iterator[None]:
    """Limit processes that are started in this block to one thread each, unless the user has set a number.

    Threads of processes that grade at the same time wait for each other. On two cores, this took half of the
    judge's time.
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
    """One process, and the job that it is working on."""

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
        with contextlib.suppress(OSError):  # `outcome` will find that the process has died
            self.connection.send(job)

    def outcome(self) -> Outcome | None:
        """Return the outcome of the job, or None while it is still running."""
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
        """End the process.

        On SIGTERM it ends its sandboxes itself; if it has to be killed, the sandboxes die with it.
        """
        self.ask_to_stop()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


def _serve(connection: Connection, parent: int, judge: Judge | None) -> None:
    """Grade the jobs that arrive through `connection` until it closes."""
    _die_with(parent)
    # Ctrl-C reaches all processes; the parent decides how to react
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    """Make the kernel kill this process when the thread that started it ends, even through kill -9."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)
