"""On CPU tensors, all transports have gloo's bits, traces, memory and errors, and report a rank that dies."""

from __future__ import annotations

import os
import signal
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringlab import VirtualCluster, launch
from ringlab.comm.processes.distributed import DistributedComm
from ringlab.comm.processes.shared_memory import SharedMemory
from ringlab.comm.processes.symmetric import Windows
from ringlab.comm.ring import Ring
from ringlab.comm.trace import Outcome
from ringlab.comm.wrappers.faulty import Fault
from ringlab.errors import CommError, MismatchError, PeerDiedError, RankFailedError, TransportTimeout
from tests.substrates import programs
from tests.substrates.test_case_table import assert_as_on_virtual_ranks, attend_all, jobs_for
from tests.substrates.test_distributed import MISMATCHES, mismatches
from tests.substrates.test_launch import facts

pytestmark = pytest.mark.thorough

OTHERS = ("symmetric", "shared-gpu")
SHARED_MEMORY = Path("/dev/shm")
SCALE = torch.linspace(-1, 1, 7)
LATE_S = 0.4
JOBS = jobs_for(3)[::3]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Check that no file of the ranks stays in shared memory, however they end."""
    before = set(SHARED_MEMORY.glob("ringlab-*"))
    yield
    deadline = time.monotonic() + 30  # windows of other tests' ranks may exist just now and will go away
    while (left := set(SHARED_MEMORY.glob("ringlab-*")) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def one_round(ring: Ring, hops: int, length: int, spoil: bool = False) -> list[int]:
    """Pass a block that contains rank² around the ring for some hops; return the received numbers.

    spoil: overwrite a received block before it is passed on, which is not allowed.
    """
    seen, block = [], torch.full((length + ring.rank, 2), ring.rank**2)
    for hop in range(hops):
        into = torch.empty(length + ring.origin(hop + 1), 2, dtype=block.dtype)
        ring.post(block, into=(into,), hops=hop, tag=f"block {hop}").wait()
        block.fill_(-1)  # the sent block may be overwritten from now on
        assert (into == into[0, 0]).all()
        seen.append(int(into[0, 0]))
        block = into.fill_(77) if spoil else into
    return seen


def rounds(ring: Ring) -> list[list[int]]:
    """Run whole rounds, rounds that end early, and rounds of longer and of shorter blocks, each twice."""
    whole = ring.world_size - 1
    plan = [(whole, 5), (1, 5), (0, 5), (whole, 300), (whole, 2), (1, 2), (whole, 900)]
    return [one_round(ring, hops, length) for hops, length in plan for _ in range(2)]


def come_late(ring: Ring) -> list[float]:
    """Let rank 1 come late three times; return the seconds of wall-clock time that this rank waited."""
    seconds = []
    for _ in range(3):
        ring.barrier()
        if ring.rank == 1:
            time.sleep(LATE_S)
        began = time.perf_counter()
        ring.shift(torch.zeros(3), tag="late")
        seconds.append(time.perf_counter() - began)
    return seconds


def three_ranks(ring: Ring) -> dict[str, Any]:
    return {
        "exchanges": programs.many_exchanges(ring, SCALE),
        "attention": attend_all(ring, JOBS),
        "rounds": rounds(ring),
    }


def two_ranks(ring: Ring) -> dict[str, Any]:
    return {
        "exchanges": programs.many_exchanges(ring, SCALE),
        "mismatches": mismatches(ring),
        "late": come_late(ring),
    }


@lru_cache
def on(transport: str, world_size: int) -> Outcome:
    program = {2: two_ranks, 3: three_ranks}[world_size]
    return launch(program, world_size, transport=transport, timeout=120)


@pytest.mark.parametrize("transport", ["gloo", *OTHERS])
def test_attention_has_the_bits_of_the_virtual_cluster(transport: str) -> None:
    assert_as_on_virtual_ranks(JOBS, [result["attention"] for result in on(transport, 3).results])


@pytest.mark.parametrize("transport", OTHERS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_kind_of_exchange_is_as_on_gloo(transport: str, world_size: int) -> None:
    other, gloo = on(transport, world_size), on("gloo", world_size)
    for rank in range(world_size):
        assert_same(other.results[rank]["exchanges"], gloo.results[rank]["exchanges"])
        assert facts(other.trace, rank) == facts(gloo.trace, rank)
        if world_size == 3:  # with two ranks, caught errors keep tensors alive in their tracebacks
            assert other.memory[rank] == gloo.memory[rank], "a transport's own memory does not count"


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("transport", ["virtual", "gloo", *OTHERS])
def test_relayed_blocks_reach_every_rank(transport: str) -> None:
    if transport == "virtual":
        ranks = VirtualCluster(3).run(rounds).results
    else:
        ranks = [result["rounds"] for result in on(transport, 3).results]
    for rank, came in enumerate(ranks):
        assert list(map(len, came)) == [2, 2, 1, 1, 0, 0, 2, 2, 2, 2, 1, 1, 2, 2]
        for blocks in came:
            assert blocks == [((rank - hop - 1) % 3) ** 2 for hop in range(len(blocks))]


@pytest.mark.parametrize("transport", OTHERS)
def test_every_mismatch_is_the_error_that_gloo_gives_and_nothing_breaks(transport: str) -> None:
    for rank in range(2):
        seen = on(transport, 2).results[rank]["mismatches"]
        assert {*MISMATCHES, "tag"} < seen.keys()
        assert seen["after all that"] == str(1 - rank)
        assert seen == on("gloo", 2).results[rank]["mismatches"]


@pytest.mark.parametrize("transport", ["gloo", *OTHERS])
def test_exposed_communication_is_a_number(transport: str) -> None:
    outcome = on(transport, 2)
    trace = outcome.trace
    lates = [[e for e in trace.exchanges(rank) if e.tag == "late"] for rank in range(2)]
    for rank, late in enumerate(lates):
        for seconds, e in zip(outcome.results[rank]["late"], late, strict=True):
            assert seconds >= e.exposed == e.done - e.waited
        assert trace.exposed(rank) == sum(e.exposed for e in trace.exchanges(rank)) >= late[0].exposed
    # Both ranks read one clock; rank 0 waits until rank 1 has posted.
    for first, second in zip(*lates, strict=True):
        assert first.done >= second.posted
    # A busy machine may delay a rank once, but not three times.
    assert max(e.exposed for e in lates[0]) > LATE_S / 2 > min(e.exposed for e in lates[1])
    assert trace.exposed() == pytest.approx(trace.exposed(0) + trace.exposed(1))
    events = trace.to_chrome()["traceEvents"]
    drawn = sum(e["args"].get("exposed_us", 0.0) for e in events if not e["name"].startswith("control:"))
    assert drawn == pytest.approx(trace.exposed() * 1e6)


def one_rank_differs(ring: Ring) -> list[str]:
    """Shift a tensor that on rank 0 has another shape than on the others; then shift the ranks' numbers."""
    seen = []
    try:
        seen.append(str(ring.shift(torch.zeros(5 if ring.rank == 0 else 3)).shape))
    except MismatchError:
        seen.append("mismatch")
    return [*seen, str(ring.shift(torch.tensor(ring.rank)).item())]


@pytest.mark.parametrize("transport", OTHERS)
def test_a_mismatch_of_some_ranks_leaves_nobody_waiting(transport: str) -> None:
    results = launch(one_rank_differs, 3, transport=transport, timeout=20, memory=False).results
    assert results == [["mismatch", "2"], ["mismatch", "0"], ["torch.Size([3])", "1"]]


def in_tiny_slots(ring: Ring) -> dict[str, Any]:
    """Run exchanges whose messages have many pieces, pieces of two tensors, or no bytes."""
    windows = Windows(ring.rank, dist.new_group(), 30.0, SharedMemory, slot_bytes=20)
    comm = DistributedComm(dist.new_group(), 30.0, carriers={"cpu": windows})
    results = programs.many_exchanges(Ring(comm), SCALE)
    comm.finish()
    comm.close()
    return results


def test_messages_in_pieces() -> None:
    for rank, results in enumerate(launch(in_tiny_slots, 3, memory=False).results):
        assert_same(results, on("gloo", 3).results[rank]["exchanges"])


@pytest.mark.parametrize(
    ("transport", "came"),
    [("gloo", [[9, 77, 77], [0, 77, 77], [1, 77, 77], [4, 77, 77]]),
     ("symmetric", [[9, 4, 1], [0, 9, 4], [1, 0, 9], [4, 1, 0]])],
)  # fmt: skip
def test_a_relayed_block_comes_straight_from_its_owner(transport: str, came: list[list[int]]) -> None:
    """On gloo, ranks that spoil relayed blocks harm the others; without forwarding no rank is harmed."""
    assert launch(one_round, 4, 3, 5, True, transport=transport, memory=False).results == came


def relay_without_a_beginning(ring: Ring) -> None:
    ring.post(torch.zeros(3), into=(torch.empty(3),), hops=1).wait()


def test_a_relay_that_nobody_began() -> None:
    with pytest.raises(RankFailedError, match="relay a block by all ranks, with hops 0, 1, 2") as caught:
        launch(relay_without_a_beginning, 2, transport="symmetric", timeout=20, memory=False)
    assert isinstance(caught.value.__cause__, CommError)


def relay_and_die(ring: Ring) -> None:
    block = torch.zeros(1000)
    for hop in range(ring.world_size - 1):
        if (ring.rank, hop) == (2, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        (block,) = ring.post(block, into=(torch.empty(1000),), hops=hop).wait()


@pytest.mark.parametrize(
    ("transport", "program", "faults"),
    [
        ("gloo", programs.four_shifts, [Fault("kill", 2, 1)]),
        ("symmetric", programs.four_shifts, [Fault("kill", 2, 1)]),
        ("symmetric", relay_and_die, []),
        ("shared-gpu", relay_and_die, []),
    ],
)
def test_every_survivor_of_a_kill_names_the_dead_rank(transport: str, program: Any, faults: Any) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        launch(program, 3, timeout=40, transport=transport, faults=faults, memory=False)
    assert caught.value.rank == 2
    if faults:
        assert caught.value.errors[2].startswith("killed by signal SIGKILL; last: completed exchange 0")
    for survivor in (0, 1):
        assert PeerDiedError.__name__ in caught.value.errors[survivor]
        assert "rank 2 failed first: killed by signal SIGKILL" in caught.value.errors[survivor]
    assert time.monotonic() - began < 150  # starting the processes takes most of this limit on a busy machine


@pytest.mark.parametrize("transport", ["gloo", *OTHERS])
def test_a_message_that_never_comes_ends_in_a_timeout_that_names_both_ranks(transport: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(programs.wait_for_a_sleeper, 2, transport=transport, timeout=8, memory=False)
    assert isinstance(caught.value.__cause__, TransportTimeout)
    assert caught.value.rank == 0
    assert "rank 1 to send 'shift', exchange 0 of rank 0" in caught.value.errors[0]
    stopped = "stopped by launch 5 s after a failure (rank 0 failed first: TransportTimeout"
    assert stopped in caught.value.errors[1]


@pytest.mark.parametrize("transport", ["gloo", "symmetric"])
def test_a_rank_that_ends_early_disturbs_nobody(transport: str) -> None:
    outcome = launch(programs.rank_0_ends_early, 3, transport=transport, timeout=30, memory=False)
    assert outcome.results == [0.0, 2.0, 1.0]


def what_is_no_shift(ring: Ring) -> list[str]:
    """Run exchanges that are not shifts, which gloo allows: ranks 1 and 2 swap; each rank only sends."""
    mine, other, seen = torch.ones(2), 3 - ring.rank, []
    swap = {"send": (mine,), "to": other, "receive": (torch.empty(2),), "source": other}
    for exchange in ([swap] if ring.rank else []) + [{"send": (mine,), "to": ring.next}]:
        try:
            ring.comm.exchange(**exchange).wait()
        except CommError as error:
            seen.append(str(error))
    return [*seen, str(ring.shift(torch.tensor(ring.rank)).item())]


def test_ranks_that_share_a_gpu_can_only_shift_and_say_what_to_use() -> None:
    results = launch(what_is_no_shift, 3, transport="shared-gpu", timeout=20, memory=False).results
    for rank, (*refused, shifted) in enumerate(results):
        assert len(refused) == (2 if rank else 1)
        assert all("shift by the same distance" in text for text in refused)
        assert all(
            "transport='gloo' with tensors on the CPU, or transport='nccl'" in text for text in refused
        )
        assert shifted == str((rank - 1) % 3)
