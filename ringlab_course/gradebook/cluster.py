"""Grade on a Dask cluster. Notebooks are sent as bytes, so workers need only ringlab and bubblewrap."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from ringlab.errors import CourseError, require_package
from ringlab_course.gradebook.pool import Job, Judge, Outcome, carry_out, carry_out_elsewhere, one_line
from ringlab_course.gradebook.versions import OURS
from ringlab_course.judge.submission import FILE_BYTES

if TYPE_CHECKING:
    from distributed import Client

WAITING = 2  # jobs sent per thread of the cluster, so that no worker has to wait for its next one


class ClusterPool:
    """The workers of the Dask cluster whose scheduler is at `address`, such as tcp://192.0.2.7:8786.

    Raises: MissingExtraError without the extra `cluster`; CourseError if no scheduler answers within
    `timeout_s` seconds.
    """

    def __init__(self, address: str, judge: Judge | None = None, timeout_s: float = 20.0) -> None:
        self.judge = judge
        self.client: Client = connected(address, timeout_s)
        threads = sum(
            worker["nthreads"] for worker in self.client.scheduler_info(n_workers=-1)["workers"].values()
        )
        if not threads:
            self.client.close()
            raise CourseError(
                "a Dask cluster with workers", f"none at {address}", "start `dask worker ADDRESS`"
            )
        self.ahead = WAITING * threads

    def run(self, jobs: Sequence[Job], started: Callable[[Job], None]) -> Generator[Outcome, None, None]:
        """Yield an outcome for every job as jobs finish. Stopping early cancels the jobs that were sent."""
        from distributed import as_completed

        waiting = iter(jobs)
        sent: dict[Any, Job] = {}
        done = as_completed(loop=self.client.loop)
        try:
            while True:
                for job in itertools.islice(waiting, self.ahead - len(sent)):
                    started(job)
                    future = self._send(job)
                    if isinstance(future, Outcome):
                        yield future
                    else:
                        sent[future] = job
                        done.add(future)
                if not sent:
                    return
                future = next(done)
                yield _outcome(future, sent.pop(future))
        finally:
            self.client.cancel(list(sent), force=True)
            self.client.close()

    def _send(self, job: Job) -> Any:
        """Send a job to the cluster and return its future, or return the Outcome if nothing has to be sent.

        A file that is not a notebook is judged in this process and gets zero points.
        """
        try:
            data = _bytes_of(job)
        except OSError as error:
            if error.errno in OURS:
                return Outcome(job.number, None, reason=one_line(error))
            data = None
        if data is None:
            return carry_out(job, self.judge)
        return self.client.submit(
            carry_out_elsewhere, job, data, self.judge, pure=False, key=f"ringlab-{os.urandom(8).hex()}"
        )


def connected(address: str, timeout_s: float) -> Client:
    """Return a client of the scheduler at `address`.

    Raises: CourseError if there is no scheduler; MissingExtraError without distributed.
    """
    require_package("distributed", "cluster", "--scheduler, here and on the cluster")
    from distributed import Client

    try:
        return Client(address, timeout=timeout_s, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        got = f"{address}: {one_line(error)}"
        raise CourseError("the address of a Dask scheduler", got, "as `dask scheduler` prints it") from None


def _bytes_of(job: Job) -> bytes | None:
    descriptor = os.open(job.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        data = file.read(FILE_BYTES + 1)
    return data if len(data) <= FILE_BYTES else None


def _outcome(future: Any, job: Job) -> Outcome:
    try:
        found = future.result()
    except Exception as error:  # the worker died, has no ringlab, or failed in another way
        return Outcome(job.number, None, reason=one_line(error))
    return found if isinstance(found, Outcome) else Outcome(job.number, None, reason="no outcome came back")
