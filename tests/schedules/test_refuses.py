"""What schedules refuse: by name, on every rank, before any data moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringlab import VirtualCluster, ring_attention
from ringlab.comm.ring import Ring
from ringlab.errors import AgreementError, BackendError, RinglabError, ShapeError, WorldSizeError
from ringlab.layout import contiguous
from ringlab.schedules import available, get_schedule
from ringlab.schedules.double_ring import DoubleRingSchedule
from ringlab.schedules.hybrid import HybridSchedule
from ringlab.schedules.ring import RingSchedule
from ringlab.schedules.ulysses import UlyssesSchedule

WRONG: dict[str, tuple[Any, int, int, type[RinglabError], str]] = {
    "ranks that are no ring × ulysses": ("hybrid(ring=2, ulysses=2)", 4, 4, WorldSizeError, "3 ranks"),
    "ranks in no rows": ("hybrid(ulysses=2)", 4, 4, WorldSizeError, "schedule 'hybrid(ulysses=2)'"),
    "more rows than ranks": ("hybrid(ring=4)", 4, 4, WorldSizeError, "schedule 'hybrid(ring=4)'"),
    "ranks that fill no nodes": ("double-ring(node=2)", 4, 4, WorldSizeError, "node= that divides 3"),
    "columns that fill no nodes": (
        HybridSchedule(ulysses=1, between=DoubleRingSchedule(2)), 4, 4, WorldSizeError, "whole nodes of 2",
    ),
    "query heads that do not split": ("ulysses", 4, 4, ShapeError, "H=4 query and K=4"),
    "key/value heads that do not split": ("ulysses", 6, 2, ShapeError, "rows of 1 ranks"),
    "an unknown degree": ("hybrid(tensor=2)", 4, 4, BackendError, "schedule='hybrid(ring=2, ulysses=2)'"),
    "a degree twice": ("double-ring(node=3, node=3)", 4, 4, BackendError, "node=2"),
    "an invalid degree": ("double-ring(node=x)", 4, 4, BackendError, "node=x"),
    "degrees where there are none": ("ulysses(ring=3)", 4, 4, BackendError, "without degrees"),
    "a degree below one": ("hybrid(ulysses=0)", 4, 4, WorldSizeError, "ulysses= a degree ≥ 1"),
    "a node of nobody": ("double-ring(node=0)", 4, 4, WorldSizeError, "node="),
    "brackets that do not close": ("hybrid(ring=3", 4, 4, BackendError, "a schedule among ring"),
    "what is no schedule": (3, 4, 4, BackendError, "a schedule among ring"),
}  # fmt: skip


def call(ring: Ring, schedule: Any, H: int, K: int) -> RinglabError | None:
    layout = contiguous(6, ring.world_size)
    q, k = (torch.ones(1, heads, layout.length(ring.rank), 8) for heads in (H, K))
    try:
        ring_attention(q, k, k.clone(), ring=ring, layout=layout, schedule=schedule, block="naive")
    except RinglabError as error:
        return error
    return None


def only_rank_1(ring: Ring, name: str) -> RinglabError | None:
    schedule, H, K, *_ = WRONG[name]
    return call(ring, schedule if ring.rank == 1 else "ring", H, K)


@pytest.mark.parametrize("name", WRONG)
def test_every_rank_says_what_is_wrong(name: str) -> None:
    schedule, H, K, kind, words = WRONG[name]
    outcome = VirtualCluster(3, memory=False).run(call, schedule, H, K)
    assert outcome.trace.bytes_sent() == 0
    for error in outcome.results:
        assert type(error) is kind and words in str(error), error


@pytest.mark.parametrize("name", WRONG)
def test_one_rank_called_wrongly(name: str) -> None:
    _, _, _, kind, words = WRONG[name]
    outcome = VirtualCluster(3, memory=False).run(only_rank_1, name)
    assert outcome.trace.bytes_sent() == 0
    assert type(outcome.results[1]) is kind and words in str(outcome.results[1])
    for rank in (0, 2):
        assert type(outcome.results[rank]) is AgreementError
        assert f"rank 1: error {kind.__name__}" in str(outcome.results[rank])


def call_all(ring: Ring) -> list[RinglabError | None]:
    everywhere = [call(ring, schedule, H, K) for schedule, H, K, *_ in WRONG.values()]
    return everywhere + [only_rank_1(ring, name) for name in WRONG]


def test_ranks_with_other_degrees_disagree() -> None:
    def program(ring: Ring) -> RinglabError | None:
        return call(ring, f"hybrid(ulysses={2 if ring.rank else 4})", 4, 4)

    for error in VirtualCluster(4, memory=False).run(program).results:
        assert type(error) is AgreementError and "schedule=hybrid(ulysses=4)" in str(error)


def test_one_schedule_by_several_names() -> None:
    """Ranks agree on what is meant, not on how it is written."""

    def program(ring: Ring) -> RinglabError | None:
        names: list[Any] = [
            "hybrid",
            "hybrid(ulysses=2)",
            " hybrid( ulysses = 2 ) ",
            HybridSchedule(ulysses=2),
        ]
        return call(ring, names[ring.rank], 4, 4)

    assert VirtualCluster(4, memory=False).run(program).results == [None] * 4


def test_names_and_objects() -> None:
    assert [get_schedule(name).name.split("(")[0] for name in available()] == list(available())
    for schedule in (RingSchedule(), UlyssesSchedule(), HybridSchedule(2, 3), DoubleRingSchedule(5)):
        assert get_schedule(schedule) is schedule
        assert get_schedule(schedule.name).name == schedule.name
    between = HybridSchedule(ulysses=2, between=DoubleRingSchedule(4))
    assert between.name == "hybrid(ulysses=2, between=double-ring(node=4))"
