"""The bars of a Gantt chart, computed from a trace; times are seconds since the trace's first event."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ringlab.comm.trace import Compute, Exchange, Trace
from ringlab.errors import CommError

Kind = Literal["forward", "backward", "other", "wait", "transit", "still", "message", "control", "done"]
MESSAGES = ("transit", "still", "message", "control")
"""Kinds of bars in the lane of messages: "transit" is a message on its way; "still" is a posted message that
does not move; "message" is one whose movement is not known; "control" is a control message."""
COMPUTATIONS = ("forward", "backward", "other")
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


@dataclass(frozen=True)
class Bar:
    """One stretch of time on one rank. Messages that overlap are in different lanes."""

    rank: int
    start: float
    end: float
    kind: Kind
    label: str
    lane: int = 0

    @property
    def short(self) -> str:
        """Return the number at the label's end if there is one, else the label."""
        number = re.search(r"\d+$", self.label)
        sign = "+" if self.label.startswith("add ") else ""
        return sign + number[0] if number else self.label


@dataclass(frozen=True)
class Chart:
    """All bars of a run, and its makespan in seconds from the first event to the last.

    launches: whether the bars of computations show when they were launched on a GPU, which computes later.
    """

    world_size: int
    makespan: float
    bars: tuple[Bar, ...]
    launches: bool = False

    def busy(self, rank: int) -> float:
        """Return the seconds in which `rank` computes. Nested computations count once."""
        return _covered(bar for bar in self.bars if bar.rank == rank and bar.kind in COMPUTATIONS)

    def waited(self, rank: int) -> float:
        """Return the seconds in which `rank` waits for messages, except messages that compare calls."""
        return _covered(bar for bar in self.bars if bar.rank == rank and bar.kind == "wait")

    @property
    def busy_fraction(self) -> float:
        """Return the share of makespan × ranks in which ranks compute."""
        whole = self.makespan * self.world_size
        return sum(self.busy(rank) for rank in range(self.world_size)) / whole if whole else 0.0


def chart(trace: Trace) -> Chart:
    """Return the bars of `trace`.

    An exchange is in `transit` while one of its messages is on its way. Otherwise it is `still`: until both
    ends of its first message are posted, between its two messages, and from the last message until the rank
    waits for it. With a real clock these times are not known, so one bar of the kind `message` reaches from
    posting to completion. A bar of the kind `wait` covers the exposed time.
    Raises: CommError for a trace without a computation or exchange.
    """
    events = [event for event in trace.events if isinstance(event, (Compute, Exchange))]
    if not events:
        raise CommError(
            "a trace with computations or exchanges", "an empty trace", "draw it when the run is over"
        )
    start = min(event.start if isinstance(event, Compute) else event.posted for event in events)
    bars: list[Bar] = []
    for event in events:
        bars += _compute(event, start) if isinstance(event, Compute) else _wait(event, start)
    exchanges = [event for event in events if isinstance(event, Exchange)]
    for rank in range(trace.world_size):
        bars += _laned([event for event in exchanges if event.rank == rank], start)
    return Chart(trace.world_size, max(bar.end for bar in bars), tuple(bars), trace.launches)


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the best unit for printing `seconds`, as (seconds in one unit, symbol of the unit).

    >>> time_unit(0.00047)
    (1e-06, 'µs')
    """
    return next(
        (unit for unit in UNITS if seconds >= unit[0] * 0.9999), UNITS[0] if not seconds else UNITS[-1]
    )


def in_unit(seconds: float, scale: float) -> str:
    """Return `seconds` as a multiple of `scale` with three significant digits.

    >>> in_unit(0.00047, 1e-6)
    '470'
    """
    value = seconds / scale
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _compute(event: Compute, start: float) -> list[Bar]:
    kind: Kind = "other"
    if event.label.startswith("attend"):
        kind = "backward" if "backward" in event.label else "forward"
    return [Bar(event.rank, event.start - start, event.end - start, kind, event.label)]


def _wait(event: Exchange, start: float) -> list[Bar]:
    if event.control or event.exposed <= 0:
        return []
    waited = event.waited - start
    return [Bar(event.rank, waited, waited + event.exposed, "wait", event.tag)]


def _laned(exchanges: list[Exchange], start: float) -> list[Bar]:
    """Return the bars of one rank's messages. Each exchange takes the first lane that is free."""
    free: list[float] = []
    placed = []
    for event in sorted(exchanges, key=lambda event: (event.posted, event.done)):
        lane = next((n for n, until in enumerate(free) if until <= event.posted), len(free))
        free[lane : lane + 1] = [event.done]
        placed += [
            Bar(event.rank, begin - start, end - start, kind, event.tag, lane)
            for begin, end, kind in _stretches(event)
        ]
    return placed


def _stretches(event: Exchange) -> list[tuple[float, float, Kind]]:
    """Return (begin, end, kind) of each stretch of an exchange's time from its posting to its completion."""
    if event.control or event.transit is None:
        return [(event.posted, event.done, "control" if event.control else "message")]
    stretches: list[tuple[float, float, Kind]] = []
    reached = event.posted
    for begin, arrival in event.transit:
        stretches += [(reached, begin, "still"), (begin, arrival, "transit")]
        reached = arrival
    stretches = [each for each in [*stretches, (reached, event.done, "still")] if each[1] > each[0]]
    return stretches or [(event.posted, event.done, "still")]


def _covered(bars: Iterable[Bar]) -> float:
    """Return the length of the union of the bars, in seconds."""
    total, reached = 0.0, float("-inf")
    for bar in sorted(bars, key=lambda bar: bar.start):
        total += max(0.0, bar.end - max(bar.start, reached))
        reached = max(reached, bar.end)
    return total
