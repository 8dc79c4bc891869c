"""The virtual cluster is deterministic, strict, and explains errors; the clocked cluster is as strict."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from ringlab import Ring, VirtualCluster, ring_attention, zigzag
from ringlab.comm.clocked.cluster import ClockedCluster
from ringlab.comm.protocol import thread_safe
from ringlab.comm.virtual.cluster import Costs
from ringlab.comm.virtual.threads import in_another_thread
from ringlab.errors import (
    CommError,
    DeadlockError,
    MismatchError,
    PeerDiedError,
    RankFailedError,
    ShapeError,
    UnreceivedError,
    WorldSizeError,
)

each_cluster = pytest.mark.parametrize("cluster", [VirtualCluster, ClockedCluster])
"""One cluster computes with data, the other with shapes only. Both are equally strict."""


def go_round(ring: Ring, length: int = 3) -> torch.Tensor:
    block = torch.full((2, length), float(ring.rank))
    seen = [block]
    for _ in range(ring.world_size - 1):
        block = ring.shift(block)
        seen.append(block)
    return torch.stack(seen)


@pytest.mark.parametrize("P", [1, 2, 5])
def test_each_rank_meets_every_block_in_the_order_of_origins(P: int) -> None:
    outcome = VirtualCluster(P).run(go_round)
    for rank, seen in enumerate(outcome.results):
        assert seen[:, 0, 0].tolist() == [(rank - step) % P for step in range(P)]
    assert [outcome.trace.rounds(rank) for rank in range(P)] == [P - 1] * P
    assert outcome.trace.bytes_sent() == P * (P - 1) * 2 * 3 * 4


def test_a_rank_does_not_see_another_ranks_later_writes() -> None:
    def program(ring: Ring) -> float:
        mine = torch.full((4,), float(ring.rank))
        got = ring.shift(mine)
        mine.fill_(99.0)
        ring.barrier()
        return float(got[0])

    assert VirtualCluster(3).run(program).results == [2.0, 0.0, 1.0]


def send_first(ring: Ring) -> None:
    x = torch.zeros(2)
    ring.comm.exchange(send=(x,), to=ring.next, tag="a").wait()
    ring.comm.exchange(receive=(x,), source=ring.previous, tag="a").wait()


def test_send_then_receive_on_every_rank_is_a_deadlock_with_its_cycle() -> None:
    with pytest.raises(DeadlockError, match=r"cycle: 0 → 1 → 2 → 0") as caught:
        VirtualCluster(3).run(send_first)
    for rank in range(3):
        assert f"rank {rank} sends float32[2] to rank {(rank + 1) % 3} (exchange 0, 'a'" in str(caught.value)


def test_waiting_for_a_rank_that_has_finished_is_a_deadlock() -> None:
    def program(ring: Ring) -> None:
        if ring.rank == 0:
            ring.shift(torch.zeros(2))

    with pytest.raises(DeadlockError, match="a rank that has finished\nremedy: call ring.shift"):
        VirtualCluster(3).run(program)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x, rank: ((x if rank else x[:1]).clone(), "a"), r"float32\[1\]"),
        (lambda x, rank: (x if rank else x.double(), "a"), "float64"),
        (lambda x, rank: (x, "a" if rank else "b"), "'b'"),
    ],
    ids=["shape", "dtype", "tag"],
)
@each_cluster
def test_ends_that_do_not_fit_name_both_ranks(cluster: Any, change, told) -> None:
    def program(ring: Ring) -> None:
        tensor, tag = change(torch.zeros(2), ring.rank)
        ring.shift(tensor, tag=tag)

    with pytest.raises(MismatchError, match=told) as caught:
        cluster(2).run(program)
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)


@each_cluster
def test_a_rank_that_dies_is_named_and_its_peers_are_told(cluster: Any) -> None:
    told: dict[int, str] = {}

    def program(ring: Ring) -> None:
        if ring.rank == 2:
            raise KeyError("lost")
        try:
            ring.shift(torch.zeros(2))
        except PeerDiedError as error:
            told[ring.rank] = str(error)
            raise

    with pytest.raises(RankFailedError, match="rank 2 raised KeyError") as caught:
        cluster(4).run(program)
    assert isinstance(caught.value.__cause__, KeyError)
    # Rank 0 gets no error, because it exchanged with living ranks only. On the clocked cluster rank 1 gets
    # none either, because a send does not wait for its receiver.
    assert set(told) == ({1, 3} if cluster is VirtualCluster else {3})
    assert all("rank 2" in text and "KeyError" in text for text in told.values())


@each_cluster
def test_the_packages_own_errors_come_out_as_they_are(cluster: Any) -> None:
    def program(ring: Ring) -> None:
        raise ShapeError("x", "y")

    with pytest.raises(ShapeError) as caught:
        cluster(2).run(program)
    assert caught.value.__notes__ == ["raised on rank 0 of 2"]


@each_cluster
def test_an_exchange_nobody_waits_for_is_an_error(cluster: Any) -> None:
    with pytest.raises(UnreceivedError, match="rank 1 never waited for exchange 0"):
        cluster(2).run(lambda ring: ring.post(torch.zeros(2)) and None)


@each_cluster
def test_a_message_nobody_takes_is_an_error(cluster: Any) -> None:
    def program(ring: Ring) -> None:
        if ring.rank == 0:
            ring.comm.exchange(send=(torch.zeros(2),), to=1, tag="stray")

    with pytest.raises(UnreceivedError, match="rank 0 sends float32.*to rank 1.*'stray'"):
        cluster(2).run(program)


def test_no_thread_is_left_behind() -> None:
    before = set(threading.enumerate())  # a thread of another test may end meanwhile
    VirtualCluster(8).run(go_round)
    with pytest.raises(DeadlockError):
        VirtualCluster(8).run(send_first)
    assert set(threading.enumerate()) <= before


def test_computations_run_beside_each_other_and_keep_the_ranks_grad_mode() -> None:
    meeting = threading.Barrier(2, timeout=20)

    @thread_safe
    def met() -> tuple[bool, bool]:
        meeting.wait()  # the barrier breaks unless both ranks compute at the same time
        return torch.get_num_threads() == 1, torch.is_grad_enabled()

    def program(ring: Ring) -> tuple[bool, bool]:
        with torch.set_grad_enabled(ring.rank == 0):
            return ring.compute("meet", met)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert VirtualCluster(2).run(program).results == [(True, True), (True, False)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_other_computations_run_one_at_a_time_and_draw_the_same_numbers() -> None:
    def program(ring: Ring) -> list[float]:
        return ring.compute("draw", lambda: torch.randn(3).tolist())

    drawn = []
    for _ in range(3):
        torch.manual_seed(0)
        drawn.append(VirtualCluster(4).run(program).results)
    assert drawn[0] == drawn[1] == drawn[2]


@each_cluster
def test_a_computation_may_compute_but_not_communicate(cluster: Any) -> None:
    def nested(ring: Ring) -> int:
        return ring.compute("outer", lambda: ring.compute("inner", lambda: 7))

    def talks(ring: Ring) -> None:
        ring.compute("outer", lambda: ring.shift(torch.zeros(1)))

    assert cluster(2).run(nested).results == [7, 7]
    with pytest.raises(CommError, match=r"not inside it"):
        cluster(2).run(talks)


def test_backward_after_the_run_is_an_error_not_a_hang() -> None:
    layout = zigzag(16, 2)
    q = torch.randn(1, 1, 16, 8, requires_grad=True)

    def program(ring: Ring) -> torch.Tensor:
        mine = layout.shard(q, ring.rank)
        return ring_attention(mine, mine, mine, ring=ring, layout=layout)

    outs = VirtualCluster(2).run(program).results
    with pytest.raises(CommError, match="inside the program"):
        sum(out.sum() for out in outs).backward()


@pytest.mark.parametrize("loop", ["while True: pass", "ring.barrier()\nwhile True: ring.compute('x', int)"])
def test_an_interrupt_ends_a_run_and_its_threads(loop: str) -> None:
    """Ctrl-C in a notebook ends a run whose rank never ends, and ends its threads."""
    script = f"""
import signal, threading, torch
from ringlab import VirtualCluster
signal.signal(signal.SIGALRM, signal.default_int_handler)
def program(ring):
    exec({loop!r}, {{"ring": ring}})
signal.setitimer(signal.ITIMER_REAL, 1.0)
try:
    VirtualCluster(2).run(program)
except KeyboardInterrupt:
    print("interrupted", threading.active_count())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("interrupted 1", "")


def test_ranks_go_on_in_their_turn_whichever_computation_ends_first() -> None:
    order: list[int] = []

    def program(ring: Ring) -> None:
        for _ in range(3):
            ring.compute("nap", thread_safe(lambda: time.sleep(0.002 * (3 - ring.rank))))
            order.append(ring.rank)

    VirtualCluster(3).run(program)
    assert order == [0, 1, 2] * 3


def test_a_thread_that_a_rank_waits_for_may_use_the_ring() -> None:
    """A deadlock or an error there reaches the rank, and no thread is left."""

    def shifts(ring: Ring) -> int:
        return in_another_thread(lambda: int(ring.shift(torch.tensor([ring.rank]))))

    def waits(ring: Ring) -> None:
        in_another_thread(lambda: ring.comm.exchange(receive=(torch.zeros(1),), source=ring.previous).wait())

    before = set(threading.enumerate())
    assert VirtualCluster(3).run(shifts).results == [2, 0, 1]
    with pytest.raises(DeadlockError):
        VirtualCluster(3).run(waits)
    assert set(threading.enumerate()) <= before


def test_an_exception_in_a_computation_reaches_the_rank() -> None:
    def program(ring: Ring) -> str:
        try:
            ring.compute("fail", lambda: [][0])
        except IndexError as error:
            return str(error)
        return ""

    assert VirtualCluster(2).run(program).results == ["list index out of range"] * 2


@pytest.mark.parametrize("P", [0, 1.5])
@each_cluster
def test_impossible_sizes(cluster: Any, P) -> None:
    with pytest.raises(WorldSizeError):
        cluster(P)


@each_cluster
def test_a_peer_outside_the_cluster(cluster: Any) -> None:
    def program(ring: Ring) -> None:
        ring.comm.exchange(send=(torch.zeros(1),), to=7)

    with pytest.raises(WorldSizeError, match="to=7"):
        cluster(2).run(program)


class SlowRankOne(Costs):
    def compute(self, rank, label, args):
        return 3.0 if rank == 1 else 1.0

    def message(self, source, to, nbytes):
        return nbytes / 8


def test_virtual_time_follows_the_messages() -> None:
    def program(ring: Ring) -> float:
        ring.compute("work", lambda: None)
        ring.shift(torch.zeros(4))
        return ring.comm.now()

    # Rank 1 is ready at 3, and ranks 0 and 2 are ready at 1; 16 bytes take 2. Rank 2 waits for rank 1's
    # block. Rank 0's send is complete when rank 1 receives it. Rank 1 itself waits for no rank.
    assert VirtualCluster(3, costs=SlowRankOne()).run(program).results == [5.0, 5.0, 5.0]


def test_posting_before_computing_hides_the_message() -> None:
    def program(ring: Ring, early: bool) -> float:
        x = torch.zeros(2)
        work = ring.post(x) if early else None
        ring.compute("work", lambda: None)
        (work or ring.post(x)).wait()
        return ring.comm.now()

    assert VirtualCluster(2).run(program, True).results == [1.0, 1.0]
    assert VirtualCluster(2).run(program, False).results == [1.5, 1.5]


def test_collectives() -> None:
    def program(ring: Ring) -> tuple:
        mine = torch.full((ring.rank + 1, 1), float(ring.rank))
        gathered = ring.all_gather(mine, [(r + 1, 1) for r in range(ring.world_size)])
        total = ring.all_reduce(torch.tensor([float(ring.rank)]))
        largest = ring.all_reduce(torch.tensor([float(ring.rank)]), "max")
        ring.barrier()
        return [g[0, 0].item() for g in gathered], total.item(), largest.item()

    outcome = VirtualCluster(3).run(program)
    assert outcome.results == [([0.0, 1.0, 2.0], 3.0, 2.0)] * 3
    assert not any(e.tag == "control:barrier" for e in outcome.trace.exchanges())
    assert any(e.tag == "control:barrier" for e in outcome.trace.exchanges(control=True))


def test_the_trace_is_a_file_that_perfetto_reads(tmp_path) -> None:
    outcome = VirtualCluster(2).run(go_round)
    document = outcome.trace.to_chrome(tmp_path / "trace.json")
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 2 and {span["pid"] for span in spans} == {0, 1}
    assert all(span["ts"] >= 0 and span["dur"] >= 0 and span["args"]["bytes_sent"] == 24 for span in spans)
    assert json.loads((tmp_path / "trace.json").read_text()) == json.loads(json.dumps(document))


def test_the_trace_tells_which_block_was_chosen_where_that_was_left_open() -> None:
    def program(ring: Ring, block: str) -> None:
        x = torch.randn(1, 1, 2, 16)
        ring_attention(x, x, x, ring=ring, layout=zigzag(4, 2), block=block)

    trace = VirtualCluster(2).run(program, "auto").trace
    for rank in (0, 1):
        assert [(c.asked, c.chosen) for c in trace.choices(rank)] == [("block='auto'", "native")]
    told = [event["name"] for event in trace.to_chrome()["traceEvents"] if event["ph"] == "i"]
    assert told == ["block='auto': native"] * 2
    assert VirtualCluster(2).run(program, "naive").trace.choices() == []


def test_what_is_handed_over_moves_without_a_copy_and_only_when_its_owner_waits() -> None:
    def program(ring: Ring) -> tuple[float, bool]:
        mine, into = torch.full((4,), float(ring.rank)), torch.empty(4)
        before = mine.data_ptr()
        addresses = ring.all_gather(torch.tensor([before]))
        work = ring.post(mine, into=[into], release_after_send=True)
        assert float(mine[0]) == ring.rank  # still ours to read
        (received,) = work.wait()
        return float(received[0]), received.data_ptr() == int(addresses[ring.previous])

    assert VirtualCluster(3).run(program).results == [(2.0, True), (0.0, True), (1.0, True)]
