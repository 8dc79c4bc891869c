"""Over NCCL every message would have the right communicator, stream and order.

Every schedule runs forward and backward on a stand-in for NCCL, which gets the same commands and checks the
rules of streams; see fake_nccl. The results must be those of the virtual cluster, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringlab import VirtualCluster, zigzag
from ringlab.comm.processes import wire_format
from ringlab.comm.processes.carriers import PointToPoint
from ringlab.comm.ring import Ring
from ringlab.comm.way import OnWay
from ringlab.schedules import available, bidirectional, ring
from ringlab.schedules.double_ring import DoubleRingSchedule, _NodeRings
from ringlab.schedules.hybrid import HybridSchedule
from ringlab.schedules.multi_ring import MultiRingSchedule
from tests.blocks.device_calls import rewritten
from tests.comm.fake_nccl import BrokenRule, Nccl, stuck
from tests.schedules.problems import Problem, program

COLUMNS = HybridSchedule(ring=4, ulysses=2, between=DoubleRingSchedule(node=2))
"""Double rings through the columns of a mesh, so that a way has only some of the ranks."""
WAYS: dict[Any, tuple[int, dict[str, set[int]]]] = {
    "ring": (4, {"common": {1}}),
    "double-ring(node=2)": (4, {"common": {1, 3}, "between nodes": {2}}),
    "bidirectional": (6, {"common": {1, 3}, "from the next rank": {5, 2}}),
    "multi-ring": (5, {"common": {1}, "stride 4": {4}, "stride 2": {2}, "stride 3": {3}}),
    COLUMNS: (8, {"common": {1, 2, 6, 7}, "between nodes": {4}}),
}
"""The number of ranks of a run, and for each of its ways, how many ranks ahead the messages go."""


def problem(P: int, layout: Callable[..., Any] = zigzag) -> Problem:
    return Problem(layout(4 * P, P), H=4, K=4)


def run(schedule: Any, P: int, bound: bool = False) -> Nccl:
    """Run a schedule on the stand-in, compare its results, and check the order of its messages."""
    nccl = Nccl(P, bound)
    found = nccl.run(program, problem(P), schedule)
    expected = VirtualCluster(P, memory=False).run(program, problem(P), schedule).results
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, theirs)), "results differ"
    for one_queue in (False, True):
        assert not stuck(nccl.launched, one_queue), (
            "the orders in which ranks launch their messages block each other"
        )
    for batches in nccl.launched:
        assert all(batch.done for batch in batches)
        pairs = {(batch.group, batch.stream) for batch in batches}
        assert len(pairs) == len({group for group, _ in pairs}) == len({of for _, of in pairs}), (
            "pairs differ"
        )
    assert all(count == len(group.ranks) for group, count in nccl.opened.items())
    assert not nccl.synchronized, f"the host waited for the {nccl.synchronized[0]}"
    return nccl


def ways(nccl: Nccl) -> dict[str, set[int]]:
    """Return, for each way, how many ranks ahead its messages go."""
    found: dict[str, set[int]] = {}
    for batches in nccl.launched:
        for batch in batches:
            for _, sender, receiver, _ in batch.sends:
                distance = (receiver - sender) % len(nccl.launched)
                found.setdefault(batch.group.way, set()).add(distance)
    return found


@pytest.mark.parametrize("schedule", WAYS, ids=str)
def test_each_way_has_a_communicator_and_a_stream(schedule: Any) -> None:
    P, expected = WAYS[schedule]
    assert ways(run(schedule, P)) == expected


@pytest.mark.parametrize("name", sorted(set(available()) - set(WAYS)))
def test_every_other_schedule_keeps_the_rules(name: str) -> None:
    run(name, 4)


def test_a_way_has_the_ranks_of_its_ring_and_each_opens_it_once() -> None:
    assert {group.ranks for group in run(COLUMNS, 8).opened} == {(0, 4), (1, 5), (2, 6), (3, 7)}


def test_a_bound_group_is_not_split_by_some_of_its_ranks() -> None:
    """If a process group is bound to a device, only a way of all ranks has a communicator of its own."""
    assert set(ways(run("double-ring(node=2)", 4, bound=True))) == {"common"}
    assert ways(run("bidirectional", 6, bound=True)) == WAYS["bidirectional"][1]
    change = PointToPoint, "_open", "if bound and", "if False and"
    with rewritten(*change), pytest.raises(BrokenRule, match="only some ranks split"):
        run("double-ring(node=2)", 4, bound=True)


LAUNCH = PointToPoint, "_on_stream"
BEGIN = "stream.wait_stream(torch.cuda.current_stream(device))"
FIRST = "dist.all_reduce(torch.zeros(1, device=device), group=group)"
HOP = ring, "circulate", "arrived = work.wait()"
MUTANTS: dict[str, tuple[Any, tuple[Any, str, str, str], str]] = {
    "begins too early": (COLUMNS, (*LAUNCH, BEGIN, "pass"), "began before"),
    "synchronizes": (COLUMNS, (*LAUNCH, BEGIN, f"{BEGIN}; torch.cuda.synchronize()"), "device"),
    "reads a value": ("ring", (*HOP, "bool(here[0].sum() > 0); arrived = work.wait()"), "result of aten::_local_scalar"),
    "frees what is in flight": (COLUMNS, (*LAUNCH, "op.tensor.record_stream(stream)", "pass"), "freed and used again"),
    "keeps all but one": (COLUMNS, (*LAUNCH, "for op in ops:", "for op in ops[1:]:"), "freed and used again"),
    "ends too early": (
        "ring", (*LAUNCH, "return _OnStream(stream.record_event())", "return _OnStream(torch.cuda.Event())"), "differ",
    ),
    "one communicator": (COLUMNS, (PointToPoint, "start", "self._line(current_way(), device)", "self._lines[None]"), ""),
    "one stream": (
        COLUMNS, (PointToPoint, "_open", "_Line(group, ", "_Line(group, self._lines[None].stream, "), "pairs",
    ),
    "ranks of the whole": (COLUMNS, (PointToPoint, "_ops", "line.places[half.peer]", "1 - line.places[half.peer]"), "to the rank itself"),
    "no first operation": (COLUMNS, (PointToPoint, "_open", FIRST, "pass"), "first operation"),
    "normal priority": (COLUMNS, (PointToPoint, "_open", "high_priority(self.limit)", "None"), "a communicator with"),
    "opened by all": (
        COLUMNS, (PointToPoint, "_open", "use_local_synchronization=True", "use_local_synchronization=False"),
        "only some ranks open",
    ),
    "reads before the wait": ("ring", (*HOP, "arrived = tuple(x.clone() for x in into); work.wait()"), "differ"),
    "writes what it sends": ("ring", (*HOP, "here[0].mul_(1); arrived = work.wait()"), "a sent tensor was written"),
    "writes where it receives": ("ring", (*HOP, "into[0].fill_(0); arrived = work.wait()"), "a receive buffer was written"),
    "both directions one way": (
        "bidirectional", (bidirectional, "_from_next", 'Ring(OnWay(call.ring.comm, "from the next rank"))', "call.ring"), "",
    ),
    "all rings one way": (
        "multi-ring", (MultiRingSchedule, "_lanes", 'Ring(OnWay(call.ring.comm, f"stride {stride}")) if lanes else', ""), "",
    ),
    "both levels one way": ("double-ring(node=2)", (_NodeRings, "__init__", "OnWay(", "(lambda comm, name: comm)("), ""),
}  # fmt: skip
"""The schedule, the mistake, and words that its error must contain, or "" if messages only change their way."""


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mistake_is_noticed(name: str) -> None:
    schedule, change, says = MUTANTS[name]
    P, expected = WAYS[schedule]
    with rewritten(*change):
        if not says:
            assert ways(run(schedule, P)) != expected
            return
        with pytest.raises((BrokenRule, AssertionError)) as caught:
            run(schedule, P)
    assert says in str(caught.value)


def posts_in_another_order(around: Ring) -> None:
    """Post an exchange on each of two ways, in the other order on odd ranks, and wait for both."""
    rings = [around, Ring(OnWay(around.comm, "other"))][:: (-1) ** around.rank]
    for work in [each.post(torch.ones(3), tag="block") for each in rings]:
        work.wait()


def test_an_order_that_is_not_that_of_the_other_ranks_is_noticed() -> None:
    """With one hardware queue a GPU runs messages in the order of their launches, so these ranks wait for ever."""
    nccl = Nccl(4)
    with rewritten(wire_format.Expected, "meet", "found = difference(", "found = None and difference("):
        nccl.run(posts_in_another_order)
    assert (stuck(nccl.launched, one_queue=False), stuck(nccl.launched, one_queue=True)) == (False, True)
