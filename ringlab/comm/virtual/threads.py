"""A thread that runs only when it has the turn, and torch's dispatch modes, which belong to a thread."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch  # torch has no public name for the modes of a thread
from torch.utils._python_dispatch import TorchDispatchMode

from ringlab.comm.memory import Watch
from ringlab.comm.virtual.waiting import Waiting


class _Abandoned(BaseException):
    """Unwinds a rank's thread after the run has ended without it."""


class RankThread:
    """The program of one rank. From `resume` until it passes the turn on, exactly this thread runs."""

    def __init__(
        self, rank: int, body: Callable[[int], Any], ended: Callable[[RankThread], None] = lambda thread: None
    ) -> None:
        self.rank = rank
        self.body = body
        self.ended = ended
        self.result: Any = None
        self.error: BaseException | None = None
        self.waiting: Waiting | None = None
        self.interrupt: BaseException | None = None
        # A plain lock, held until the turn comes, hands over faster than a semaphore.
        self._turn = threading.Lock()
        self._turn.acquire()
        self._thread: threading.Thread | None = None
        self._abandoned = self._left = False

    @property
    def is_current(self) -> bool:
        """Return whether the caller is this rank's own program."""
        return threading.current_thread() is self._thread

    def resume(self) -> None:
        """Give the turn to this rank; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"rank {self.rank}", daemon=True)
            self._thread.start()
        else:
            let_through(self._turn)

    def pause(self) -> None:
        """Return when this rank, whose thread must be the caller, has the turn again.

        Raises: an internal BaseException, which ends the thread, if the run is over.
        """
        self._turn.acquire()
        if self._abandoned:
            raise _Abandoned

    def abandon(self, seconds: float = 5.0) -> None:
        """End the thread, wherever it stands; give up if it has not ended after `seconds`."""
        thread, self._abandoned = self._thread, True
        deadline = time.monotonic() + seconds
        while thread is not None and thread.is_alive() and time.monotonic() < deadline:
            let_through(self._turn)
            thread.join(timeout=0.1)
            if thread.is_alive() and not self._left and thread.ident is not None:
                # It is not waiting for its turn: a loop without end, say, after Ctrl-C.
                unwind = ctypes.py_object(_Abandoned)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), unwind)

    def _run(self) -> None:
        try:
            try:
                self.result = self.body(self.rank)
            except _Abandoned:
                pass
            except BaseException as error:
                self.error = error
            self._left = True
        except _Abandoned:  # once more, on the way out
            self._left = True
        if not self._abandoned:
            self.ended(self)


def let_through(lock: threading.Lock) -> None:
    """Release `lock` if it is held; it may be open already when a run is abandoned."""
    if lock.locked():
        lock.release()


def entered_modes() -> list[TorchDispatchMode]:
    """Return the dispatch modes that the program of this thread is in, such as that of a selective checkpoint."""
    modes: list[TorchDispatchMode] = dispatch._get_current_dispatch_mode_stack()
    return [mode for mode in modes if not isinstance(mode, Watch)]


@contextmanager
def inside_modes(modes: list[TorchDispatchMode]) -> Iterator[None]:
    """Be in modes that another thread is in, as they are: to enter one anew may reset it."""
    for mode in modes:
        dispatch._push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            dispatch._pop_mode()


def outside_modes() -> AbstractContextManager[None]:
    """Return a context in which no dispatch mode of this thread sees an operator."""
    return torch._C._DisableTorchDispatch()
