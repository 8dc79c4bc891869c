"""How much the checks of one tier may compute and hold: seconds of CPU, and bytes of all workers together.

Time on the wall belongs to whoever else uses the machine, and a class is graded on all cores at once. So the
processor time of the workers is counted, of every thread and process in them, from the moment that the
code is loaded; starting and importing are not the learner's. Sleeping costs nothing here: the deadline of
each call, on the wall, ends it. Memory is watched from outside while the workers run.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ringlab_course.checking.failures import Crashed
from ringlab_course.judge.processes import cpu_seconds, held
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
        self._since: dict[WorkerProcess, float] = {}
        self._ended = self._begin = 0.0

    def begin(self, tier: str) -> None:
        """Give the checks of `tier` of one function their seconds."""
        self.tier, self._begin = tier, self._total()

    def add(self, worker: WorkerProcess) -> None:
        """Count what `worker`, which has loaded the code, computes from now on."""
        self._since[worker] = _cpu(worker)

    def remove(self, worker: WorkerProcess) -> None:
        """Count what `worker` has computed, and no more of it. To be called before it is killed."""
        if worker in self._since:
            self._ended += max(0.0, _cpu(worker) - self._since.pop(worker))

    @property
    def seconds(self) -> float:
        """CPU seconds that the tier allows; without end before the first tier has begun."""
        return SECONDS[self.tier] * self.patience if self.tier else float("inf")

    @property
    def used(self) -> float:
        """CPU seconds used since the tier began."""
        return self._total() - self._begin

    def require(self) -> None:
        """Return while something is left. Raises: Crashed, with a message for the learner."""
        if self.tier and self.used > self.seconds:
            raise Crashed(
                f"Not run: the {self.tier} checks of one function may take {self.seconds:g} s of computing together, and "
                "those before took more. What takes so long: something done once per token, or again in every step? "
                "(What counts is the processor's time; other work on the machine does not.)"
            )

    def _total(self) -> float:
        return self._ended + sum(max(0.0, _cpu(worker) - since) for worker, since in self._since.items())


def _cpu(worker: WorkerProcess) -> float:
    return sum(map(cpu_seconds, worker.processes()))


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
