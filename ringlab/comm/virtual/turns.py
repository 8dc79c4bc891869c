"""The turns of ranks: one rank runs at a time, in an order that never depends on the clock.

A rank passes the turn directly to the next rank. Workers do the computations marked `thread_safe`. Meanwhile
the other ranks run until they, in turn, reach a computation. A rank continues when its turn comes, not when
its computation is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from ringlab.comm.virtual.threads import RankThread, let_through
from ringlab.comm.virtual.waiting import Waiting

T = TypeVar("T")


class Turns:
    """The turn to run, which `threads` pass to each other.

    `ready` contains the threads that can run, in order.
    """

    def __init__(self, threads: Sequence[RankThread], stuck: Callable[[], None]) -> None:
        self.ready: deque[RankThread] = deque(threads)
        self.stuck = stuck
        self._workers = _Workers(len(threads))
        self._caller = threading.Lock()
        self._caller.acquire()
        self._errand: Callable[[], None] | None = None
        self._crash: BaseException | None = None

    def run(self) -> None:
        """Run the ranks until all have ended. Computations that are not `thread_safe` run on this thread.

        `stuck` is called when no rank can continue. It makes ranks ready, or no rank if all ranks have ended.
        Raises: the error of a rank that could not pass on its turn after its program had ended.
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
            self._workers.stop()
        if self._crash is not None:
            raise self._crash

    def pass_on(self) -> None:
        """Give the turn to the next rank or, if all ranks have ended, to the caller of `run`."""
        if not self.ready:
            self.stuck()
        if self.ready:
            self.ready.popleft().resume()
        else:
            let_through(self._caller)

    def block(self, thread: RankThread, work: Waiting) -> None:
        """Wait until `work` is done. Raises: `thread.interrupt`, if it was set to an error meanwhile."""
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
        except BaseException as error:  # otherwise the caller of `run` would wait forever
            self._crash = error
            self.ready.clear()
            let_through(self._caller)

    def compute(self, thread: RankThread, function: Callable[[], T], thread_safe: bool) -> T:
        """Return `function()`. A worker or the caller of `run` computes it while other ranks have the turn."""
        job = _Job(function)
        self.ready.append(thread)
        if thread_safe and self._workers.count > 1:
            self._workers.submit(job)
            self.pass_on()
        else:  # runs on the thread of `run`'s caller, whose OpenMP team all ranks share
            self._errand = job.run
            let_through(self._caller)
        thread.pause()
        return job.result()


class _Job:
    """A computation. `result` waits until the computation is done."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function: Callable[[], Any] | None = function
        self._value: Any = None
        self._error: Exception | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        function, self._function = self._function, None
        assert function is not None
        try:
            self._value = function()
        except Exception as error:
            self._error = error
        finally:
            del function  # it refers to tensors, and the rank, which continues now, may count live tensors
            self._done.release()

    def result(self) -> Any:
        self._done.acquire()
        if self._error is not None:
            raise self._error
        value, self._value = self._value, None
        return value


class _Workers:
    """Threads that take jobs from one queue. torch's threads are divided among them.

    Every thread that calls torch gets its own team of OpenMP threads. A job on a team of one thread loses no
    time at the barriers inside an operator, and its worker takes the next job without waiting for another
    thread to wake up.
    """

    def __init__(self, ranks: int) -> None:
        self._all_threads = torch.get_num_threads()
        self.count = min(ranks, self._all_threads)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: _Job) -> None:
        if not self._threads:
            self._start()
        self._jobs.put(job)

    def stop(self) -> None:
        """End the threads when their current jobs are done. Wait at most a second for each thread."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _start(self) -> None:
        ready = threading.Barrier(self.count + 1)
        for number in range(self.count):
            name = f"compute {number}"
            self._threads.append(threading.Thread(target=self._work, args=(ready,), name=name, daemon=True))
            self._threads[-1].start()
        ready.wait()
        torch.set_num_threads(self._all_threads)  # the default for new threads, which workers have changed

    def _work(self, ready: threading.Barrier) -> None:
        torch.get_num_threads()  # the first call on a thread resets its number of threads
        torch.set_num_threads(self._all_threads // self.count)
        ready.wait()
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # it refers to tensors, and the next job may arrive much later
