"""Makes runs in a child process: on virtual ranks in the child, or on processes that the child starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from ringlab.comm.processes.launch import launch
from ringlab.comm.processes.rank_process import kill_this_process
from ringlab.comm.ring import Ring
from ringlab.comm.wrappers.faulty import Faulty
from ringlab.conformance.run.caller_state import kept_modes
from ringlab.conformance.run.faults import SendFault, faults_of
from ringlab.conformance.run.folder import begins, joined, leave, ran_path, rank_path, ranks_left
from ringlab.conformance.run.loading import VIRTUAL, TargetSpec, transport_of
from ringlab.conformance.run.rank import RankPart
from ringlab.conformance.run.run import Ran, RankResult, Run
from ringlab.conformance.run.stacks import tell_stacks
from ringlab.conformance.run.troubles import crash_in, described, first_trouble, returned_in, stopped_in
from ringlab.conformance.run.virtual import on_virtual_ranks
from ringlab.conformance.target.claims import RING, Target

Numbered: TypeAlias = Sequence[tuple[int, Run]]
"""Runs, each with its index among all runs in the folder."""


def make(folder: Path, spec: TargetSpec, target: Target, numbered: Numbered) -> None:
    """Make the runs that are not skipped, and write their outcomes to the folder. numbered: (index, run)."""
    transport = transport_of(target.over, spec.transport)
    if transport == VIRTUAL:
        for index, run in _wanted(folder, numbered):
            begins(folder, index)
            ran = on_virtual_ranks(target, run, spec.device, folder)
            leave(ran_path(folder, index), ran)
        return
    # Runs with these faults end their processes, so each of them needs its own launch.
    for _, group in groupby(numbered, lambda each: (each[1].P, each[0] if each[1].ends else -1)):
        left = list(_wanted(folder, group))
        while left:
            left = list(_wanted(folder, _launched(folder, spec, transport, left)))


def _launched(folder: Path, spec: TargetSpec, transport: str, numbered: Numbered) -> Numbered:
    """Carry out runs with the same number of ranks in one launch. Return the runs that remain after a failed run."""
    leave(folder / "now", -1)
    failure = None
    try:
        launch(
            _program, numbered[0][1].P, spec, transport, tuple(numbered), str(folder),
            timeout=3600.0, transport=transport, memory=False,
        )  # fmt: skip
    except Exception as error:
        failure = error
    for place, (index, run) in enumerate(numbered):
        ran = joined(folder, index, run)
        if ran is not None:
            leave(ran_path(folder, index), ran)
            continue
        parts = ranks_left(folder, index, run.P)
        reported = first_trouble(failure, parts)
        crash = None if run.ends else crash_in(failure)  # no crash if the run's fault ends a rank on purpose
        trouble = crash or reported or described(failure or RuntimeError("a rank left no result"))
        returned = returned_in(run, parts)
        ran = Ran(run, trouble=trouble, returned=returned, stopped=stopped_in(failure, parts))
        ran.failed = getattr(failure, "rank", -1)
        leave(ran_path(folder, index), ran)
        return numbered[place + 1 :]
    return []


def _wanted(folder: Path, numbered: Iterable[tuple[int, Run]]) -> Iterator[tuple[int, Run]]:
    """Yield the runs that were not skipped in the meantime, and mark the skipped ones as done."""
    for index, run in numbered:
        if (folder / f"{index}.skip").exists():
            leave(ran_path(folder, index), None)
        else:
            yield index, run


def _program(ring: Ring, spec: TargetSpec, transport: str, numbered: Numbered, folder: str) -> None:
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
    """Return this rank's results of the run, on the ring of its processes. Raises: the target's errors."""
    given, on_send = _with_fault(ring, run, target.over == RING)
    start = time.monotonic()
    with kept_modes():
        result = RankPart(target, run, ring.rank, given, device, on_send).result()
    result.seconds = time.monotonic() - start
    return result


def _with_fault(ring: Ring, run: Run, over_ring: bool) -> tuple[Ring | None, Callable[[], None]]:
    """Return the target's ring, if any, and the function to call at its sends over torch.distributed."""
    faults = faults_of(run)
    if over_ring:
        comm = Faulty(ring.comm, faults, die=lambda fault: kill_this_process()) if faults else ring.comm
        return Ring(comm), lambda: None
    return None, SendFault(run.fault if ring.rank == 1 else "", run.P, kill_this_process)
