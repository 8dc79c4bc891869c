"""Runs made: on virtual ranks in this process, or on processes of their own, one after the other."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ringlab.comm.faulty import Fault, Faulty
from ringlab.comm.launch import launch
from ringlab.comm.ring import Ring
from ringlab.comm.virtual import VirtualCluster
from ringlab.comm.worker import kill_this_process
from ringlab.conformance.meters import STALL, SendFault
from ringlab.conformance.rank import RankPart, trouble_of
from ringlab.conformance.runs import Ran, RankResult, Run, join
from ringlab.conformance.target import RING, Target, as_target, load

VIRTUAL = "virtual"


@dataclass(frozen=True)
class Subject:
    """How to get at a target in any process: a reference to import, or the target itself; and where it runs.

    transport: "virtual", or that of `ringlab.launch`. claims: what replaces the target's own claims.
    """

    what: str | Any
    transport: str = VIRTUAL
    device: str = "cpu"
    claims: dict[str, Any] = field(default_factory=dict)

    def target(self) -> Target:
        """Return the target. Raises: what its import raises."""
        if isinstance(self.what, str):
            return load(self.what, **self.claims)
        return as_target(self.what, **self.claims)


def transport_of(target: Target, transport: str) -> str:
    """Return the transport on which a target runs where `transport` was asked for."""
    if target.over == RING:
        return transport
    return "gloo" if transport == VIRTUAL else transport


def on_virtual_ranks(target: Target, run: Run, device: str = "cpu") -> Ran:
    """Return what came of the run, on virtual ranks."""
    returned: list[int] = []

    def program(ring: Ring) -> RankResult:
        result = RankPart(target, run, ring.rank, ring, device).result()
        returned.append(ring.rank)
        return result

    start = time.monotonic()
    try:
        outcome = VirtualCluster(run.P, memory=False, faults=_faults(run)).run(program)
        ran = join(run, outcome.results)
    except Exception as error:
        ran = Ran(run, trouble=trouble_of(error), returned=tuple(sorted(returned)))
    ran.seconds = time.monotonic() - start
    return ran


def on_processes(subject: Subject, transport: str, numbered: Sequence[tuple[int, Run]], folder: Path) -> None:
    """Make runs of one number of ranks in one launch; each rank leaves its result in `folder`.

    Raises: what `launch` raises where a run fails; those after it are not made.
    """
    world_size = numbered[0][1].P
    launch(
        _program, world_size, subject, transport, tuple(numbered), str(folder),
        timeout=3600.0, transport=transport, memory=False,
    )  # fmt: skip


def _program(
    ring: Ring, subject: Subject, transport: str, numbered: Sequence[tuple[int, Run]], folder: str
) -> None:
    target = subject.target()
    for index, run in numbered:
        ring.barrier()
        if ring.rank == 0:
            begins(Path(folder), index)
        given, on_send = _with_fault(ring, run, target.over == RING)
        start = time.monotonic()
        try:
            result = RankPart(target, run, ring.rank, given, subject.device, on_send).result()
            result.seconds = time.monotonic() - start
        except BaseException as error:
            leave(rank_path(Path(folder), index, ring.rank), RankResult(trouble=trouble_of(error)))
            raise
        leave(rank_path(Path(folder), index, ring.rank), result)


def _with_fault(ring: Ring, run: Run, over_ring: bool) -> tuple[Ring | None, Callable[[], None]]:
    """The ring that the target is given, if any, and what happens at its sends over torch.distributed."""
    faults = _faults(run)
    if over_ring:
        comm = Faulty(ring.comm, faults, die=lambda fault: kill_this_process()) if faults else ring.comm
        return Ring(comm), lambda: None
    return None, SendFault(run.fault if ring.rank == 1 else "", run.P, kill_this_process)


def _faults(run: Run) -> tuple[Fault, ...]:
    if run.fault.startswith("dies"):
        return (Fault("kill", rank=1, exchange=min(1, run.P - 2) if run.fault == "dies" else run.P),)
    if run.fault == "stalls":
        return (Fault("delay", rank=1, exchange=0, seconds=STALL), Fault("delay", 1, 1, seconds=STALL))
    return ()


def rank_path(folder: Path, index: int, rank: int) -> Path:
    """Return the file for one rank's result of run `index`."""
    return folder / f"{index}-{rank}.rank"


def ran_path(folder: Path, index: int) -> Path:
    """Return the file for what came of run `index`."""
    return folder / f"{index}.ran"


def begins(folder: Path, index: int) -> None:
    """Write down that run `index` is being made."""
    leave(folder / "now", index)


def leave(path: Path, value: Any) -> None:
    """Write a pickle whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)


def ranks_left(folder: Path, index: int, run: Run) -> list[RankResult | None]:
    """Return what each rank has left of run `index`, None where nothing is there yet."""
    paths = [rank_path(folder, index, rank) for rank in range(run.P)]
    return [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]


def one_thread() -> None:
    """Keep torch to one thread: a run has ranks enough."""
    torch.set_num_threads(1)
