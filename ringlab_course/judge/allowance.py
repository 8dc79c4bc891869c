"""Limits on the CPU seconds of one tier's checks, and on the memory of all workers together.

Wall time depends on who else uses the machine, and a class is graded on all cores at once. So the judge
counts the processor time of the workers, including all their threads and processes, from the moment when the
code is loaded. Starting and importing do not count. Sleeping does not count either, but each call has a
deadline in wall time. Memory is measured from outside while the workers run.

The time and memory that the judge spends on reading an answer are also limited, because a legal answer may
be small on the wire and still take forever to compare.
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
"""CPU seconds for all checks of one function in a tier; visible checks have to answer quickly."""


class Allowance:
    """The remaining seconds for one tier's checks of one function; `patience` multiplies all limits.

    A running call is not interrupted, but the next call is refused. So the seconds used may exceed the limit
    by one call, which has its own deadline.
    """

    def __init__(self, patience: float = 1.0) -> None:
        self.patience, self.tier = patience, ""
        self.computed, self._begin = Meter(_cpu), 0.0

    def begin(self, tier: str) -> None:
        """Start the time limit for the checks of `tier` of one function."""
        self.tier, self._begin = tier, self.computed.total()

    @property
    def seconds(self) -> float:
        """The CPU seconds that the tier allows, or infinity before the first tier has begun."""
        return SECONDS[self.tier] * self.patience if self.tier else float("inf")

    @property
    def used(self) -> float:
        """The CPU seconds used since the tier began."""
        return self.computed.total() - self._begin

    def require(self) -> None:
        """Check that some seconds are left. Raises: Crashed, with a message for the learner."""
        if self.tier and self.used > self.seconds:
            raise Crashed(
                f"Not run: the {self.tier} checks of one function may take {self.seconds:g} s of computing together, and "
                "the checks before this took more. Is something slow done once per token, or in every step? "
                "(Only the processor's time counts; other work on the machine does not.)"
            )


class Meter:
    """The total growth of a figure over all added workers, including workers that have ended.

    read: returns the figure of one worker.
    """

    def __init__(self, read: Callable[[WorkerProcess], float]) -> None:
        self._read = read
        self._since: dict[WorkerProcess, float] = {}
        self._ended = 0.0

    def add(self, worker: WorkerProcess) -> None:
        """Start to count `worker`; only growth after this call counts."""
        self._since[worker] = self._read(worker)

    def remove(self, worker: WorkerProcess) -> None:
        """Keep the worker's growth and stop counting it. Call this before the worker is killed."""
        if worker in self._since:
            self._ended += max(0.0, self._read(worker) - self._since.pop(worker))

    def total(self) -> float:
        """Return the total growth up to now."""
        return self._ended + sum(
            max(0.0, self._read(worker) - since) for worker, since in self._since.items()
        )


def _cpu(worker: WorkerProcess) -> float:
    return sum(map(cpu_seconds, worker.processes()))


class Waits(Meter):
    """The seconds for which a submission's workers, and the judge's thread for them, waited for a processor.

    Other programs use the machine too, so this time is not the submission's fault. Threads that wait at the
    same time all count, so the sum is the largest delay that waiting can have caused.
    """

    def __init__(self) -> None:
        super().__init__(
            lambda worker: waited_seconds(each for pid in worker.processes() for each in threads(pid))
        )

    def total(self) -> float:
        """Return the total up to now, including that of the calling thread."""
        return super().total() + waited_seconds([Path("/proc/thread-self")])


INTERVAL_S = 0.1


class Watch:
    """Ends all watched workers when together they hold more memory, or run more tasks, than allowed.

    The kernel's own limits hold for a single process, so a submission with several ranks or processes could
    exceed them. `exceeded` says which limit was exceeded, and is empty before that.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self.exceeded = bounds, ""
        self._workers: list[WorkerProcess] = []
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, worker: WorkerProcess) -> None:
        """Watch `worker` from now on; it must be ready."""
        with self._lock:
            self._workers.append(worker)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def remove(self, worker: WorkerProcess) -> None:
        """Stop watching `worker`.

        Call this before it is killed, as its process id may be reused afterwards.
        """
        with self._lock:
            self._workers = [each for each in self._workers if each is not worker]

    def close(self) -> None:
        """Stop watching, and return when the watching thread has ended."""
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
"""Limits for one check in the judge itself: seconds of its thread, and additional bytes of its process."""
_limiting = threading.Lock()
_before: list[tuple[int, int]] = []  # the memory limit to restore, once per thread that sets one


class UnreadableAnswer(Failure):
    """An answer that takes the judge more time or memory than allowed."""


class _Exhausted(BaseException):
    """One check has taken the judge too long.

    This is not an Exception, so that no check can catch it by mistake.
    """


@contextlib.contextmanager
def reading(seconds: float = READING_S, nbytes: int = READING_BYTES) -> Iterator[None]:
    """Limit this thread's processor time and this process's additional memory inside the block.

    Raises: UnreadableAnswer, with a message for the learner, if a limit is exceeded.
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
    """Raise _Exhausted in this thread after `seconds` of processor time; waiting does not count."""
    if not hasattr(time, "pthread_getcpuclockid"):  # Windows and macOS, where there is no sandbox
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
        if struck:  # wait here until the error has been raised, so that it is not raised later
            with contextlib.suppress(_Exhausted):
                for _ in range(1000):
                    pass


def _raise_in(thread: int, error: type[BaseException]) -> None:
    # Never pass NULL to cancel the error, because CPython then searches without end for the error to cancel,
    # and a profiled call waits for this search.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


@contextlib.contextmanager
def _memory_bounded(nbytes: int) -> Iterator[None]:
    """Make allocations fail once this process holds `nbytes` more than now.

    If several threads set a limit, the first one's limit holds.
    """
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
