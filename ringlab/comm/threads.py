"""A thread that runs only when it is told to, and hands work back to the one that told it."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from ringlab.comm.waiting import Waiting

T = TypeVar("T")


class _Abandoned(BaseException):
    """Unwinds a rank's thread after the run has ended without it."""


@dataclass(frozen=True)
class Job:
    """A computation of a rank; `side_by_side`: others may run at the same time."""

    run: Callable[[], None]
    side_by_side: bool


class RankThread:
    """The program of one rank; between `resume` and its return exactly this thread runs."""

    def __init__(self, rank: int, body: Callable[[int], Any]) -> None:
        self.rank = rank
        self.body = body
        self.result: Any = None
        self.error: BaseException | None = None
        self.waiting: Waiting | None = None
        self.interrupt: BaseException | None = None
        self.job: Future[None] | None = None
        self._job: Job | None = None
        # Each is held by the side that waits for it; plain locks hand over faster than semaphores.
        self._mine, self._theirs = threading.Lock(), threading.Lock()
        self._mine.acquire()
        self._theirs.acquire()
        self._thread: threading.Thread | None = None
        self._ended = self._abandoned = False

    @property
    def is_current(self) -> bool:
        """Whether the caller is this rank's own program."""
        return threading.current_thread() is self._thread

    @property
    def can_go_on(self) -> bool:
        """Whether the rank has blocked on something that is done by now."""
        return self.waiting is not None and self.waiting.done

    def resume(self) -> Job | None:
        """Let the rank run until it blocks or ends (None), or hands out a job, to be done before the next."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"rank {self.rank}", daemon=True)
            self._thread.start()
        else:
            _open(self._mine)
        self._theirs.acquire()
        job, self._job = self._job, None
        return job

    def abandon(self, seconds: float = 5.0) -> None:
        """End the thread, wherever it stands; give up on one that does not heed for `seconds`."""
        self._abandoned = True
        deadline = time.monotonic() + seconds
        while self._thread is not None and not self._ended and time.monotonic() < deadline:
            _open(self._mine)
            if not self._theirs.acquire(timeout=0.1) and self._thread.ident is not None:
                # It is not waiting for its turn: a loop without end, say, after Ctrl-C.
                unwind = ctypes.py_object(_Abandoned)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), unwind)
        if self._thread is not None and self._ended:
            self._thread.join()

    def hand_out(self, function: Callable[[], T], side_by_side: bool) -> T:
        """Return `function()`, done on whatever thread the caller of `resume` chooses."""
        answer: list[Any] = []

        def run() -> None:
            try:
                answer.extend((function(), None))
            except Exception as error:
                answer.extend((None, error))

        self._job = Job(run, side_by_side)
        self._hand_over()
        result, error = answer
        if error is not None:
            raise error
        return result

    def block(self, work: Waiting) -> None:
        """Return when `work` is done. Raises: whatever `interrupt` was set to meanwhile."""
        self.waiting = work
        self._hand_over()
        if self.interrupt is not None:
            error, self.interrupt = self.interrupt, None
            raise error

    def _hand_over(self) -> None:
        _open(self._theirs)
        self._mine.acquire()
        if self._abandoned:
            raise _Abandoned

    def _run(self) -> None:
        try:
            self.result = self.body(self.rank)
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._ended = True
            _open(self._theirs)


def _open(lock: threading.Lock) -> None:
    """Let whoever waits for `lock` through; it may have been opened before, when a run is abandoned."""
    if lock.locked():
        lock.release()
