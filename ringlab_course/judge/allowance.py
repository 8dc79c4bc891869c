"""How much the checks of one tier may compute and hold: seconds of CPU, and bytes of all workers together.

Time on the wall belongs to whoever else uses the machine, and a class is graded on all cores at once. So the
processor time of the workers is counted, of every thread and process in them, from the moment that the
code is loaded; starting and importing are not the learner's. Sleeping costs nothing here: the deadline of
each call, on the wall, ends it. Memory is watched from outside while the workers run.

What it takes the judge itself to read an answer is bounded too: a legal answer may be small on the wire and
endless to whoever compares it.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.judge.processes import cpu_seconds, held, threads, waited_seconds
from ringlab_course.judge.sandbox import Bounds

if TYPE_CHECKING:
    from ringlab_course.judge.process import WorkerProcess


SECONDS = {"visible": 5.0, "stress": 30.0, "held-out": 30.0}
"""CPU seconds that one function's checks of a tier may take together; visible ones answer at once."""


class Allowance:
    """The remaining seconds of one tier's checks of one function; `patience` multiplies them all.

    A call under way is not cut off: the next one is refused. So what is used may exceed the allowance by one
    call, which has a deadline of its own.
    """

    def __init__(self, patience: float = 1.0) -> None:
        self.patience, self.tier = patience, ""
        self.computed, self._begin = Meter(_cpu), 0.0

    def begin(self, tier: str) -> None:
        """Give the checks of `tier` of one function their seconds."""
        self.tier, self._begin = tier, self.computed.total()

    @property
    def seconds(self) -> float:
        """CPU seconds that the tier allows; without end before the first tier has begun."""
        return SECONDS[self.tier] * self.patience if self.tier else float("inf")

    @property
    def used(self) -> float:
        """CPU seconds used since the tier began."""
        return self.computed.total() - self._begin

    def require(self) -> None:
        """Return while something is left. Raises: Crashed, with a message for the learner."""
        if self.tier and self.used > self.seconds:
            raise Crashed(
                f"Not run: the {self.tier} checks of one function may take {self.seconds:g} s of computing together, and "
                "those before took more. What takes so long: something done once per token, or again in every step? "
                "(What counts is the processor's time; other work on the machine does not.)"
            )


class Meter:
    """The sum, over all workers that were added, of how much the figure `read` has grown since; ended workers count."""

    def __init__(self, read: Callable[[WorkerProcess], float]) -> None:
        self._read = read
        self._since: dict[WorkerProcess, float] = {}
        self._ended = 0.0

    def add(self, worker: WorkerProcess) -> None:
        """Start to count `worker`; only growth after this call counts."""
        self._since[worker] = self._read(worker)

    def remove(self, worker: WorkerProcess) -> None:
        """Keep what has grown, and count no more. To be called before the worker is killed."""
        if worker in self._since:
            self._ended += max(0.0, self._read(worker) - self._since.pop(worker))

    def total(self) -> float:
        """Return the sum up to now."""
        return self._ended + sum(
            max(0.0, self._read(worker) - since) for worker, since in self._since.items()
        )


def _cpu(worker: WorkerProcess) -> float:
    return sum(map(cpu_seconds, worker.processes()))


class Waits(Meter):
    """The seconds for which a submission's workers, and the thread of the judge that serves them, waited for a processor.

    Others use the machine too: this time is nobody's answer. Threads that wait side by side all count, so the sum
    is the most by which they can have been late.
    """

    def __init__(self) -> None:
        super().__init__(
            lambda worker: waited_seconds(each for pid in worker.processes() for each in threads(pid))
        )

    def total(self) -> float:
        """Return the sum up to now, with the calling thread's own."""
        return super().total() + waited_seconds([Path("/proc/thread-self")])


INTERVAL_S = 0.1


class Watch:
    """Ends all registered workers as soon as together they hold more memory, or run more tasks, than they may.

    A limit of the kernel's holds for one process; ranks, and processes where they can be started,
    multiply it. `exceeded` then says which bound it was; empty until then.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self.exceeded = bounds, ""
        self._workers: list[WorkerProcess] = []
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, worker: WorkerProcess) -> None:
        """Watch `worker`, which is ready, from now on."""
        with self._lock:
            self._workers.append(worker)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def remove(self, worker: WorkerProcess) -> None:
        """Watch `worker` no more. To be called before it is killed: its number may then be another's."""
        with self._lock:
            self._workers = [each for each in self._workers if each is not worker]

    def close(self) -> None:
        """Watch nothing any more; returns when the watching has ended."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(INTERVAL_S):
            with self._lock:
                self._look()

    def _look(self) -> None:
        size, tasks = held(pid for worker in self._workers for pid in worker.processes())
        if size > self.bounds.total_memory_bytes:
            self.exceeded = f"held more than {self.bounds.total_memory_bytes / 2**30:g} GiB of memory"
        elif tasks > self.bounds.total_tasks:
            self.exceeded = f"ran more than {self.bounds.total_tasks} processes and threads"
        else:
            return
        for worker in self._workers:
            worker.end_at_once()


READING_S, READING_BYTES = 60.0, 4 << 30
"""Seconds of the judge's own thread, and bytes of its process, that one check may take beside what is there before."""
_limiting = threading.Lock()
_before: list[
    tuple[int, int]
] = []  # bounds of memory that are to be restored, by every thread that bounds it


class UnreadableAnswer(Failure):
    """An answer that takes the judge more time or memory than it may."""


class _Exhausted(BaseException):
    """One check has taken the judge too long; no Exception, so that no check takes it for one of its own."""


@contextlib.contextmanager
def reading(seconds: float = READING_S, nbytes: int = READING_BYTES) -> Iterator[None]:
    """Bound what the block takes of this thread's processor time and of this process's memory.

    Raises: UnreadableAnswer, with a message for the learner, if it takes more.
    """
    try:
        with _memory_bounded(nbytes), _time_bounded(seconds):
            yield
    except _Exhausted:
        raise UnreadableAnswer(
            f"It took more than {seconds:g} s to read the answer: it is too large."
        ) from None
    except Exception as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            needed = f"more than {nbytes / 2**30:g} GiB of memory"
            raise UnreadableAnswer(f"It takes {needed} to read the answer: it is too large.") from None
        raise


@contextlib.contextmanager
def _time_bounded(seconds: float) -> Iterator[None]:
    """Raise _Exhausted in this thread once it has computed for `seconds`, waiting not counted."""
    if not hasattr(time, "pthread_getcpuclockid"):  # Windows, macOS: there is no sandbox either
        yield
        return
    thread, over, lock = threading.get_ident(), threading.Event(), threading.Lock()
    clock = time.pthread_getcpuclockid(thread)
    end, struck = time.clock_gettime(clock) + seconds, False

    def watch() -> None:
        nonlocal struck
        while not over.wait(min(1.0, seconds / 4)):
            with lock:
                if not over.is_set() and time.clock_gettime(clock) > end:
                    struck = True
                    _raise_in(thread, _Exhausted)
                    return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        with lock:
            over.set()
        watcher.join()
        if struck:  # if it has not come up yet, it does here, and not later
            with contextlib.suppress(_Exhausted):
                for _ in range(1000):
                    pass


def _raise_in(thread: int, error: type[BaseException]) -> None:
    # Never NULL, to take one back: CPython then looks for it for ever, and a profiled call waits until it has found it.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


@contextlib.contextmanager
def _memory_bounded(nbytes: int) -> Iterator[None]:
    """Let allocations fail once this process holds `nbytes` more than now; the first of several threads sets the bound."""
    try:
        import resource

        found = re.search(r"^VmData:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except (ImportError, OSError):
        found = None
    if found is None:
        yield
        return
    with _limiting:
        _before.append(resource.getrlimit(resource.RLIMIT_DATA))
        if len(_before) == 1:
            hard, bound = _before[0][1], int(found[1]) * 1024 + nbytes
            resource.setrlimit(resource.RLIMIT_DATA, (bound if hard < 0 else min(bound, hard), hard))
    try:
        yield
    finally:
        with _limiting:
            first = _before[0]
            _before.pop()
            if not _before:
                resource.setrlimit(resource.RLIMIT_DATA, first)
