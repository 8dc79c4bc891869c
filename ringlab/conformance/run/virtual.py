"""Makes runs on virtual ranks in this process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.comm.wrappers.faulty import Fault, Faulty
from ringlab.conformance.run.caller_state import kept_modes
from ringlab.conformance.run.faults import faults_of
from ringlab.conformance.run.loading import TargetSpec
from ringlab.conformance.run.rank import RankPart
from ringlab.conformance.run.run import RAISED, Ran, RankResult, Run, Trouble, join
from ringlab.conformance.run.stacks import leave_place
from ringlab.conformance.run.troubles import WrongResult, described
from ringlab.conformance.target.claims import Claims, Target, as_target
from ringlab.errors import PeerDiedError


def on_virtual_ranks(target: Target, run: Run, device: str = "cpu", folder: Path | None = None) -> Ran:
    """Return the outcome of the run on virtual ranks; each writes its thread id to `folder` for `stacks`."""
    returned: list[int] = []
    failed: list[int] = []
    struck: list[Fault] = []
    parts: dict[int, RankPart] = {}
    waits: dict[int, str] = {}  # for each rank that waited until another rank failed, what it waited for
    faults = faults_of(run)
    for place in folder.glob("*.place") if folder is not None else ():
        place.unlink()

    def program(ring: Ring) -> RankResult:
        comm = Faulty(ring.comm, faults) if faults else ring.comm
        if folder is not None:
            leave_place(folder, ring.rank)
        try:
            parts[ring.rank] = RankPart(target, run, ring.rank, Ring(comm), device)
            result = parts[ring.rank].result()
            returned.append(ring.rank)
            return result
        except BaseException as error:
            failed.append(ring.rank)
            if isinstance(error, PeerDiedError):
                waits[ring.rank] = error.waits
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
        # On real processes, such a call would hang before the harness could look at the other rank's result.
        hanging = [] if run.fault else _hanging(parts, ran.failed, waits)
        if hanging:
            assert ran.trouble is not None
            told = "; ".join(waits[rank] for rank in hanging)
            text = (
                f"{told}; the call has returned on rank {ran.failed}, which fails later: {ran.trouble.text}"
            )
            ran.trouble, ran.failed = Trouble(RAISED, f"DeadlockError: {text}"), hanging[0]
    ran.spared = run.fault.startswith("dies") and not struck
    ran.seconds = time.monotonic() - start
    return ran


def _hanging(parts: dict[int, RankPart], failed: int, waits: Iterable[int]) -> list[int]:
    """Return the ranks that wait in a call of the target which has returned on the rank that failed first."""
    over = parts[failed].returned if failed in parts else 0
    return sorted(rank for rank in waits if parts[rank].returned < parts[rank].begun <= over)


class InThisProcess:
    """Carries out runs in this process, on virtual ranks."""

    def __init__(self, spec: TargetSpec) -> None:
        self.target, self.device = spec.target(), spec.device
        self.skipped: set[Run] = set()

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def claims(self) -> Claims | Trouble:
        """Return the target's claims."""
        return self.target.claims()

    def skip(self, run: Run) -> None:
        """Skip a run that no check needs any more."""
        self.skipped.add(run)

    def made(self, runs: Sequence[Run]) -> Iterator[Ran]:
        """Yield the outcome of each run that was not skipped, in order."""
        for run in runs:
            if run not in self.skipped:
                yield on_virtual_ranks(self.target, run, self.device)

    def made_as(self, axes: str, runs: Sequence[Run]) -> Iterator[Ran]:
        """Yield the outcome of each run in order, with these axes of the target."""
        target = as_target(self.target, axes=axes)
        yield from (on_virtual_ranks(target, run, self.device) for run in runs)
