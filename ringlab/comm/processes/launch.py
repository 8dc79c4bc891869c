"""`launch` runs a program on real processes of this machine, and combines their errors into one."""

from __future__ import annotations

import json
import linecache
import math
import os
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from ringlab.comm.memory import MemoryReport
from ringlab.comm.processes import connect
from ringlab.comm.processes.children import Child, Children
from ringlab.comm.processes.failure_board import Board, Watch
from ringlab.comm.processes.rank_process import STARTUP, Job, Report, report_path
from ringlab.comm.trace import Outcome, Trace
from ringlab.errors import BackendError, CommError, RankFailedError, WorldSizeError

# The fraction of the launch's timeout after which a single wait fails. It is below 1, because the error of a
# wait says more than the error of the launch.
_MESSAGE_SHARE = 0.75


def launch(
    program: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    threads: int = 1,
    faults: Sequence[Any] | None = None,
    transport: str = "gloo",
    memory: bool = True,
    watch: Callable[[Trace], None] | None = None,
    message_timeout: float = math.inf,
) -> Outcome:
    """Return the outcome of `program(ring, *args)` on `world_size` processes of this machine.

    The program may be defined anywhere, even in a notebook's cell, because program, arguments and results are
    sent by cloudpickle. This process prints the ranks' output, each line after "[rank r]". No process is left
    behind.
    timeout: seconds, counted from the time at which all ranks are connected. One message may take three
    quarters of the timeout, or `message_timeout` if that is less.
    threads: the number of threads on which each rank computes.
    transport: see `connect`. On a GPU, each rank's CUDA device is set.
    watch: a function that this process calls with the trace so far. While the ranks run, it is called whenever
    the trace has grown, and after they have ended, once more. It uses the same processor as the ranks.
    `gantt.live` draws the trace.
    faults, memory: as for `VirtualCluster`.

    Raises: RankFailedError with the traceback of the rank that failed first, with the rank's exception as its
    cause, and with the text of each failed rank in `.errors`; TransportTimeout if the ranks do not end;
    WorldSizeError or BackendError for arguments that are out of range, or a transport that cannot run on this
    machine; CommError if the program cannot be pickled, or if the system cannot start a process.

    >>> import torch
    >>> from ringlab import VirtualCluster, launch
    >>> def program(ring, factor):
    ...     return factor * ring.shift(torch.tensor([ring.rank])).item()
    >>> VirtualCluster(2).run(program, 10).results  # threads of this process
    [10, 0]
    >>> launch(program, 2, 10).results  # the same on real processes  # doctest: +SKIP
    [10, 0]
    """
    _check(world_size, threads, timeout, transport)
    with tempfile.TemporaryDirectory(prefix="ringlab-") as name:  # only this user can read it
        folder, store = Path(name), _host_store()
        message_timeout = min(message_timeout, _MESSAGE_SHARE * timeout)
        job = Job(
            program, args, world_size, store.port, transport, message_timeout, threads,
            tuple(faults or ()), memory, torch.is_grad_enabled(), _cells(), watch is not None,
        )  # fmt: skip
        _write_job(folder, job)
        board = Board(dist.PrefixStore("board", store))
        with Children(folder, world_size, board, environment(threads)) as children:
            if watch is None:
                children.supervise(startup=STARTUP, timeout=timeout)
            else:
                watched = Watch(folder, world_size, watch)
                try:
                    children.supervise(startup=STARTUP, timeout=timeout, look=watched.look)
                finally:
                    watched.look_now()
            return _outcome(folder, children.all, board)


def _check(world_size: int, threads: int, timeout: float, transport: str) -> None:
    if not isinstance(world_size, int) or world_size < 1:
        raise WorldSizeError("a world size of 1 or more", repr(world_size), "launch(program, 2)")
    if not isinstance(threads, int) or threads < 1:
        raise BackendError("threads >= 1 for each rank", repr(threads))
    if not timeout > 0:
        raise BackendError("a timeout above 0 seconds", repr(timeout))
    connect.check(transport, world_size)


def _host_store() -> dist.TCPStore:
    """Return a store that listens on 127.0.0.1 only, on a port chosen by the system."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    limit = timedelta(seconds=STARTUP)
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=limit,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _cells() -> dict[str, Any]:
    """Return the sources of notebook cells, so that the ranks' tracebacks can quote them."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def _write_job(folder: Path, job: Job) -> None:
    try:
        content = cloudpickle.dumps(job)
    except Exception as error:
        raise CommError(
            "a program and arguments that can be sent to another process",
            f"{type(error).__name__}: {error}",
            "create objects that cannot be pickled (files, locks, sockets) inside the program",
        ) from error
    (folder / "job.pickle").write_bytes(content)
    (folder / "port.json").write_text(json.dumps(job.port))
    # '' means the current directory, from which a notebook or a shell imports modules
    (folder / "path.json").write_text(json.dumps([entry or os.getcwd() for entry in sys.path]))


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a rank's process that computes on `threads` threads."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    environment["PYTHONUNBUFFERED"] = "1"
    # Memory in pieces of a few megabytes is allocated and freed often. These variables make glibc keep freed
    # memory, because returning the pages and taking them again would slow the backward by a few percent.
    # Other C libraries ignore them.
    for name, value in (("MMAP_THRESHOLD_", 1 << 30), ("TRIM_THRESHOLD_", 4 << 30), ("TOP_PAD_", 64 << 20)):
        environment.setdefault(f"MALLOC_{name}", str(value))
    loopback = "lo" if sys.platform == "linux" else "lo0"
    environment.setdefault("GLOO_SOCKET_IFNAME", loopback)  # otherwise gloo looks up the host's name
    home = str(Path(__file__).resolve().parents[3])
    if home not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = home + (os.pathsep + before if before else "")
    return environment


class ProcessesFailedError(RankFailedError):
    """The RankFailedError of a launch.

    rank: the rank that failed first. errors: the text of each failed rank.
    """

    def __init__(
        self,
        needed: str,
        got: str = "",
        remedy: str = "",
        rank: int = -1,
        errors: dict[int, str] | None = None,
    ) -> None:
        super().__init__(needed, got, remedy)
        self.rank, self.errors = rank, errors or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.needed, self.got, self.remedy, self.rank, self.errors)


def _outcome(folder: Path, children: list[Child], board: Board) -> Outcome:
    reports = [_report(folder, child) for child in children]
    if any(report.error for report in reports):
        raise _failure(reports, board)
    trace = Trace(len(children), [event for report in reports for event in report.events])
    memory: list[MemoryReport] = [report.memory for report in reports]
    return Outcome([cloudpickle.loads(report.result or b"") for report in reports], trace, memory)


def _report(folder: Path, child: Child) -> Report:
    path = report_path(folder, child.rank)
    if path.exists():
        report: Report = cloudpickle.loads(path.read_bytes())
        return report
    ending = f"{child.ending()}; last: {child.doing()}"
    return Report(error=ending, message=ending)


def _failure(reports: list[Report], board: Board) -> ProcessesFailedError:
    """Return the error of the rank that failed first, with the messages of the other ranks."""
    errors = {rank: report.error for rank, report in enumerate(reports) if report.error}
    recorded = board.first_failure()
    first = recorded.rank if recorded is not None and recorded.rank in errors else min(errors)
    lines = [f"rank {first} failed first:", *_indented(errors[first])]
    for rank, report in enumerate(reports):
        if rank != first:
            lines += [f"rank {rank}:", *_indented(report.message or "ended without an error")]
    remedy = f"mend rank {first}'s error; those of the other ranks mostly follow from it"
    needed = f"the program to end on all {len(reports)} ranks"
    error = ProcessesFailedError(needed, "\n".join(lines), remedy, first, errors)
    content = reports[first].exception
    error.__cause__ = cloudpickle.loads(content) if content else None
    return error


def _indented(text: str) -> list[str]:
    return ["    " + line for line in text.splitlines()]
