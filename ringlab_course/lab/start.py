"""Start a lab on the ranks that torchrun started or, without torchrun, on gloo processes of this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ringlab.comm.processes.connect import connect
from ringlab.comm.processes.launch import launch
from ringlab.comm.ring import Ring
from ringlab.errors import LabError, RankFailedError, RinglabError
from ringlab_course.lab.preflight import Finding, expect_ready, preflight, topology
from ringlab_course.lab.result import ResultFile, blame, header, reserve
from ringlab_course.lab.witness import LONGEST, SIGNALLED, Ended, Witness


class Settings(Protocol):
    """The settings of a lab: a frozen dataclass of plain values, one of which is `seed`."""

    @property
    def seed(self) -> int: ...

    def check(self, P: int) -> None:
        """Raise LabError unless the lab can run on `P` ranks."""
        ...

    def needed_bytes(self, P: int, rank: int, device: torch.device) -> int:
        """Return the most bytes that a rank allocates on `device`."""
        ...


Cases = Callable[[Ring, Any, torch.device], Iterator[dict[str, Any]]]
"""A lab's program for every rank: (ring, settings, device) → cases, as they end. Only those of rank 0 are written."""


@dataclass(frozen=True)
class Start:
    """The way in which a lab's ranks are started.

    output: the result file. If it exists, another name is used; with `force`, it is replaced when the run is
    finished.
    ranks: the number of processes without torchrun.
    nodes: the intended number of machines, or None for any number.
    allow_busy: measure even if somebody else uses a device.
    timeout: seconds for the whole lab. connect: seconds for all ranks to connect, under torchrun. message:
    seconds for one message.
    Raises: LabError for invalid seconds.
    """

    output: Path
    ranks: int = 2
    transport: str = "gloo"
    nodes: int | None = None
    allow_busy: bool = False
    timeout: float = 3600.0
    connect: float = 120.0
    force: bool = False
    message: float = 300.0

    def __post_init__(self) -> None:
        for name, option in (("timeout", ""), ("connect", "-timeout"), ("message", "-timeout")):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and 0 < seconds < 10**7):
                raise LabError("seconds above 0", str(seconds), f"--{name}{option}")


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run(
    lab: str,
    cases: Cases,
    settings: Settings,
    start: Start,
    began: Callable[[Path], None] = lambda written: None,
) -> Path | None:
    """Run a lab and return its result file on the process that reports; return None on the others.

    The process that reports is rank 0 under torchrun, otherwise the one that starts all ranks. It calls
    `began` before any rank starts, with the file to which every case will be written as soon as it ends.

    Raises: LabError before any rank starts if something cannot be measured, and on every rank if preflight
    finds a problem; also any error that ends a rank. The file then contains the measurements up to that
    point, and the error that ended the run.
    """
    tells = not under_torchrun() or os.environ["RANK"] == "0"
    settings.check(_world_size(start))
    written = reserve(start.output) if tells else start.output
    if tells:
        began(written)

    def report(file: Path, cause: str, stacks: dict[str, str]) -> None:
        alone = header(lab, _plain(settings), [], start.transport)
        blame(file, " ".join(cause.split())[:400], stacks, alone)

    witness = Witness(written if tells else None, start.timeout, report) if under_torchrun() else None
    try:
        with witness.watching(start.connect) if witness else nullcontext():
            _on_all(on_rank, start, lab, cases, settings, replace(start, output=written), witness=witness)
        if tells and start.force and written != start.output:
            written = written.replace(start.output)
    except Ended:
        why = witness.why() if witness else SIGNALLED
        if tells and not (witness and witness.reported):
            blame(written, why)
        remedy = "what torchrun says of it, and the stacks in the result file"
        raise LabError("every rank to the end", why, remedy) from None
    except BaseException as error:
        if tells and not (witness and witness.reported):
            described = _first_failure(error) if isinstance(error, RankFailedError) else _in_one_line(error)
            # Without torchrun these are what launch knows: a rank's traceback, or its last exchange.
            known = getattr(error, "errors", {}) if isinstance(error, RankFailedError) else {}
            blame(written, described, {str(rank): text[:LONGEST] for rank, text in sorted(known.items())})
        raise
    finally:
        if tells and written.exists() and not written.stat().st_size:  # no rank began
            written.unlink()
    return written if tells else None


def look(settings: Settings, start: Start) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Return every rank's facts and the findings of preflight, without measuring anything."""
    everyone, found = _on_all(_preflight, start, settings, start)
    return everyone, found


def _on_all(program: Callable[..., Any], start: Start, *args: Any, witness: Witness | None = None) -> Any:
    """Return the program's result on this rank under torchrun, otherwise on rank 0 of new processes."""
    if under_torchrun():
        message = min(start.message, start.timeout)
        with (
            connect(start.transport, message, start.connect) as ring,
            witness.connected(ring) if witness else nullcontext(),
        ):
            return program(ring, *args)
    try:
        outcome = launch(
            program, start.ranks, *args,
            timeout=start.timeout, message_timeout=start.message, transport=start.transport, threads=1, memory=False,
        )  # fmt: skip
    except RankFailedError as error:
        if isinstance(error.__cause__, LabError):  # all ranks raised this error, which has a remedy
            raise error.__cause__ from None
        raise
    return outcome.results[0]


def _world_size(start: Start) -> int:
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else start.ranks


def on_rank(ring: Ring, lab: str, cases: Cases, settings: Settings, start: Start) -> None:
    """Run one rank of a lab: preflight first, then case by case. Only rank 0 writes the results."""
    everyone, found = _preflight(ring, settings, start)
    expect_ready(found, allow_busy=start.allow_busy)
    device = device_of(start.transport)
    head: Mapping[str, Any] = {
        **header(lab, _plain(settings), everyone, start.transport),
        "preflight": [asdict(each) for each in found],
        "topology": topology() if ring.rank == 0 else "",
    }
    file = ResultFile(start.output, head)
    torch.manual_seed(settings.seed)
    try:
        if ring.rank == 0:
            file.write()
        for case in cases(ring, settings, device):
            if ring.rank == 0:
                file.add(case)
    except BaseException as error:
        if ring.rank == 0:
            file.write(ended_by=_in_one_line(error))
        raise
    if ring.rank == 0:
        file.write(finished=True)


def device_of(transport: str) -> torch.device:
    """Return this rank's device: the CPU for `transport` gloo or without a GPU, otherwise its GPU."""
    if transport == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _preflight(ring: Ring, settings: Settings, start: Start) -> tuple[list[dict[str, Any]], list[Finding]]:
    device, shared = device_of(start.transport), start.transport == "shared-gpu"
    needed = settings.needed_bytes(ring.world_size, ring.rank, device)
    return preflight(ring, _plain(settings), device, needed, start.nodes, shared=shared)


def _plain(settings: Settings) -> dict[str, Any]:
    return asdict(settings)  # type: ignore[call-overload]


def _in_one_line(error: BaseException) -> str:
    """Return an error as one line: its class, and what was needed and found."""
    if not isinstance(error, RinglabError):
        return _short(type(error).__name__, str(error))
    if isinstance(error, LabError):
        return _short("LabError", f"needed {error.needed}; got: {error.got}")
    return _short(type(error).__name__, f"{error.needed}; {error.got}" if error.got else error.needed)


def _first_failure(error: RankFailedError) -> str:
    """Return the rank that failed first, with its error."""
    rank, cause = getattr(error, "rank", -1), error.__cause__
    if cause is not None:
        return _short(f"rank {rank} failed first: {type(cause).__name__}", str(cause))
    said = getattr(error, "errors", {}).get(rank, "") or error.got
    return _short(f"rank {rank} failed first", said.strip().splitlines()[-1] if said.strip() else "")


def _short(kind: str, text: str) -> str:
    return " ".join(f"{kind}: {text}".split())[:400]
