"""The process of one rank, `python -m ringlab.comm.processes.rank_process FOLDER RANK PARENT`."""

from __future__ import annotations

import ctypes
import json
import linecache
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringlab.comm.processes.failure_board import STARTING, Journal

STARTUP = 120.0  # seconds in which all ranks must import torch and connect; enough for a slow machine


@dataclass(frozen=True)
class Job:
    """The program, its arguments and its options, which the parent pickles once for all ranks."""

    program: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    port: int
    transport: str
    message_timeout: float
    threads: int
    faults: tuple[Any, ...]
    memory: bool
    grad: bool
    cells: dict[str, Any]  # sources that are not in files, as entries of linecache
    watched: bool = False  # whether the parent wants to see events while the ranks run


@dataclass
class Report:
    """The report of one rank: its pickled result; or its error as a traceback, as a message, and pickled."""

    result: bytes | None = None
    events: list[Any] = field(default_factory=list)
    memory: Any = None
    error: str | None = None
    message: str = ""
    exception: bytes | None = None


def report_path(folder: Path, rank: int) -> Path:
    """Return the file to which `rank` writes its report."""
    return folder / f"rank-{rank}.report"


def journal_path(folder: Path, rank: int) -> Path:
    """Return the file to which `rank` writes its current action."""
    return folder / f"rank-{rank}.journal"


def main(folder: Path, rank: int, parent: int) -> int:
    """Run one rank, write its report into `folder`, and return its exit status."""
    die_with(parent)
    journal = Journal(journal_path(folder, rank))
    journal.write(STARTING)
    report = Report()
    try:
        _run(folder, rank, journal, report)
    except BaseException as error:
        report.result, report.error, report.exception = None, _traceback(error), _pickled(error)
        report.message = f"{type(error).__name__}: {error}"
    _leave(report, report_path(folder, rank))
    return 0 if report.error is None else 1


def die_with(parent: int) -> None:
    """Make this process end when its parent ends, in whatever way (only on Linux)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def kill_this_process() -> None:
    """Kill this process with SIGKILL, as the system's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def _run(folder: Path, rank: int, journal: Journal, report: Report) -> None:
    import cloudpickle

    from ringlab.comm.processes.failure_board import Told, events_path

    sys.path[:] = json.loads((folder / "path.json").read_text())
    port = json.loads((folder / "port.json").read_text())
    board = _board(port)
    try:
        job: Job = cloudpickle.loads((folder / "job.pickle").read_bytes())
        _run_job(job, rank, board, journal, report, Told(events_path(folder, rank)) if job.watched else [])
    except BaseException as error:
        board.record(rank, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        raise


def _board(port: int) -> Any:
    import torch.distributed as dist

    from ringlab.comm.processes.failure_board import Board

    return Board(dist.PrefixStore("board", _store(port)))


def _store(port: int) -> Any:
    from datetime import timedelta

    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=STARTUP))


def _run_job(job: Job, rank: int, board: Any, journal: Journal, report: Report, events: list[Any]) -> None:
    import cloudpickle
    import torch

    from ringlab.comm.memory import MemoryMeter
    from ringlab.comm.processes.connect import closing, join
    from ringlab.comm.ring import Ring
    from ringlab.comm.trace import Trace
    from ringlab.comm.wrappers.traced import Traced

    linecache.cache.update(job.cells)
    torch.set_num_threads(job.threads)
    trace, meter = Trace(job.world_size, events), MemoryMeter(rank)
    if job.memory:
        # Use the meter before the clock starts, because its first use makes torch import some 900 modules.
        with meter.watch():
            torch.empty(0)
    startup, store = max(STARTUP, job.message_timeout), _store(job.port)
    comm = join(
        job.transport, startup, job.message_timeout, store, rank, job.world_size, rank,
        board=board, note=journal.write,
    )  # fmt: skip
    journal.write("connected")
    with closing(comm):
        ring = Ring(Traced(_with_faults(comm, job.faults), trace))
        with torch.set_grad_enabled(job.grad), meter.watch() if job.memory else nullcontext():
            result = job.program(ring, *job.args)
        report.result = cloudpickle.dumps(result)
        report.events, report.memory = trace.events, meter.report()


def _with_faults(comm: Any, faults: tuple[Any, ...]) -> Any:
    if not faults:
        return comm
    from ringlab.comm.wrappers.faulty import Faulty

    return Faulty(comm, faults, die=lambda fault: kill_this_process())


def _traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this module, so that it begins in the program."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()


def _pickled(error: BaseException) -> bytes | None:
    import cloudpickle

    try:
        content = cloudpickle.dumps(error.with_traceback(None))
        cloudpickle.loads(content)  # some exceptions can be pickled but not unpickled
    except Exception:
        return None
    return content


def _leave(report: Report, path: Path) -> None:
    """Write the report so that the file is either complete or absent."""
    import cloudpickle

    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(cloudpickle.dumps(report))
    unfinished.rename(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
