"""What the workers of one submission hold together, watched from outside while they run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ringlab_course.judge.processes import held
from ringlab_course.judge.sandbox import Bounds

if TYPE_CHECKING:
    from ringlab_course.judge.process import WorkerProcess

INTERVAL_S = 0.1


class Watch:
    """Ends all workers it is told of as soon as together they hold more memory, or run more tasks, than they may.

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
