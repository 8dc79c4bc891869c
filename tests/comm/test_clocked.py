"""The clocked cluster is as strict as the virtual one, and its times follow from messages alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringlab import Ring
from ringlab.comm.clocked import cluster as clocked
from ringlab.comm.clocked import timeline
from ringlab.comm.clocked.cluster import ClockedCluster
from ringlab.errors import (
    CommError,
    DeadlockError,
    WorldSizeError,
)
from tests.comm.clock_laws import LAWS, Given, Uniform, meta, random_rounds, record, rounds


@pytest.mark.parametrize("law", LAWS)
def test_the_clock(law: str) -> None:
    LAWS[law]()


# Each wrong clock is listed with the law that it breaks.


class ForgetsLatency(timeline._Clock):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.latency = np.zeros_like(self.latency)


class SendsTwoAtOnce(timeline._Clock):
    def _send(self) -> bool:
        moved = super()._send()
        self.port_free[:] = 0.0
        return moved


class StartsWithoutTheReceiver(timeline._Clock):
    def _ready(self, messages: np.ndarray) -> np.ndarray:
        return self.posted[self.messages.sends[messages]]


class ChargesByTurn(clocked._ClockedComm):
    """A wrong clock: a computation takes longer if its thread has its turn later."""

    def compute(self, label: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.run.turn = getattr(self.run, "turn", 0) + 1  # type: ignore[attr-defined]
        return super().compute(str(float(label) + self.run.turn), function, *args, **kwargs)  # type: ignore[attr-defined]


MUTANTS: list[tuple[Any, str, Any, str]] = [
    (timeline, "_Clock", ForgetsLatency, "law_as_on_the_virtual_cluster"),
    (timeline, "_Clock", SendsTwoAtOnce, "law_a_port_sends_one_message_at_a_time"),
    (timeline, "_Clock", StartsWithoutTheReceiver, "law_both_ends_must_be_there"),
    (clocked, "_ClockedComm", ChargesByTurn, "law_the_order_of_threads_does_not_matter"),
]


@pytest.mark.parametrize(("where", "name", "mutant", "law"), MUTANTS, ids=[m[2].__name__ for m in MUTANTS])
def test_the_law_notices(
    where: Any, name: str, mutant: Any, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, mutant)
    with pytest.raises(AssertionError):
        LAWS[law]()


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


def test_jitter_neither_adds_nor_takes_time_on_the_average() -> None:
    def program(ring: Ring) -> None:
        for _ in range(10_000):
            ring.compute("1", lambda: None)

    sigma, n = 0.1, 20_000
    busy = record(2, program).clock(Uniform(), jitter=sigma).busy_s.sum() / n
    # The random factor has a standard deviation of sqrt(exp(σ²) − 1); five standard errors of the mean are
    # allowed.
    assert busy == pytest.approx(1.0, abs=5 * np.sqrt(np.expm1(sigma**2) / n))


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


def test_even_and_odd_ranks_in_turns_are_no_deadlock() -> None:
    def program(ring: Ring) -> None:
        def send() -> None:
            ring.comm.exchange(send=(meta(8),), to=ring.next).wait()

        def receive() -> None:
            ring.comm.exchange(receive=(meta(8),), source=ring.previous).wait()

        for act in (send, receive) if ring.rank % 2 else (receive, send):
            act()

    assert record(4, program).clock(Uniform(8.0)).ends_of_ranks.tolist() == [2.0] * 4


def test_receives_that_nobody_sends_are_a_deadlock_with_its_cycle() -> None:
    def program(ring: Ring) -> None:
        ring.comm.exchange(receive=(meta(4),), source=ring.previous, tag="round").wait()

    with pytest.raises(DeadlockError, match="cycle: 0 → 2 → 1 → 0"):
        record(3, program)


def test_buffers_that_take_turns_are_told_apart() -> None:
    def program(ring: Ring) -> None:
        short, long = (meta(4),), (meta(9),)
        for tensors in (short, long, short, long, long, short):
            ring.comm.exchange(send=tensors, to=ring.next, receive=tensors, source=ring.previous).wait()

    program_of = record(2, program).program
    assert program_of.sent_bytes.tolist() == [4, 9, 4, 9, 9, 4] * 2
    assert program_of.received_bytes.tolist() == [4, 9, 4, 9, 9, 4] * 2


def test_after_the_run_there_is_nobody_to_talk_to() -> None:
    rings: list[Ring] = []
    record(1, rings.append)
    with pytest.raises(CommError, match="the run has ended"):
        rings[0].compute("1", lambda: None)


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
    for P in (8, 32, 128):
        blocks[0] = sweeps[0] = 0
        record(P, program).clock(Uniform(8.0))
        assert blocks[0] <= 2 * P
        assert sweeps[0] <= P + 2
