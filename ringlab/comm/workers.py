"""The threads that compute on behalf of virtual ranks."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ringlab.comm.threads import Job


class Workers:
    """Runs jobs: those that may, side by side with other ranks', on as many threads as torch may use.

    Every thread that calls torch gets a team of OpenMP threads of its own. So torch's threads are
    divided among the workers: two ranks on one thread each lose no time at the barriers inside an
    operator. Other jobs, and all where there is nothing to divide, run on the calling thread.
    """

    def __init__(self, ranks: int) -> None:
        self.threads = torch.get_num_threads()
        self.count = min(ranks, self.threads)
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, job: Job) -> Future[None]:
        """Return the future of `job`, which keeps its own result and exception."""
        if self.count == 1 or not job.side_by_side:
            job.run()
            done: Future[None] = Future()
            done.set_result(None)
            return done
        self._pool = self._pool or self._start()
        return self._pool.submit(job.run)

    def stop(self) -> None:
        """End the threads as soon as the jobs under way are done; does not wait for them."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(self.count, "compute", _use, (self.threads // self.count,))
        everyone = threading.Barrier(self.count)
        for started in [pool.submit(everyone.wait) for _ in range(self.count)]:
            started.result()
        torch.set_num_threads(self.threads)  # the default for threads to come, which _use has changed
        return pool


def _use(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.get_num_threads()  # makes the number stick to this thread


def copy_alone(source: Tensor, into: Tensor) -> None:
    """Copy on this thread only: torch would wake its OpenMP team, to spin beside the workers."""
    source, into = source.detach(), into.detach()
    if all(
        x.device.type == "cpu" and x.is_contiguous() and not x.is_conj() and not x.is_neg()
        for x in (source, into)
    ):
        np.copyto(into.flatten().view(torch.uint8).numpy(), source.flatten().view(torch.uint8).numpy())
    else:
        into.copy_(source)
