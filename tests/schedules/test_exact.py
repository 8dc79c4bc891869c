"""Every schedule gives the oracle's attention for any degrees, layout, heads, mask, score rules and sinks.

Schedules refuse impossible calls by name, on every rank, before any data moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster, oracle, ring_attention
from ringlab.comm.ring import Ring
from ringlab.errors import AgreementError, BackendError, RinglabError, ShapeError, WorldSizeError
from ringlab.layout import Layout, contiguous, striped, zigzag
from ringlab.mask import Mask
from ringlab.schedules import all_to_all, available, block_schedule, double_ring, get_schedule, mesh
from ringlab.schedules.bidirectional import BidirectionalSchedule
from ringlab.schedules.double_ring import DoubleRingSchedule
from ringlab.schedules.hybrid import HybridSchedule
from ringlab.schedules.mesh import Rows, rows_of_ranks
from ringlab.schedules.multi_ring import MultiRingSchedule
from ringlab.schedules.query_ring import BurstSchedule, QueryRingSchedule
from ringlab.schedules.ring import RingSchedule
from ringlab.schedules.ulysses import UlyssesSchedule
from tests.laws.draw import MAKERS
from tests.laws.test_mask_laws import problems as layouts_and_masks
from tests.schedules.problems import Problem, assert_equals_the_oracle, hold, program, solve


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


@settings(max_examples=100)
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


@pytest.mark.parametrize("schedule", ["query-ring", "burst"])
def test_native_backward_of_queries_that_travel_is_recorded(schedule: str) -> None:
    run = VirtualCluster(2, memory=False).run(program, Problem(zigzag(8, 2), 2, 2), schedule, False, "native")
    said = ("block='native' with queries that travel", "blockwise")
    assert said in {(each.asked, each.chosen) for each in run.trace.choices()}


def test_rows_of_one_rank_keep_the_order_in_which_it_stores_its_tokens() -> None:
    problem = Problem(in_another_order(21, 3), 4, 2)
    for schedule in (HybridSchedule(ulysses=1), HybridSchedule(ring=3), "ring"):
        assert_equals_the_oracle(solve(problem, schedule), problem)


def test_what_is_not_asked_for_is_not_sent() -> None:
    """Without return_lse no lse is sent, and out and gradients are the same."""
    problem = Problem(zigzag(16, 4), 4, 2)
    with_lse, without = (VirtualCluster(4).run(program, problem, "ulysses", asked) for asked in (True, False))
    for (out, _, *gradients), (only, *others) in zip(with_lse.results, without.results, strict=True):
        assert torch.equal(out, only)
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    sent = {e.tag for e in without.trace.exchanges()}
    assert "lse to tokens" not in sent and "lse to tokens" in {e.tag for e in with_lse.trace.exchanges()}


@pytest.mark.parametrize(
    "schedule",
    [
        "ring",
        "allgather",
        "ulysses",
        "hybrid(ring=2, ulysses=2)",
        "double-ring(node=2)",
        "burst",
        "multi-ring",
    ],
)
@pytest.mark.parametrize("block", ["native", "blockwise", "naive"])
def test_a_loss_on_the_lse_of_one_rank_alone(schedule: str, block: str) -> None:
    """Gradients are right if one rank's loss uses lse and another's only out; the trace names the block."""
    problem = Problem(zigzag(24, 4), 8, 4, dtype=torch.float64, through_lse=True)
    layout, whole = problem.layout, problem.dlse()
    assert whole is not None

    def of_rank(ring: Ring) -> tuple[Tensor, ...]:
        *qkv, dout = layout.shard(problem.tensors(), ring.rank)
        q, k, v = (x.requires_grad_() for x in qkv)
        out, lse = ring_attention(
            q, k, v, ring=ring, layout=layout, schedule=schedule, block=block, return_lse=True
        )
        dlse = layout.shard((whole,), ring.rank, dim=-1)[0]
        losses = {0: ((out,), (dout,)), 1: ((lse,), (dlse,))}.get(ring.rank, ((out, lse), (dout, dlse)))
        return torch.autograd.grad(losses[0], (q, k, v), losses[1])

    run = VirtualCluster(4, memory=False).run(of_rank)
    q, k, v, dout = (x.clone() for x in problem.tensors())
    dout[..., layout.positions(1), :], whole[..., layout.positions(0)] = 0.0, 0.0
    true = oracle.gradients(q, k, v, dout, dlse=whole.numpy(), causal=True)
    for name, found, right in zip(("dq", "dk", "dv"), zip(*run.results, strict=True), true, strict=True):
        torch.testing.assert_close(layout.unshard(found).numpy(), right, rtol=1e-10, atol=1e-10, msg=name)
    why = "queries that travel" if schedule == "burst" else "a gradient of lse"
    said = (f"block='native' with {why}", "blockwise")
    assert (said in {(each.asked, each.chosen) for each in run.trace.choices()}) is (block == "native")


@pytest.mark.parametrize(
    "schedule",
    [
        "ring",
        "allgather",
        "ulysses",
        "hybrid(ring=2, ulysses=2)",
        "double-ring(node=2)",
        "query-ring",
        "multi-ring",
    ],
)
@pytest.mark.parametrize("block", ["native", "naive"])
def test_the_lse_that_is_returned_may_be_changed_in_place(schedule: str, block: str) -> None:
    """Changing the returned lse in place, as merging code does, leaves the gradients unchanged."""
    problem = Problem(zigzag(16, 4), 4, 4)

    def of_rank(ring: Ring, changed: bool) -> tuple[Tensor, ...]:
        *qkv, dout = problem.layout.shard(problem.tensors(), ring.rank)
        q, k, v = (x.requires_grad_() for x in qkv)
        out, lse = ring_attention(
            q, k, v, ring=ring, layout=problem.layout, schedule=schedule, block=block, return_lse=True
        )
        if changed:
            lse.mul_(0.5).add_(1.0)
        return torch.autograd.grad(out, (q, k, v), dout)

    one, other = (VirtualCluster(4, memory=False).run(of_rank, changed).results for changed in (False, True))
    assert all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("through_lse", [True, False])
def test_an_lse_without_a_gradient_sends_none(through_lse: bool) -> None:
    """Ulysses sends a gradient of lse, one number a row and head, only if lse is returned and a rank has a gradient."""
    problem = Problem(zigzag(16, 4), 4, 4, through_lse=through_lse)
    trace = VirtualCluster(4).run(program, problem, "ulysses", True).trace
    sent = sum(e.bytes_sent for e in trace.exchanges() if e.tag == "dlse to heads")
    assert sent == 4 * 3 * 4 * 8 * through_lse  # each of 4 ranks sends 4 numbers of 8 bytes to 3 others


def masks_in_local_positions(layout: Any, ulysses: int) -> Rows:
    """A mutant: rows hold the right tokens but are masked as if those tokens were contiguous in the sequence."""
    right = rows_of_ranks(layout, ulysses)
    return Rows(contiguous(layout.S, right.layout.P), right.spans)


MUTANTS: dict[str, tuple[Any, str, Any, Any, Problem]] = {
    "hybrid masks in local positions": (
        mesh, "rows_of_ranks", masks_in_local_positions, HybridSchedule(ulysses=2), Problem(zigzag(16, 4), 4, 2),
    ),
    "the gradient of lse has the wrong sign": (
        block_schedule, "row_delta", lambda dout, out, dlse: (dout * out).sum(-1) + dlse,
        "ring", Problem(zigzag(16, 4), 2, 1, through_lse=True),
    ),
    "the double ring does not go as far as the window": (
        double_ring._NodeRings, "_nodes_in_reach", lambda self, call: 1,
        DoubleRingSchedule(2), Problem(contiguous(16, 4), 2, 1, Mask(window=6)),
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home, function, mutant, schedule, problem = MUTANTS[name]
    assert_equals_the_oracle(solve(problem, schedule), problem)
    monkeypatch.setattr(home, function, mutant)
    with pytest.raises(AssertionError, match="error, allowed"):
        assert_equals_the_oracle(solve(problem, schedule), problem)


@pytest.mark.parametrize(
    "split", [lambda q: q, lambda q: q.to(torch.bfloat16)], ids=["right", "rounds each part"]
)
def test_shared_heads_are_summed_in_the_state_dtype(
    split: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 gradients of the one K/V head of four ranks equal a ring's, up to one unit of last place."""
    problem = Problem(contiguous(64, 4), 4, 1, D=16, dtype=torch.bfloat16)
    original = all_to_all._tokens_of
    monkeypatch.setattr(
        all_to_all, "_tokens_of", lambda m, x, member: split(original(m, x, member)).to(x.dtype)
    )
    mine, its = solve(problem, "ulysses"), solve(problem, RingSchedule())
    same = sum((a == b).sum().item() for a, b in ((mine.dk, its.dk), (mine.dv, its.dv)))
    share = same / (2 * mine.dk.numel())
    assert share > 0.97 if split(torch.ones(1)).dtype == torch.float32 else share < 0.9, share


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


def solve_all(ring: Ring) -> list[tuple[Tensor, ...]]:
    return [program(ring, *job) for job in JOBS]


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
    """Ranks that write the same schedule in different ways agree."""

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
    assert HybridSchedule(2, 2, DoubleRingSchedule(4)).name.endswith(", between=double-ring(node=4))")
