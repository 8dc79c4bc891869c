"""What happened in a ring run, step by step, read off its trace; and who met whose K/V.

Everything here is read off a `Trace`: which block is where follows from who sent to whom
and in which order, what was computed from the computations between two exchanges, the bytes from
the exchanges. No closed form of the ring appears here, so a wrong ring makes a wrong picture.
`counts` measures coverage at token level instead, by running a ring program on probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab.comm.trace import Compute, Exchange, Trace
from ringlab.errors import CommError

if TYPE_CHECKING:
    from ringlab.layout import Layout

ATTEND = "attend"
"""Computations whose label begins so are attention on the block that is here."""


@dataclass(frozen=True)
class Hop:
    """One block on its way: from rank `source` to rank `to`; `origin` is its owner, None if unknown."""

    source: int
    to: int
    origin: int | None
    nbytes: int


@dataclass(frozen=True)
class Frame:
    """One step of the ring: the owner of the block on every rank, who computed, what was sent on."""

    step: int
    held: tuple[int | None, ...]
    computed: tuple[int, ...]
    hops: tuple[Hop, ...]

    @property
    def world_size(self) -> int:
        return len(self.held)

    def describe(self) -> str:
        """The frame in words, one sentence per rank."""
        hops = {hop.source: hop for hop in self.hops}
        lines = [f"Step {self.step}."]
        for rank, origin in enumerate(self.held):
            verb = "attends to" if rank in self.computed else "holds"
            onward = (
                f" and sends it to rank {hops[rank].to} ({hops[rank].nbytes:,} bytes)" if rank in hops else ""
            )
            lines.append(f"Rank {rank} {verb} the K/V of {_owner(origin)}{onward}.")
        return " ".join(lines)


def frames(trace: Trace) -> list[Frame]:
    """The steps of a ring run, in order: one more than the exchanges of the busiest rank.

    Raises: CommError if a rank sends to more than one other, for then it is no ring.
    """
    ranks = range(trace.world_size)
    for rank in ranks:
        if len(trace.peers(rank)) > 1:
            raise CommError(
                "a ring: every rank sends to one neighbour",
                f"rank {rank} sends to ranks {sorted(trace.peers(rank))}",
                "play the trace of a ring program, not that of a collective",
            )
    exchanges = [sorted(trace.exchanges(rank), key=lambda e: e.index) for rank in ranks]
    steps = max(len(own) for own in exchanges) + 1
    return [_frame(trace, exchanges, step) for step in range(steps)]


def _frame(trace: Trace, exchanges: list[list[Exchange]], step: int) -> Frame:
    ranks = range(trace.world_size)
    held = tuple(_holder(exchanges, rank, step) for rank in ranks)
    computed = tuple(rank for rank in ranks if step in _computing_steps(trace, rank))
    hops = tuple(
        Hop(rank, to, held[rank], own[step].bytes_sent)
        for rank, own in enumerate(exchanges)
        if step < len(own) and (to := own[step].to) is not None
    )
    return Frame(step, held, computed, hops)


def _holder(exchanges: list[list[Exchange]], rank: int, received: int) -> int | None:
    """Whose block `rank` holds after so many receives: the message is followed back to its owner."""
    while received:
        if received > len(exchanges[rank]):
            return None
        source = exchanges[rank][received - 1].source
        if source is None:
            return None
        arrivals = [e.source for e in exchanges[rank][:received]].count(source)
        sends = [place for place, e in enumerate(exchanges[source]) if e.to == rank]
        if arrivals > len(sends) or sends[arrivals - 1] >= received:
            return None
        rank, received = source, sends[arrivals - 1]
    return rank


def _computing_steps(trace: Trace, rank: int) -> set[int]:
    """The steps in which `rank` attended: how many exchanges it had completed each time."""
    steps, received = set(), 0
    for event in trace.events:
        if event.rank != rank:
            continue
        if isinstance(event, Compute):
            if event.label.startswith(ATTEND):
                steps.add(received)
        elif isinstance(event, Exchange) and not event.control:
            received += 1
    return steps


def coverage(trace: Trace) -> np.ndarray:
    """How often the queries of rank r were computed against the block of rank o: int64 (P, P) [r, o]."""
    times = np.zeros((trace.world_size, trace.world_size), dtype=np.int64)
    for frame in frames(trace):
        for rank in frame.computed:
            if frame.held[rank] is not None:
                times[rank, frame.held[rank]] += 1
    return times


def when(trace: Trace) -> np.ndarray:
    """The step in which each pair of `coverage` was last computed: float64 (P, P), NaN for never."""
    steps = np.full((trace.world_size, trace.world_size), math.nan)
    for frame in frames(trace):
        for rank in frame.computed:
            if frame.held[rank] is not None:
                steps[rank, frame.held[rank]] = frame.step
    return steps


def counts(program: Callable[..., Any], layout: Layout, *args: Any) -> np.ndarray:
    """How often `program` counts each key for each query, measured: float64 (S, S) [query, key].

    `program(ring, q, k, v, *args)` runs on virtual ranks and returns out and lse. With q = k = 0
    every visible key weighs e⁰ = 1, and with v the identity matrix out·e^lse is the number of times
    that each key was counted.
    """
    import torch

    from ringlab.comm.virtual.cluster import VirtualCluster

    zeros = torch.zeros(1, 1, layout.S, layout.S, dtype=torch.float64)
    probes = zeros, zeros, torch.eye(layout.S, dtype=torch.float64)[None, None]

    def measured(ring: Any) -> tuple[Any, Any]:
        out, lse = program(ring, *layout.shard(probes, ring.rank), *args)
        return out, lse[..., None]

    out, lse = layout.unshard(VirtualCluster(layout.P).run(measured).results)
    return (out * lse.exp())[0, 0].numpy()


def _owner(origin: int | None) -> str:
    return "an unknown rank" if origin is None else f"rank {origin}"
