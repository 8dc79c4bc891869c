"""Every schedule gives the oracle's attention for any degrees, layout, heads, mask, score rules and sinks.

Schedules refuse impossible calls by name, on every rank, before any data moves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster, launch, ring_attention
from ringlab.comm.ring import Ring
from ringlab.errors import AgreementError, BackendError, RinglabError, ShapeError, WorldSizeError
from ringlab.layout import Layout, contiguous, striped, zigzag
from ringlab.mask import Mask
from ringlab.schedules import available, get_schedule
from ringlab.schedules.bidirectional import BidirectionalSchedule
from ringlab.schedules.double_ring import DoubleRingSchedule
from ringlab.schedules.hybrid import HybridSchedule
from ringlab.schedules.multi_ring import MultiRingSchedule
from ringlab.schedules.query_ring import BurstSchedule, QueryRingSchedule
from ringlab.schedules.ring import RingSchedule
from ringlab.schedules.ulysses import UlyssesSchedule
from tests.comm.test_ring import assert_rows_and_columns, rows_and_columns
from tests.laws.draw import MAKERS
from tests.laws.test_mask_laws import problems as layouts_and_masks
from tests.refusals import assert_refused, errors_on
from tests.schedules import test_decode
from tests.schedules.problems import Problem, hold, program, solve


def in_another_order(S: int, P: int) -> Layout:
    """Return a zig-zag whose ranks store later tokens first, as only a user's own layout does."""
    runs = tuple(tuple(reversed(zigzag(S, P).runs(rank))) for rank in range(P))
    return Layout(S, P, "in another order", runs)


TRAVELLING = (QueryRingSchedule(), BurstSchedule(), BidirectionalSchedule(), MultiRingSchedule())


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, Any]:
    """Return a problem, and a schedule that supports the problem."""
    inside, ring = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3]))
    layout, mask = draw(layouts_and_masks(st.integers(1, 20), st.just(inside * ring)))
    if draw(st.booleans()):
        layout = draw(st.sampled_from([*MAKERS, in_another_order]))(layout.S, layout.P)
    if draw(st.booleans()):
        schedule: Any = draw(st.sampled_from([DoubleRingSchedule(node=inside), *TRAVELLING]))
        K = draw(st.integers(1, 3))
    else:
        node = draw(st.sampled_from([n for n in (1, 2, 3) if ring % n == 0]))
        between = draw(st.sampled_from([DoubleRingSchedule(node), *TRAVELLING[:-1]]))
        schedule = HybridSchedule(ulysses=inside, between=between)
        K = draw(st.sampled_from([k for k in range(1, 5) if k % inside == 0 or inside % k == 0]))
        if ring == 1:
            schedule = draw(st.sampled_from([schedule, "ulysses"]))
    H = K * draw(st.integers(1, 2))
    while isinstance(schedule, (str, HybridSchedule)) and H % inside:
        H += K
    more = draw(
        st.fixed_dictionaries(
            {
                "B": st.integers(1, 2),
                "through_lse": st.booleans(),
                "Dv": st.sampled_from([0, 1, 7]),
                "softcap": st.sampled_from([None, None, 0.8]),
                "dropout": st.sampled_from([0.0, 0.0, 0.4]),
                "seed": st.integers(0, 99),
                "sinks": st.sampled_from([0.0, 1.0, 20.0]),
            }
        )
    )
    return Problem(layout, H, K, mask, **more), schedule


@settings(max_examples=60)
@given(problems(), st.sampled_from(["naive", "blockwise"]))
def test_any_schedule_equals_the_oracle(drawn: tuple[Problem, Any], block: str) -> None:
    problem, schedule = drawn
    hold(problem, schedule, block)


def test_rows_of_one_rank_are_the_ring_and_one_column_is_ulysses() -> None:
    """A mesh with a degree of one gives the bits of the ring or of Ulysses."""
    problem = Problem(zigzag(21, 4), 8, 2)
    for one, other in (
        (HybridSchedule(ulysses=1), "ring"),
        (HybridSchedule(ring=1), "ulysses"),
        (DoubleRingSchedule(node=1), "ring"),
        (DoubleRingSchedule(node=4), "ring"),
    ):
        for a, b in zip(solve(problem, one), solve(problem, other), strict=True):
            assert torch.equal(a, b), (one, other)


def test_queries_meet_blocks_in_the_order_of_the_ring() -> None:
    """If each pair of ranks is one tile, the forward of a ring of queries has the bits of a ring of K/V."""
    problem = Problem(contiguous(21, 4), 8, 2, dtype=torch.float32)
    ring, by_queries = (solve(problem, name) for name in ("ring", "query-ring"))
    assert torch.equal(ring.out, by_queries.out) and torch.equal(ring.lse, by_queries.lse)


def test_what_is_not_asked_for_is_not_sent() -> None:
    """Without return_lse no lse is sent, and out and gradients are the same."""
    problem = Problem(zigzag(16, 4), 4, 2)
    with_lse, without = (VirtualCluster(4).run(program, problem, "ulysses", asked) for asked in (True, False))
    for (out, _, *gradients), (only, *others) in zip(with_lse.results, without.results, strict=True):
        assert torch.equal(out, only)
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    sent = {e.tag for e in without.trace.exchanges()}
    assert not {"lse to tokens", "dlse to heads"} & sent and "lse to tokens" in {
        e.tag for e in with_lse.trace.exchanges()
    }


@pytest.mark.parametrize(
    ("schedule", "through_lse", "why"),
    [
        ("ring", True, "a gradient of lse"),
        ("query-ring", False, "queries that travel"),
        ("burst", False, "queries that travel"),
    ],
)
def test_the_trace_says_that_blockwise_computes_the_backward(
    schedule: str, through_lse: bool, why: str
) -> None:
    problem = Problem(zigzag(8, 2), 2, 2, through_lse=through_lse)
    run = VirtualCluster(2, memory=False).run(program, problem, schedule, through_lse, "native")
    said = (f"block='native' with {why}", "blockwise")
    assert said in {(each.asked, each.chosen) for each in run.trace.choices()}


@pytest.mark.parametrize("schedule", ["ring", "ulysses", "query-ring"])
def test_the_lse_that_is_returned_may_be_changed_in_place(schedule: str) -> None:
    """Changing the returned lse in place, as merging code does, leaves the gradients unchanged."""
    problem = Problem(zigzag(16, 4), 4, 4)

    def of_rank(ring: Ring, changed: bool) -> tuple[Tensor, ...]:
        *qkv, dout = problem.layout.shard(problem.tensors(), ring.rank)
        q, k, v = (x.requires_grad_() for x in qkv)
        out, lse = ring_attention(
            q, k, v, ring=ring, layout=problem.layout, schedule=schedule, block="native", return_lse=True
        )
        if changed:
            lse.mul_(0.5).add_(1.0)
        return torch.autograd.grad(out, (q, k, v), dout)

    one, other = (VirtualCluster(4, memory=False).run(of_rank, changed).results for changed in (False, True))
    assert all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def test_shared_heads_are_summed_in_the_state_dtype() -> None:
    """bfloat16 gradients of the one K/V head of four ranks equal a ring's, up to one unit of last place."""
    problem = Problem(contiguous(64, 4), 4, 1, D=16, dtype=torch.bfloat16)
    mine, its = solve(problem, "ulysses"), solve(problem, "ring")
    same = sum((a == b).sum().item() for a, b in ((mine.dk, its.dk), (mine.dv, its.dv)))
    assert same / (2 * mine.dk.numel()) > 0.97  # below 0.9 if each rank's part is rounded before the sum


JOBS = [
    (Problem(zigzag(23, 4), 4, 2), "hybrid(ring=2, ulysses=2)"),
    (Problem(striped(22, 4), 4, 1, dtype=torch.float32, Dv=7), "ulysses"),
    (Problem(zigzag(21, 4), 2, 1, Mask(window=4), dtype=torch.bfloat16, Dv=3), "double-ring(node=2)"),
    (Problem(contiguous(3, 4), 8, 2), HybridSchedule(ring=2, between=DoubleRingSchedule(2))),
    (Problem(zigzag(23, 4), 4, 2, through_lse=True), "burst"),
    (Problem(striped(22, 4), 4, 2, dtype=torch.bfloat16), "query-ring"),
    (Problem(contiguous(22, 4), 4, 2, Mask(window=7)), "bidirectional"),
    (Problem(zigzag(21, 4), 4, 2, dtype=torch.float32), "multi-ring(rings=2)"),
    (Problem(zigzag(13, 4), 4, 2, dropout=0.3, through_lse=True, sinks=1.0), "ring"),
    (Problem(striped(16, 4), 4, 2, dtype=torch.float32, sinks=1.0), "ulysses"),
]


def on_processes(ring: Ring) -> tuple[Any, list[Any]]:
    generated = [test_decode.generate(ring, run) for run in test_decode.RUNS]
    return rows_and_columns(ring), [*(program(ring, *job) for job in JOBS), *generated]


@pytest.mark.thorough
def test_processes_have_the_bits_of_virtual_ranks() -> None:
    """Rings of some of the ranks, degrees of every schedule, and decode are the same on four processes."""
    mine, its = launch(on_processes, 4, threads=1), VirtualCluster(4, memory=False).run(on_processes)
    assert_rows_and_columns([moved for moved, _ in mine.results])
    for (_, solved), (_, expected) in zip(mine.results, its.results, strict=True):
        for one, other in zip(solved, expected, strict=True):
            assert all(
                a == b if isinstance(a, list) else torch.equal(a, b) for a, b in zip(one, other, strict=True)
            )


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
    "more rings than strides": ("multi-ring(rings=3)", 4, 4, WorldSizeError, "at most 2 rings through 3 ranks"),
    "more rings than heads": ("multi-ring(rings=2)", 4, 1, ShapeError, "K=1 key/value heads"),
    "rings of none": ("multi-ring(rings=0)", 4, 4, WorldSizeError, "rings= a number ≥ 1"),
    "a degree of a ring of queries": ("burst(rings=2)", 4, 4, BackendError, "without degrees"),
    "an unknown degree": ("hybrid(tensor=2)", 4, 4, BackendError, "schedule='hybrid(ring=2, ulysses=2)'"),
    "a degree twice": ("double-ring(node=3, node=3)", 4, 4, BackendError, "node=2"),
    "an invalid degree": ("double-ring(node=x)", 4, 4, BackendError, "node=x"),
    "degrees where there are none": ("ulysses(ring=3)", 4, 4, BackendError, "without degrees"),
    "a degree below one": ("hybrid(ulysses=0)", 4, 4, WorldSizeError, "ulysses= a degree ≥ 1"),
    "a node of nobody": ("double-ring(node=0)", 4, 4, WorldSizeError, "node="),
    "brackets that do not close": ("hybrid(ring=3", 4, 4, BackendError, "one of the schedules ring"),
    "what is no schedule": (3, 4, 4, BackendError, "one of the schedules ring"),
}  # fmt: skip


def call(ring: Ring, schedule: Any, H: int = 4, K: int = 4) -> None:
    layout = contiguous(6, ring.world_size)
    q, k = (torch.ones(1, heads, layout.length(ring.rank), 8) for heads in (H, K))
    ring_attention(q, k, k.clone(), ring=ring, layout=layout, schedule=schedule, block="naive")


@pytest.mark.parametrize("name", WRONG)
def test_every_rank_says_what_is_wrong(name: str) -> None:
    schedule, H, K, kind, words = WRONG[name]
    for wrong in ((0, 1, 2), (1,)):
        assert_refused(
            3, lambda ring, at_fault: call(ring, schedule if at_fault else "ring", H, K), kind, words, wrong
        )


def test_ranks_with_other_degrees_disagree() -> None:
    for error in errors_on(4, lambda ring: call(ring, f"hybrid(ulysses={2 if ring.rank else 4})")):
        assert type(error) is AgreementError and "schedule=hybrid(ulysses=4)" in str(error)


def test_one_schedule_by_several_names() -> None:
    """Ranks that write the same schedule in different ways agree."""
    names: list[Any] = ["hybrid", "hybrid(ulysses=2)", " hybrid( ulysses = 2 ) ", HybridSchedule(ulysses=2)]
    VirtualCluster(4, memory=False).run(lambda ring: call(ring, names[ring.rank]))


def test_names_and_objects() -> None:
    assert [get_schedule(name).name.split("(")[0] for name in available()] == list(available())
    for schedule in (RingSchedule(), UlyssesSchedule(), HybridSchedule(2, 3), DoubleRingSchedule(5)):
        assert get_schedule(schedule) is schedule
        assert get_schedule(schedule.name).name == schedule.name
    assert HybridSchedule(2, 2, DoubleRingSchedule(4)).name.endswith(", between=double-ring(node=4))")
