"""Laws of virtual time, as functions that tests call with the real clock and with broken clocks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ringlab import Ring, VirtualCluster
from ringlab.comm.clocked import cluster as clocked
from ringlab.comm.clocked.cluster import ClockedCluster
from ringlab.comm.clocked.recording import Recording
from ringlab.comm.virtual.cluster import Costs
from ringlab.comm.virtual.turns import Turns


@dataclass(frozen=True)
class Uniform:
    """A network whose links are all alike, except those that leave a node of `per_node` ranks."""

    bytes_s: float = float("inf")
    latency: float = 0.0
    per_node: int = 1 << 20

    def bytes_per_s(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        return np.full(len(source), self.bytes_s)

    def latency_s(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        return np.full(len(source), self.latency)

    def port(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        return (source // self.per_node != to // self.per_node).astype(np.int64)


class Given(Costs):
    """Costs: a computation takes the seconds in its label, and a message takes bytes / rate + latency."""

    def __init__(self, bytes_s: float = float("inf"), latency: float = 0.0) -> None:
        self.bytes_s, self.latency = bytes_s, latency

    def compute(self, rank: int, label: str, args: tuple[Any, ...]) -> float:
        return float(label)

    def message(self, source: int, to: int, nbytes: int) -> float:
        return nbytes / self.bytes_s + self.latency


def meta(n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8, device="meta")


def record(P: int, program: Any, *args: Any) -> Recording:
    return ClockedCluster(P, Given()).run(program, *args)


def rounds(ring: Ring, plan: list[tuple[int, list[float], int]], held: int) -> float:
    """For each entry of `plan`, post, compute, and wait for old exchanges until only `held` are open."""
    pending: list[Any] = []
    for number, (distance, seconds, nbytes) in enumerate(plan):
        to, source = (ring.rank + distance) % ring.world_size, (ring.rank - distance) % ring.world_size
        mine, buffer = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
        pending.append(
            ring.comm.exchange(send=(mine,), to=to, receive=(buffer,), source=source, tag=f"round {number}")
        )
        ring.compute(str(seconds[ring.rank]), lambda: None)
        while len(pending) > held:
            pending.pop(0).wait()
    for work in pending:
        work.wait()
    return ring.comm.now()


def random_rounds(seed: int) -> tuple[int, list[tuple[int, list[float], int]]]:
    draw = random.Random(seed)
    P = draw.randint(2, 6)
    return P, [
        (
            draw.randint(1, P - 1),
            [draw.choice([0.0, draw.random()]) for _ in range(P)],
            draw.randint(1, 64),
        )
        for _ in range(draw.randint(1, 8))
    ]


def law_as_on_the_virtual_cluster() -> None:
    """The clock gives the events and times of the virtual cluster if no two messages need the same port.

    This is so for one exchange at a time over slow links, and for several exchanges with one neighbour over
    links that have only a latency.
    """
    for seed in range(12):
        P, rounds_of = random_rounds(seed)
        for held, bytes_s, latency in ((3, float("inf"), 0.25), (0, 16.0, 0.0), (0, 16.0, 0.25)):
            plan = [(1 if held else distance, seconds, nbytes) for distance, seconds, nbytes in rounds_of]
            outcome = VirtualCluster(P, costs=Given(bytes_s, latency)).run(rounds, plan, held)
            timeline = record(P, rounds, plan, held).clock(Uniform(bytes_s, latency))
            for rank in range(P):
                theirs = [event for event in outcome.trace.events if event.rank == rank]
                mine = [event for event in timeline.trace().events if event.rank == rank]
                assert mine == theirs
            assert timeline.makespan_s == max(outcome.results)
            assert timeline.busy_s == pytest.approx([sum(s[r] for _, s, _ in plan) for r in range(P)])


def law_a_port_sends_one_message_at_a_time() -> None:
    """One port sends two messages of 8 bytes at 8 bytes/s in turn; two ports send both at once."""

    def program(ring: Ring) -> None:
        if ring.rank == 0:
            works = [ring.comm.exchange(send=(meta(8),), to=to) for to in (1, 2)]
            for work in works:
                work.wait()
        else:
            ring.comm.exchange(receive=(meta(8),), source=0).wait()

    recording = record(3, program)
    assert recording.clock(Uniform(8.0)).ends_of_ranks.tolist() == [2.0, 1.0, 2.0]
    assert recording.clock(Uniform(8.0, latency=5.0)).ends_of_ranks.tolist() == [7.0, 6.0, 7.0]
    assert recording.clock(Uniform(8.0, per_node=2)).ends_of_ranks.tolist() == [1.0, 1.0, 1.0]


def law_both_ends_must_be_there() -> None:
    """Sender and receiver wait for each other, whichever is late, and then both wait for the message."""
    for late in (0, 1):

        def program(ring: Ring, late: int = late) -> None:
            ring.compute("3" if ring.rank == late else "1", lambda: None)
            if ring.rank == 0:
                ring.comm.exchange(send=(meta(8),), to=1).wait()
            else:
                ring.comm.exchange(receive=(meta(8),), source=0).wait()

        timeline = record(2, program).clock(Uniform(8.0, latency=0.5))
        assert timeline.ends_of_ranks.tolist() == [4.5, 4.5]
        assert timeline.waited_s.tolist() == ([1.5, 3.5] if late == 0 else [3.5, 1.5])


def law_the_order_of_threads_does_not_matter() -> None:
    """The recording and its times are the same, whichever rank runs first."""

    class Shuffled(Turns):
        def pass_on(self) -> None:
            draws.shuffle(self.ready)
            super().pass_on()

    P, plan = random_rounds(5)
    first = record(P, rounds, plan, 2).clock(Uniform(16.0, 0.25))
    for seed in range(10):
        draws = random.Random(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clocked, "Turns", Shuffled)
            again = record(P, rounds, plan, 2).clock(Uniform(16.0, 0.25))
        assert np.array_equal(first.ends, again.ends)
        assert first.trace().events == again.trace().events


LAWS = {
    law.__name__: law
    for law in (
        law_as_on_the_virtual_cluster,
        law_a_port_sends_one_message_at_a_time,
        law_both_ends_must_be_there,
        law_the_order_of_threads_does_not_matter,
    )
}
