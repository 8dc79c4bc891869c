"""Making runs: on virtual ranks in this process, or on separate processes, one after the other."""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ringlab.comm.processes.launch import ProcessesFailedError, launch
from ringlab.comm.processes.rank_process import kill_this_process
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.comm.wrappers.faulty import Fault, Faulty
from ringlab.conformance.loading import load
from ringlab.conformance.meters import STALL, SendFault
from ringlab.conformance.rank import RankPart, WrongResult, trouble_of
from ringlab.conformance.runs import RAISED, Ran, RankResult, Run, Trouble, gave, join
from ringlab.conformance.target.claims import RING, Target, as_target
from ringlab.conformance.uses import kept_modes

VIRTUAL = "virtual"


@dataclass(frozen=True)
class TargetSpec:
    """A target for any process: a reference to import, or the target itself; and where it runs.

    transport: "virtual", or that of `ringlab.launch`. claims: what replaces the target's own claims.
    """

    what: str | Any
    transport: str = VIRTUAL
    device: str = "cpu"
    claims: dict[str, Any] = field(default_factory=dict)

    def target(self) -> Target:
        """Return the target. Raises: any error of its import."""
        if isinstance(self.what, str):
            return load(self.what, **self.claims)
        return as_target(self.what, **self.claims)

    def claiming(self, **claims: Any) -> TargetSpec:
        """Return the same target with these claims in place of its own."""
        return replace(self, claims={**self.claims, **claims})


def transport_of(over: str, transport: str) -> str:
    """Return the transport of a target over `over` if `transport` was requested."""
    if over == RING:
        return transport
    return "gloo" if transport == VIRTUAL else transport


def on_virtual_ranks(target: Target, run: Run, device: str = "cpu", folder: Path | None = None) -> Ran:
    """Return the outcome of the run on virtual ranks. folder: where each rank leaves its thread, for `stacks`."""
    returned: list[int] = []
    failed: list[int] = []
    struck: list[Fault] = []
    faults = _faults(run)
    for place in folder.glob("*.place") if folder is not None else ():
        place.unlink()

    def program(ring: Ring) -> RankResult:
        comm = Faulty(ring.comm, faults) if faults else ring.comm
        if folder is not None:
            _stand(folder, ring.rank)
        try:
            result = RankPart(target, run, ring.rank, Ring(comm), device).result()
            returned.append(ring.rank)
            return result
        except BaseException as error:
            failed.append(ring.rank)
            if isinstance(error, WrongResult):
                returned.append(ring.rank)
            raise
        finally:
            struck.extend(comm.fired if isinstance(comm, Faulty) else ())

    start = time.monotonic()
    try:
        with kept_modes():
            outcome = VirtualCluster(run.P, memory=False).run(program)
        ran = join(run, outcome.results)
    except Exception as error:
        ran = Ran(run, trouble=described(error), returned=tuple(sorted(returned)))
        ran.failed = failed[0] if failed else -1
    ran.spared = run.fault.startswith("dies") and not struck
    ran.seconds = time.monotonic() - start
    return ran


def on_processes(spec: TargetSpec, transport: str, numbered: Sequence[tuple[int, Run]], folder: Path) -> None:
    """Make runs of one number of ranks in one launch; each rank leaves its result in `folder`.

    Raises: what `launch` raises where a run fails; those after it are not made.
    """
    world_size = numbered[0][1].P
    launch(
        _program, world_size, spec, transport, tuple(numbered), str(folder),
        timeout=3600.0, transport=transport, memory=False,
    )  # fmt: skip


def _program(
    ring: Ring, spec: TargetSpec, transport: str, numbered: Sequence[tuple[int, Run]], folder: str
) -> None:
    target = spec.target()
    tell_stacks(Path(folder), ring.rank)
    for index, run in numbered:
        ring.barrier()
        if ring.rank == 0:
            begins(Path(folder), index)
        try:
            result = on_this_rank(target, run, ring, spec.device)
        except BaseException as error:
            leave(rank_path(Path(folder), index, ring.rank), RankResult(trouble=described(error)))
            raise
        leave(rank_path(Path(folder), index, ring.rank), result)


def on_this_rank(target: Target, run: Run, ring: Ring, device: str) -> RankResult:
    """Return this rank's results of the run, on the ring of its processes. Raises: what the target raises."""
    given, on_send = _with_fault(ring, run, target.over == RING)
    start = time.monotonic()
    with kept_modes():
        result = RankPart(target, run, ring.rank, given, device, on_send).result()
    result.seconds = time.monotonic() - start
    return result


def _with_fault(ring: Ring, run: Run, over_ring: bool) -> tuple[Ring | None, Callable[[], None]]:
    """The target's ring, if any, and the function called at its sends over torch.distributed."""
    faults = _faults(run)
    if over_ring:
        comm = Faulty(ring.comm, faults, die=lambda fault: kill_this_process()) if faults else ring.comm
        return Ring(comm), lambda: None
    return None, SendFault(run.fault if ring.rank == 1 else "", run.P, kill_this_process)


def _faults(run: Run) -> tuple[Fault, ...]:
    exchange = {"dies at once": 0, "dies": min(1, run.P - 2), "dies in backward": run.P}.get(run.fault)
    if exchange is not None:
        return (Fault("kill", rank=1, exchange=exchange),)
    if run.fault == "stalls":
        return (Fault("delay", rank=1, exchange=0, seconds=STALL), Fault("delay", 1, 1, seconds=STALL))
    return ()


def described(error: BaseException) -> Trouble:
    """Return the text of an exception of a run, or if it has none its type and the line that raised it.

    Lone surrogates, which no file can hold, are written as escapes.
    """
    trouble = trouble_of(error)
    trouble = replace(trouble, text=trouble.text.encode(errors="backslashreplace").decode())
    if not trouble.text.endswith(": "):
        return trouble
    while type(error).__name__.endswith("FailedError") and error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    where = f", raised by {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return replace(trouble, text=f"{trouble.text.removesuffix(': ')} without a text{where}")


def first_trouble(failure: Exception | None, parts: Sequence[Any]) -> Trouble | None:
    """Return the report of the rank that failed first; others often report only that it has ended."""
    troubles = {rank: part.trouble for rank, part in enumerate(parts) if part is not None and part.trouble}
    first = failure.rank if isinstance(failure, ProcessesFailedError) else -1
    order = sorted(troubles, key=lambda rank: (troubles[rank].kind == RAISED, rank != first, rank))
    return troubles[order[0]] if order else None


def crash_in(failure: Exception | None) -> Trouble | None:
    """Return how the first process without a result ended, if there is one."""
    for rank, text in sorted(_texts_of_ranks(failure).items()):
        if text.startswith(("its process ended", "killed by signal")):
            return Trouble("crashed", f"rank {rank}: {text}")
    return None


def stopped_in(failure: Exception | None, parts: Sequence[RankResult | None]) -> tuple[int, ...]:
    """Return the ranks that went on after another one had failed, and had to be stopped; none if some rank raised an error.

    Then the target does notice, and a rank that still waits does so inside gloo, which now and then misses that its peer is gone.
    """
    if any(part is not None and part.trouble is not None for part in parts):
        return ()
    texts = _texts_of_ranks(failure)
    return tuple(rank for rank, text in texts.items() if text.startswith("stopped by launch"))


def _texts_of_ranks(failure: Exception | None) -> dict[int, str]:
    return failure.errors if isinstance(failure, ProcessesFailedError) else {}


def rank_path(folder: Path, index: int, rank: int) -> Path:
    """Return the file for one rank's result of run `index`."""
    return folder / f"{index}-{rank}.rank"


def ran_path(folder: Path, index: int) -> Path:
    """Return the file for the outcome of run `index`."""
    return folder / f"{index}.ran"


def begins(folder: Path, index: int) -> None:
    """Record that run `index` is being made."""
    leave(folder / "now", index)


def tell_stacks(folder: Path, rank: int | None = None) -> None:
    """Let SIGUSR1 write where each thread of this process stands into the folder. rank: that of this thread, if it is one."""
    if hasattr(signal, "SIGUSR1"):
        file = (folder / f"{os.getpid()}.stack").open("w")
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        _kept.append(file)
    if rank is not None:
        _stand(folder, rank)


_kept: list[Any] = []  # files that faulthandler writes to


def _stand(folder: Path, rank: int) -> None:
    """Leave the process and the thread of a rank in the folder."""
    leave(folder / f"{rank}.place", (os.getpid(), threading.get_ident()))


def stacks(folder: Path, P: int) -> str:
    """Return where each of P ranks stands, as the end of a sentence; "" if no process tells."""
    places = {rank: folder / f"{rank}.place" for rank in range(P)}
    found = {rank: pickle.loads(path.read_bytes()) for rank, path in places.items() if path.exists()}
    told = {pid: _told(folder / f"{pid}.stack", pid) for pid in {pid for pid, _ in found.values()}}
    if not any(told.values()):
        return ""
    words = {rank: stands_in(told[pid], ident) for rank, (pid, ident) in found.items() if told[pid]}
    return "".join(f"; rank {rank} {words.get(rank, 'has not begun')}" for rank in range(P))


def _told(path: Path, pid: int) -> str:
    """What a process says of its threads, "" if it says nothing in time."""
    try:
        os.kill(pid, signal.SIGUSR1)
    except (OSError, AttributeError):
        return ""
    text, end = "", time.monotonic() + _STACK_SECONDS
    while time.monotonic() < end:
        time.sleep(0.2)
        before, text = text, path.read_text(errors="replace") if path.exists() else ""
        if text and text == before:
            return text
    return text


def stands_in(stack: str, ident: int) -> str:
    r"""Return where a thread stands, from faulthandler's account of all threads: up to three calls, the innermost first.

    Calls of torch, of Python's library and of ringlab are left out, unless there is no other.

    >>> stands_in('Thread 0x2a (most recent call first):\n  File "/a/torch/b.py", line 2 in c\n  File "/a/d.py", line 3 in e\n', 42)
    'waits in e (d.py, line 3)'
    """
    threads = re.split(r"(?m)^(?=Current thread|Thread)", stack)
    own = next((each for each in threads if re.match(rf"(Current t|T)hread 0x0*{ident:x} ", each)), None)
    return "has ended" if own is None else _in_words(re.findall(r'File "(.+)", line (\d+) in (\S+)', own))


def _in_words(frames: Sequence[tuple[str, Any, str]]) -> str:
    """Calls, the innermost first, as (file, line, function)."""
    outside = [each for each in frames if not _is_of_library(each[0])]
    of_target = [each for each in outside if not each[0].startswith(_OWN)] or outside or frames
    calls = [f"{function} ({Path(file).name}, line {line})" for file, line, function in of_target[:3]]
    return f"waits in {', called by '.join(calls)}" if calls else "waits"


def _is_of_library(file: str) -> bool:
    return (
        file.startswith("<frozen")
        or f"{os.sep}torch{os.sep}" in file
        or (_LIBRARY in file and "site-packages" not in file)
    )


_STACK_SECONDS = 5.0
_LIBRARY = f"{os.sep}lib{os.sep}python{sys.version_info.major}.{sys.version_info.minor}{os.sep}"
_OWN = tuple(str(Path(__file__).parents[1] / name) + os.sep for name in ("comm", "conformance"))


def leave(path: Path, value: Any) -> None:
    """Write a pickle atomically."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)


def ranks_left(folder: Path, index: int, P: int) -> list[Any]:
    """Return each rank's result of run `index`, None if there is none yet."""
    paths = [rank_path(folder, index, rank) for rank in range(P)]
    return [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]


def returned_in(run: Run, parts: Sequence[RankResult | None]) -> tuple[int, ...]:
    """Return the ranks of processes on which the target returned; none if a shard had a wrong shape and some rank said so.

    That error ends the job. Another rank may have been done before it, and cannot know.
    """
    said = any(
        part is not None and part.trouble is not None and part.trouble.kind == RAISED for part in parts
    )
    return () if said and run.fault == "wrong shape" else gave(parts)


def any_left(folder: Path, index: int, run: Run) -> bool:
    """Return whether some rank has left a result, or its error."""
    return any(rank_path(folder, index, rank).exists() for rank in range(run.P))


def joined(folder: Path, index: int, run: Run) -> Ran | None:
    """Return the outcome of run `index` on processes, None unless every rank has left a result."""
    if not all(rank_path(folder, index, rank).exists() for rank in range(run.P)):
        return None
    parts = [part for part in ranks_left(folder, index, run.P) if part is not None and part.trouble is None]
    if len(parts) < run.P:
        return None
    ran = join(run, parts)
    ran.spared = run.fault.startswith("dies")  # a process that died would have left no result
    return ran


def one_thread() -> None:
    """Restrict torch to one thread: a run has enough ranks."""
    torch.set_num_threads(1)
