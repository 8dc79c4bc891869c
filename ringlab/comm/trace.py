"""The trace of a run: its exchanges and computations with their times, for counting and for export.

`Outcome` is the return value of a run on several ranks, on any transport.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat

from ringlab.comm.memory import MemoryReport
from ringlab.comm.protocol import CONTROL


def union(spans: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the union of the intervals (begin, end), in order, without empty intervals.

    >>> union([(4.0, 6.0), (1.0, 2.0), (2.0, 3.0), (5.0, 5.0)])
    ((1.0, 3.0), (4.0, 6.0))
    """
    found: list[tuple[float, float]] = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if found and begin <= found[-1][1]:
            begin, end = found[-1][0], max(found.pop()[1], end)
        found.append((begin, end))
    return tuple(found)


@dataclass(frozen=True)
class Exchange:
    """One rank's exchange: its bytes, and the times at which it was posted, waited for and complete.

    stall: on a GPU, where `wait` returns at once, the seconds for which computations waited for the exchange
    (see `Work`).
    transit: the intervals in which a message of the exchange was under way; None on a real clock.
    """

    rank: int
    index: int
    tag: str
    to: int | None
    source: int | None
    bytes_sent: int
    bytes_received: int
    shapes: tuple[tuple[int, ...], ...]
    posted: float
    waited: float
    done: float
    stall: SupportsFloat | None = None
    transit: tuple[tuple[float, float], ...] | None = None

    @property
    def exposed(self) -> float:
        """Return the seconds for which the rank could not compute because this message had not arrived.

        On a GPU, reading this value waits for the GPU, so read it when the run has ended.
        """
        return self.done - self.waited if self.stall is None else float(self.stall)

    @property
    def control(self) -> bool:
        """Return whether the exchange carried no attention data."""
        return self.tag.startswith(CONTROL)


@dataclass(frozen=True)
class Compute:
    """One computation on one rank, with its times.

    On a GPU these are the times at which it was launched: the GPU computes later, and usually for longer.
    """

    rank: int
    label: str
    start: float
    end: float


@dataclass(frozen=True)
class Choice:
    """A choice that the program left open. asked: for example block="auto". chosen: the value in use."""

    rank: int
    asked: str
    chosen: str
    at: float


@dataclass
class Trace:
    """All events of a run. The events of each rank are in the order in which they were completed."""

    world_size: int
    events: list[Exchange | Compute | Choice] = field(default_factory=list)

    def exchanges(self, rank: int | None = None, *, control: bool = False) -> list[Exchange]:
        """Return the exchanges of `rank`, or of all ranks. control: whether to include control messages."""
        return [
            e
            for e in self.events
            if isinstance(e, Exchange) and rank in (None, e.rank) and (control or not e.control)
        ]

    def computes(self, rank: int | None = None) -> list[Compute]:
        """Return the computations of `rank`, or of all ranks if `rank` is None."""
        return [e for e in self.events if isinstance(e, Compute) and rank in (None, e.rank)]

    def choices(self, rank: int | None = None) -> list[Choice]:
        """Return the choices that the program left open, on `rank`, or on all ranks if `rank` is None."""
        return [e for e in self.events if isinstance(e, Choice) and rank in (None, e.rank)]

    def rounds(self, rank: int) -> int:
        """Return the number of exchanges of attention data that `rank` made, without control messages."""
        return len(self.exchanges(rank))

    def bytes_sent(self, rank: int | None = None) -> int:
        """Return the bytes that `rank`, or all ranks together, sent in exchanges that carry attention data.

        Control messages are not counted. `exchanges(rank, control=True)` includes them.
        """
        return sum(e.bytes_sent for e in self.exchanges(rank))

    @property
    def launches(self) -> bool:
        """Return whether ranks computed on GPUs. If so, the times of computations are the times of their launches."""
        return any(isinstance(e, Exchange) and e.stall is not None for e in self.events)

    def exposed(self, rank: int | None = None) -> float:
        """Return the seconds of exposed communication of `rank`, or the sum over all ranks if `rank` is None.

        `[e.exposed for e in trace.exchanges(rank)]` is a list of the seconds of each step. On the virtual
        cluster the seconds are virtual.
        """
        return sum(e.exposed for e in self.exchanges(rank))

    def peers(self, rank: int) -> set[int]:
        """Return the ranks to which `rank` sent messages."""
        return {e.to for e in self.exchanges(rank) if e.to is not None}

    def to_chrome(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return the trace in Chrome's trace-event format, and write it to `path` as JSON if `path` is given.

        ui.perfetto.dev and chrome://tracing open the file. Each rank has a row for computation and a row for
        communication. Times are in microseconds. On a GPU the row of computations is called "launch", because its
        bars show when they were launched; a profile by nsys shows when they ran.
        """
        computes = "launch" if self.launches else "compute"
        rows = [_name(rank, computes) for rank in range(self.world_size)]
        document = {"traceEvents": [*_flatten(rows), *map(_chrome, self.events)], "displayTimeUnit": "ms"}
        if path is not None:
            Path(path).write_text(json.dumps(document))
        return document


def _flatten(rows: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [event for row in rows for event in row]


def _name(rank: int, computes: str) -> list[dict[str, Any]]:
    process = {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    lanes = [
        {"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": name}}
        for lane, name in enumerate((computes, "exchange"))
    ]
    return [process, *lanes]


def _chrome(event: Exchange | Compute | Choice) -> dict[str, Any]:
    if isinstance(event, Choice):
        name = f"{event.asked}: {event.chosen}"
        return {"ph": "i", "s": "t", "pid": event.rank, "tid": 0, "name": name, "ts": event.at * 1e6}
    if isinstance(event, Compute):
        return _span(event.rank, 0, event.label, event.start, event.end, {})
    details = {
        "to": event.to,
        "source": event.source,
        "bytes_sent": event.bytes_sent,
        "bytes_received": event.bytes_received,
        "exposed_us": event.exposed * 1e6,
    }
    return _span(event.rank, 1, event.tag, event.posted, event.done, details)


def _span(rank: int, lane: int, name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    begin, duration = start * 1e6, (end - start) * 1e6
    return {"ph": "X", "pid": rank, "tid": lane, "name": name, "ts": begin, "dur": duration, "args": args}


@dataclass(frozen=True)
class Outcome:
    """The result of a run: the programs' return values in rank order, the trace, and each rank's memory."""

    results: list[Any]
    trace: Trace
    memory: list[MemoryReport]
