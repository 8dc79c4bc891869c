"""Threads that run only when they have the turn, and torch's dispatch modes, which belong to a thread."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch.utils import _python_dispatch as dispatch  # torch has no public name for a thread's modes
from torch.utils._python_dispatch import TorchDispatchMode

from ringlab.comm.memory import Watch
from ringlab.comm.virtual.waiting import Waiting

T = TypeVar("T")


class _Abandoned(BaseException):
    """The exception that ends a rank's thread if the run has ended before the rank."""


class RankThread:
    """The program of one rank.

    From `resume` until it passes on the turn, only this thread runs.
    """

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
        # The lock is locked until the rank gets the turn. It is faster than a semaphore.
        self._turn = threading.Lock()
        self._turn.acquire()
        self._thread: threading.Thread | None = None
        self._abandoned = self._left = False

    @property
    def is_current(self) -> bool:
        """Return whether the caller runs on this rank's thread, or for it (see `in_another_thread`)."""
        current = threading.current_thread()
        return (current.principal if isinstance(current, _Deputy) else current) is self._thread

    def resume(self) -> None:
        """Give the turn to this rank, and return at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"rank {self.rank}", daemon=True)
            self._thread.start()
        else:
            let_through(self._turn)

    def pause(self) -> None:
        """Wait until this rank has the turn again. Only the thread of this rank may call this method.

        Raises: an internal BaseException, which ends the thread, if the run has ended.
        """
        self._turn.acquire()
        if self._abandoned:
            raise _Abandoned

    def abandon(self, seconds: float = 5.0) -> None:
        """End the thread, whatever it is doing.

        Give up if the thread has not ended after `seconds` seconds.
        """
        thread, self._abandoned = self._thread, True
        deadline = time.monotonic() + seconds
        while thread is not None and thread.is_alive() and time.monotonic() < deadline:
            let_through(self._turn)
            thread.join(timeout=0.1)
            if thread.is_alive() and not self._left and thread.ident is not None:
                # The thread is computing and not waiting for its turn, for example in an endless loop that
                # was interrupted by Ctrl-C.
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
        except _Abandoned:  # raised a second time, while the thread was ending
            self._left = True
        if not self._abandoned:
            self.ended(self)


class _Deputy(threading.Thread):
    """A thread that acts for `principal`, the thread that starts it and waits for it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(name=f"deputy of {threading.current_thread().name}", daemon=True)
        self.principal = threading.current_thread()
        self.function = function
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.function()
        except BaseException as error:
            self.error = error


def in_another_thread(function: Callable[[], T]) -> T:
    """Return `function()`, called in a new thread, which may use the turn of the caller's rank.

    The new thread has no thread-local state of the caller, like a thread of autograd in which backward runs on
    a GPU. Raises: the errors of the function.

    >>> import threading
    >>> in_another_thread(threading.current_thread) is threading.current_thread()
    False
    """
    deputy = _Deputy(function)
    deputy.start()
    deputy.join()
    if deputy.error is not None:
        raise deputy.error
    value: T = deputy.value
    return value


def let_through(lock: threading.Lock) -> None:
    """Release `lock` if it is locked. When a run is abandoned, it may have been released already."""
    if lock.locked():
        lock.release()


def entered_modes() -> list[TorchDispatchMode]:
    """Return the active dispatch modes of this thread's program, such as that of a selective checkpoint."""
    modes: list[TorchDispatchMode] = dispatch._get_current_dispatch_mode_stack()
    return [mode for mode in modes if not isinstance(mode, Watch)]


@contextmanager
def inside_modes(modes: list[TorchDispatchMode]) -> Iterator[None]:
    """Activate the modes of another thread. They are not entered again, because that could reset them."""
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
