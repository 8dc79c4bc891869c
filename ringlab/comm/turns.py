"""Who runs: one rank at a time, in an order that never depends on the clock.

A rank passes the turn straight to the next one; nobody stands between them. While a rank computes
what is marked `side_by_side`, the others may come up to their own computations, as many at once as
torch has threads. A rank goes on in its turn, not when its computation happens to be done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ringlab.comm.threads import RankThread, let_through
from ringlab.comm.waiting import Waiting

T = TypeVar("T")


class Turns:
    """The right to run, passed around among `threads`; `ready` holds those that can use it, in order."""

    def __init__(self, threads: Sequence[RankThread], stuck: Callable[[], None]) -> None:
        self.ready: deque[RankThread] = deque(threads)
        self.stuck = stuck
        self.places = _Places(len(threads))
        self._caller = threading.Lock()
        self._caller.acquire()
        self._errand: Callable[[], None] | None = None
        self._crash: BaseException | None = None

    def run(self) -> None:
        """Return when all ranks have ended; meanwhile do on this thread what they cannot do themselves.

        `stuck` is called when no rank can go on; it makes ranks ready, or none if all have ended.
        """
        try:
            self.pass_on()
            while True:
                self._caller.acquire()
                if self._errand is None:
                    break
                errand, self._errand = self._errand, None
                errand()
                self.pass_on()
        finally:
            self.places.use_all()
        if self._crash is not None:
            raise self._crash

    def pass_on(self) -> None:
        """Give the turn to the rank that is next, or to the caller of `run` at the end."""
        if not self.ready:
            self.stuck()
        if self.ready:
            self.ready.popleft().resume()
        else:
            let_through(self._caller)

    def block(self, thread: RankThread, work: Waiting) -> None:
        """Return when `work` is done. Raises: whatever `thread.interrupt` was set to meanwhile."""
        thread.waiting = work
        self.pass_on()
        thread.pause()
        thread.waiting = None
        if thread.interrupt is not None:
            error, thread.interrupt = thread.interrupt, None
            raise error

    def ended(self, thread: RankThread) -> None:
        """Pass on the turn of a rank whose program has ended."""
        try:
            self.pass_on()
        except BaseException as error:  # else the caller of `run` would wait forever
            self._crash = error
            self.ready.clear()
            let_through(self._caller)

    def beside(self, thread: RankThread, function: Callable[[], T]) -> T:
        """Return `function()`, computed here while other ranks have the turn."""
        self.ready.append(thread)
        if self.places.take():
            self.pass_on()
        thread.computing = True
        try:
            with self.places.threads():
                return function()
        finally:
            thread.computing = False
            if self.places.leave():
                self.pass_on()
            thread.pause()

    def by_caller(self, thread: RankThread, function: Callable[[], T]) -> T:
        """Return `function()`, computed on the thread of `run`: all of torch's threads, one team for all ranks."""
        answer: list[Any] = []

        def errand() -> None:
            try:
                answer.extend((function(), None))
            except Exception as error:
                answer.extend((None, error))

        self.ready.append(thread)
        self._errand = errand
        let_through(self._caller)
        thread.pause()
        result, error = answer
        if error is not None:
            raise error
        return result


class _Places:
    """Places for computations side by side; torch's threads are divided among them.

    Every thread that calls torch gets a team of OpenMP threads of its own: two ranks on one thread
    each lose no time at the barriers inside an operator.
    """

    def __init__(self, ranks: int) -> None:
        self.all_threads = torch.get_num_threads()
        self.count = min(ranks, self.all_threads)
        self._share = self.all_threads // self.count
        self._lock = threading.Lock()
        self._taken = 0
        self._turn_waits = False

    def use_all(self) -> None:
        """Let this thread, and threads to come, use all of torch's threads."""
        if self._share != self.all_threads:
            torch.get_num_threads()  # the first call on a thread forgets what was set on it before
            torch.set_num_threads(self.all_threads)

    def take(self) -> bool:
        """Take a place; return whether another is free, so that the turn may be passed on at once."""
        with self._lock:
            self._taken += 1
            self._turn_waits = self._taken == self.count
            return not self._turn_waits

    def leave(self) -> bool:
        """Give the place back; return whether the turn waited for that and must now be passed on."""
        with self._lock:
            self._taken -= 1
            waited, self._turn_waits = self._turn_waits, False
            return waited

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Compute with this place's share of torch's threads."""
        if self._share == self.all_threads:
            yield
            return
        torch.set_num_threads(self._share)
        try:
            yield
        finally:
            self.use_all()
