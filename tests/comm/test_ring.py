"""Subgroups stay among their ranks, the memory meter counts live bytes, and tensors in transfer are protected.

A subgroup is a transport like any other: its rings, collectives, traces and errors are tested. The memory
meter counts live bytes, their peak and the largest tensor of each rank. The tests of tensors in transfer
cover operations that a learner's program may do; the judge's tests cover others.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster
from ringlab.comm.memory import MemoryMeter
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.comm.virtual.turns import _Job
from ringlab.comm.wrappers.strict import Strict
from ringlab.errors import CommError, RinglabError, ShapeError, WorldSizeError


def test_posting_what_shift_returned_without_unpacking_it_says_so():
    def program(ring):
        pair = ring.shift(torch.zeros(1, 2), torch.ones(1, 2))
        return ring.shift(pair)

    with pytest.raises(ShapeError) as failed:
        VirtualCluster(2).run(program)
    assert failed.value.got == "a tuple of 2" and "k, v = ring.shift(k, v)" in failed.value.remedy


def rows_and_columns(ring: Ring) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Return the previous rank in the row and in the column, the ranks of the row, and the column's sum."""
    width = ring.world_size // 2
    row, place = divmod(ring.rank, width)
    of_row = Ring(SubGroup(ring.comm, range(row * width, (row + 1) * width)))
    of_column = Ring(SubGroup(ring.comm, [place, place + width]))
    mine = torch.tensor([float(ring.rank)])
    assert (of_row.rank, of_column.rank, of_row.world_size, of_column.world_size) == (place, row, width, 2)
    for ring_of in (of_row, of_column):
        ring_of.barrier()
    relayed = of_row.post(mine, hops=0).wait()[0]
    return relayed, of_column.shift(mine), of_row.all_gather(mine), of_column.all_reduce(mine)


def assert_rows_and_columns(results: list[Any]) -> None:
    P, width = len(results), len(results) // 2
    for rank, (before, above, row, column) in enumerate(results):
        first = rank // width * width
        assert (before, above) == (first + (rank - 1) % width, (rank + width) % P)
        assert [x.item() for x in row] == list(range(first, first + width))
        assert column == 2 * (rank % width) + width


def test_rings_and_collectives_stay_inside() -> None:
    outcome = VirtualCluster(6).run(rows_and_columns)
    assert_rows_and_columns(outcome.results)
    assert {(e.rank, e.to) for e in outcome.trace.exchanges(0)} == {(0, 1), (0, 2), (0, 3)}


def test_subgroups_of_subgroups_and_any_order() -> None:
    def program(ring: Ring) -> float:
        half = SubGroup(ring.comm, [3, 1] if ring.rank % 2 else [2, 0])
        alone = SubGroup(half, [half.rank])
        assert alone.world_size == 1 and alone.all_reduce(torch.ones(1)).item() == 1
        return float(half.all_gather(torch.tensor([ring.rank]))[0])

    assert VirtualCluster(4).run(program).results == [2, 3, 2, 3]


@pytest.mark.parametrize("ranks", [[1, 2], [0, 4], [0, 0]])
def test_ranks_that_make_no_group_are_refused(ranks: list[int]) -> None:
    def program(ring: Ring) -> RinglabError | None:
        try:
            SubGroup(ring.comm, ranks)
        except WorldSizeError as error:
            return error
        return None

    error = VirtualCluster(4).run(program).results[0]
    assert error is not None and "rank 0 among them" in str(error)


def test_a_rank_outside_is_no_peer() -> None:
    def program(ring: Ring) -> str:
        group, x = SubGroup(ring.comm, [ring.rank]), torch.ones(1)
        said = []
        for post in (group.exchange, group.hand_over):
            with pytest.raises(WorldSizeError, match="a rank from 0 to 0") as caught:
                post(send=(x,), to=1, receive=(x,), source=1)
            said.append(caught.value.got)
        return " ".join(said)

    assert VirtualCluster(2).run(program).results == ["to=1 to=1"] * 2


def test_the_meter_counts_what_lives_at_once() -> None:
    """Views and results in place are no new memory, a view keeps its memory alive, and gradients count."""
    meter, given = MemoryMeter(), torch.ones(1000)
    with meter.watch():
        given[:10].add_(1)
        given.mul_(2)
        assert (meter.peak_bytes, meter.live_bytes) == (0, 0)
        whole = torch.ones(1000)
        part = whole[:10]
        del whole
        assert meter.live_bytes == 4000
        del part
        a, b = torch.ones(100), torch.ones(200)
        del a, b
        assert (meter.peak_bytes, meter.largest_bytes, meter.live_bytes) == (4000, 4000, 0)
        x = torch.ones(1000, requires_grad=True)
        (x * 2).sum().backward()
    assert x.grad is not None and meter.live_bytes >= 8000


def test_each_rank_is_accounted_on_its_own() -> None:
    def program(ring):
        mine = torch.ones(100 * (ring.rank + 1))
        ring.compute("square", lambda: mine * mine)

    reports = VirtualCluster(3).run(program).memory
    assert [(r.rank, r.largest_bytes, r.peak_bytes) for r in reports] == [
        (0, 400, 800),
        (1, 800, 1600),
        (2, 1200, 2400),
    ]


def test_a_materialised_score_matrix_is_seen() -> None:
    """The meter counts the S × S scores of a program that keeps them all, which a ring must not do."""

    def program(ring, q):
        return (q @ q.mT).softmax(-1) @ q

    report = VirtualCluster(1).run(program, torch.randn(1, 1, 256, 16)).memory[0]
    assert report.largest_bytes == 256 * 256 * 4


def test_a_computation_that_is_over_holds_no_tensors() -> None:
    """A finished job holds neither its inputs nor its result, once the rank has fetched the result."""
    given, held = torch.ones(3), []
    seen = weakref.ref(given)
    job = _Job(lambda given=given: given + 1)
    del given
    job._done = SimpleNamespace(release=lambda: held.append(seen() is not None), acquire=lambda: True)
    job.run()
    assert held == [False]
    result = weakref.ref(job.result())
    assert result() is None


def run(program, P: int = 3):
    return VirtualCluster(P).run(
        lambda ring: program(Ring(Strict(ring.comm)), torch.full((4,), 1.0 + ring.rank))
    )


def test_a_program_that_keeps_the_rules_notices_nothing() -> None:
    def double_buffered(ring, x):
        spare = torch.empty_like(x)
        for step in range(2):
            work = ring.post(x, into=(spare,))
            ring.compute(f"{step}", torch.sum, x)
            (received,) = work.wait()
            x, spare = received, x
            spare.zero_()  # allowed from here on
        return x

    outcome = run(double_buffered)
    assert [r[0].item() for r in outcome.results] == [2.0, 3.0, 1.0]
    assert outcome.trace.exposed() == 0 and outcome.trace.rounds(0) == 2


def test_a_buffer_on_its_way_holds_nan() -> None:
    def impatient(ring, x):
        buffer = torch.ones_like(x)
        work = ring.post(x, into=(buffer,))
        early = buffer.clone()
        work.wait()
        return early, buffer

    early, late = run(impatient, 2).results[0]
    assert torch.isnan(early).all() and (late == 2).all()


def test_one_buffer_for_both_is_refused() -> None:
    with pytest.raises(CommError, match="also sent"):
        run(lambda ring, x: ring.post(x, into=(x.view(2, 2).view(4),)).wait())


def test_writing_what_is_sent_is_refused_through_a_view_too() -> None:
    def hasty(ring, x):
        part, work = x[:2], ring.post(x)
        part.mul_(2)
        return work.wait()

    with pytest.raises(CommError, match="written while it was sent"):
        run(hasty)
