"""A subgroup is a transport like any other: rings, collectives, traces and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.comm.trace import Compute
from ringlab.errors import RinglabError, WorldSizeError


def rows_and_columns(ring: Ring) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """On 2 rows: who came before in the row and in the column, all of the row, the sum of the column."""
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


def test_computations_choices_and_clock_are_the_transports() -> None:
    def program(ring: Ring) -> bool:
        group = SubGroup(ring.comm, [ring.rank])
        assert group.compute("one", lambda x: x + 1, 1) == 2
        group.chose("block='auto'", "naive")
        return group.now() == ring.comm.now()

    outcome = VirtualCluster(2).run(program)
    assert outcome.results == [True, True] and len(outcome.trace.choices()) == 2
    assert [e.label for e in outcome.trace.events if isinstance(e, Compute)] == ["one", "one"]


@pytest.mark.parametrize("ranks", [[1, 2], [0, 4], [0, 0], [-1, 0], []])
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
