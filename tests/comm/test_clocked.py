"""The clocked cluster is as strict as the virtual one, and its times follow from messages alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ringlab import Ring, VirtualCluster
from ringlab.comm.clocked import cluster as clocked
from ringlab.comm.clocked import timeline
from ringlab.comm.clocked.cluster import ClockedCluster
from ringlab.comm.clocked.recording import Recording
from ringlab.comm.virtual.cluster import Costs
from ringlab.comm.virtual.turns import Turns
from ringlab.errors import DeadlockError, WorldSizeError


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


def test_as_on_the_virtual_cluster() -> None:
    """The clock gives the events and times of the virtual cluster if no two messages need the same port.

    This is so for one exchange at a time over slow links, and for several exchanges with one neighbour over
    links that have only a latency.
    """
    for seed in range(6):
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


def test_a_port_sends_one_message_at_a_time() -> None:
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


def test_both_ends_must_be_there() -> None:
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


def test_the_order_of_threads_does_not_matter() -> None:
    """The recording and its times are the same, whichever rank runs first."""

    class Shuffled(Turns):
        def pass_on(self) -> None:
            draws.shuffle(self.ready)
            super().pass_on()

    P, plan = random_rounds(5)
    first = record(P, rounds, plan, 2).clock(Uniform(16.0, 0.25))
    for seed in range(4):
        draws = random.Random(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clocked, "Turns", Shuffled)
            again = record(P, rounds, plan, 2).clock(Uniform(16.0, 0.25))
        assert np.array_equal(first.ends, again.ends)
        assert first.trace().events == again.trace().events


# Tests of the contents of a recording, and of programs that cannot be recorded.


def test_a_slow_rank_computes_longer_and_no_other_does() -> None:
    P, plan = random_rounds(3)
    recording = record(P, rounds, plan, 1)
    plain, slow = (recording.clock(Uniform(), slow=how) for how in ({}, {1: 2.5}))
    factors = np.ones(P)
    factors[1] = 2.5
    assert slow.busy_s == pytest.approx(plain.busy_s * factors)
    with pytest.raises(WorldSizeError, match=f"rank {P}"):
        recording.clock(Uniform(), slow={P: 2.0})


def test_jitter_is_the_same_for_the_same_seed_on_any_network() -> None:
    P, plan = random_rounds(4)
    recording = record(P, rounds, plan, 1)
    plain = recording.clock(Uniform())
    first = recording.clock(Uniform(), jitter=0.2, seed=7)
    assert first.busy_s.tolist() == recording.clock(Uniform(3.0, 1.0), jitter=0.2, seed=7).busy_s.tolist()
    assert first.busy_s.tolist() != recording.clock(Uniform(), jitter=0.2, seed=8).busy_s.tolist()
    assert plain.busy_s.tolist() == recording.clock(Uniform(), jitter=0.0, seed=9).busy_s.tolist()


def test_a_message_that_is_ready_overtakes_where_all_would_wait_for_ever() -> None:
    """Rank 0's second message overtakes the first one, which rank 1 receives only after rank 2's message."""

    def program(ring: Ring) -> None:
        comm = ring.comm
        if ring.rank == 0:
            works = [comm.exchange(send=(meta(8),), to=1), comm.exchange(send=(meta(8),), to=2)]
            for work in works:
                work.wait()
        elif ring.rank == 1:
            comm.exchange(receive=(meta(8),), source=2).wait()
            comm.exchange(receive=(meta(8),), source=0).wait()
        else:
            comm.exchange(receive=(meta(8),), source=0).wait()
            comm.exchange(send=(meta(8),), to=1).wait()

    assert record(3, program).clock(Uniform(8.0)).ends_of_ranks.tolist() == [3.0, 3.0, 2.0]


def test_send_then_receive_on_every_rank_is_a_deadlock_with_its_cycle() -> None:
    def program(ring: Ring) -> None:
        ring.comm.exchange(send=(meta(4),), to=ring.next, tag="round").wait()
        ring.comm.exchange(receive=(meta(4),), source=ring.previous, tag="round").wait()

    with pytest.raises(DeadlockError, match="cycle: 0 → 1 → 2 → 0"):
        record(3, program).clock(Uniform())


def test_buffers_that_take_turns_are_told_apart() -> None:
    def program(ring: Ring) -> None:
        short, long = (meta(4),), (meta(9),)
        for tensors in (short, long, short, long, long, short):
            ring.comm.exchange(send=tensors, to=ring.next, receive=tensors, source=ring.previous).wait()

    program_of = record(2, program).program
    assert program_of.sent_bytes.tolist() == [4, 9, 4, 9, 9, 4] * 2
    assert program_of.received_bytes.tolist() == [4, 9, 4, 9, 9, 4] * 2


def test_what_a_computation_spends_is_charged_beside_its_costs() -> None:
    def program(ring: Ring) -> None:
        ring.compute("2", lambda: ring.comm.spend(0.5))  # type: ignore[attr-defined]
        ring.compute("1", lambda: None)

    assert ClockedCluster(1, Given()).run(program).clock(Uniform()).busy_s.tolist() == [3.5]


def test_collectives_and_results() -> None:
    def program(ring: Ring) -> int:
        ring.barrier()
        return len(ring.all_gather(meta(ring.rank + 1), [(r + 1,) for r in range(ring.world_size)]))

    recording = record(3, program)
    assert recording.results == [3, 3, 3]
    trace = recording.clock(Uniform()).trace()
    assert trace.bytes_sent() == 2 * (1 + 2 + 3)  # the bytes of the barrier are not counted


def test_a_rank_blocks_twice_in_a_whole_ring_and_the_clock_sweeps_once_per_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks block twice and the clock sweeps once per step, so the cost grows only as ranks × steps."""
    blocks, sweeps = [0], [0]

    class Counting(clocked.Turns):
        def block(self, *args: Any) -> None:
            blocks[0] += 1
            super().block(*args)

    class Sweeping(timeline._Clock):
        def advance(self) -> bool:
            sweeps[0] += 1
            return super().advance()

    def program(ring: Ring) -> None:
        block = meta(4)
        for _ in range(ring.world_size - 1):
            work = ring.post(block)
            ring.compute("1", lambda: None)
            (block,) = work.wait()

    monkeypatch.setattr(clocked, "Turns", Counting)
    monkeypatch.setattr(timeline, "_Clock", Sweeping)
    for P in (8, 64):
        blocks[0] = sweeps[0] = 0
        record(P, program).clock(Uniform(8.0))
        assert blocks[0] <= 2 * P
        assert sweeps[0] <= P + 2
