"""Every schedule is attention: any degrees, layout, heads and mask, against the oracle; and mutants that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster
from ringlab.comm.protocol import Work
from ringlab.comm.ring import Ring
from ringlab.layout import Layout, contiguous, striped, zigzag
from ringlab.mask import Mask
from ringlab.schedules import all_to_all, double_ring, mesh
from ringlab.schedules.all_to_all import heads_of
from ringlab.schedules.double_ring import DoubleRingSchedule
from ringlab.schedules.hybrid import HybridSchedule
from ringlab.schedules.mesh import Rows, rows_of_ranks
from ringlab.schedules.ring import RingSchedule
from tests.laws.draw import MAKERS
from tests.schedules.problems import Problem, assert_equals_the_oracle, program, solve


def in_another_order(S: int, P: int) -> Layout:
    """A zig-zag whose ranks store their later tokens first; only a layout of one's own does."""
    runs = tuple(tuple(reversed(zigzag(S, P).runs(rank))) for rank in range(P))
    return Layout(S, P, "in another order", runs)


def masks(S: int) -> st.SearchStrategy[Mask]:
    middle = max(0, S // 3)
    return st.one_of(
        st.builds(Mask, causal=st.booleans()),
        st.builds(Mask, causal=st.booleans(), window=st.integers(1, S)),
        st.builds(Mask, prefix=st.integers(0, S), window=st.one_of(st.none(), st.integers(1, S))),
        st.builds(Mask, causal=st.booleans(), documents=st.just((middle, S - middle))),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, Any]:
    """A problem, and a schedule that is offered for it."""
    inside, ring = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3]))
    P, S = inside * ring, draw(st.integers(1, 20))
    layout = draw(st.sampled_from([*MAKERS, in_another_order]))(S, P)
    if draw(st.booleans()):
        schedule: Any = DoubleRingSchedule(node=inside)
        K = draw(st.integers(1, 2))
    else:
        node = draw(st.sampled_from([n for n in (1, 2, 3) if ring % n == 0]))
        schedule = HybridSchedule(ulysses=inside, between=DoubleRingSchedule(node))
        K = draw(st.sampled_from([k for k in range(1, 5) if k % inside == 0 or inside % k == 0]))
        if ring == 1:
            schedule = draw(st.sampled_from([schedule, "ulysses"]))
    H = K * draw(st.integers(1, 2))
    while isinstance(schedule, (str, HybridSchedule)) and H % inside:
        H += K
    return Problem(layout, H, K, draw(masks(S)), B=draw(st.integers(1, 2))), schedule


@settings(max_examples=60)
@given(problems())
def test_any_schedule_equals_the_oracle(drawn: tuple[Problem, Any]) -> None:
    problem, schedule = drawn
    assert_equals_the_oracle(solve(problem, schedule), problem)


def test_rows_of_one_rank_are_the_ring_and_one_column_is_ulysses() -> None:
    """The mesh's ends are the very programs, bit for bit."""
    problem = Problem(zigzag(21, 4), 8, 2)
    for one, other in (
        (HybridSchedule(ulysses=1), "ring"),
        (HybridSchedule(ring=1), "ulysses"),
        (DoubleRingSchedule(node=1), "ring"),
        (DoubleRingSchedule(node=4), "ring"),
    ):
        for a, b in zip(solve(problem, one), solve(problem, other), strict=True):
            assert torch.equal(a, b), (one, other)


def test_rows_of_one_rank_keep_the_order_in_which_it_stores_its_tokens() -> None:
    problem = Problem(in_another_order(21, 3), 4, 2)
    for schedule in (HybridSchedule(ulysses=1), HybridSchedule(ring=3), "ring"):
        assert_equals_the_oracle(solve(problem, schedule), problem)


def test_what_is_not_asked_for_is_not_sent() -> None:
    """Without lse the same out and gradients."""
    problem = Problem(zigzag(16, 4), 4, 2)
    with_lse, without = (VirtualCluster(4).run(program, problem, "ulysses", asked) for asked in (True, False))
    for (out, _, *gradients), (only, *others) in zip(with_lse.results, without.results, strict=True):
        assert torch.equal(out, only)
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    sent = {e.tag for e in without.trace.exchanges()}
    assert "lse to tokens" not in sent and "lse to tokens" in {e.tag for e in with_lse.trace.exchanges()}


def forgets_to_sum(m: mesh.Mesh, x: Tensor, count: int, works: dict[int, Work]) -> Tensor:
    """The gradient of a shared head is that of the last rank."""
    parts = {member: work.wait()[0] for member, work in works.items()}
    parts[m.row.rank] = all_to_all._tokens_of(m, x, m.row.rank)
    total = x.new_zeros((x.shape[0], count, *parts[0].shape[2:]))
    for member in range(m.row.world_size):
        total[:, heads_of(count, member, m.row.world_size)] = parts[member]
    return total


def masks_in_local_positions(layout: Any, ulysses: int) -> Rows:
    """Rows hold the right tokens and take them for a stretch of the sequence."""
    right = rows_of_ranks(layout, ulysses)
    return Rows(contiguous(layout.S, right.layout.P), right.spans)


def heads_in_turn(heads: int, member: int, ranks: int) -> slice:
    """Ranks of a row take heads from the end."""
    return heads_of(heads, ranks - 1 - member, ranks) if heads < ranks else heads_of(heads, member, ranks)


MUTANTS: dict[str, tuple[Any, str, Any, Any, Problem]] = {
    "forgets to sum gradients of shared heads": (
        all_to_all, "_assemble_heads", forgets_to_sum, "ulysses", Problem(zigzag(16, 4), 4, 2),
    ),
    "hybrid masks in local positions": (
        mesh, "rows_of_ranks", masks_in_local_positions, HybridSchedule(ulysses=2), Problem(zigzag(16, 4), 4, 2),
    ),
    "shared heads in the wrong order": (
        all_to_all, "heads_of", heads_in_turn, "ulysses", Problem(striped(16, 4), 8, 2),
    ),
    "the double ring loses what earlier nodes summed": (
        double_ring, "_add_in_place", lambda sums, more: None, DoubleRingSchedule(2), Problem(zigzag(16, 4), 2, 1),
    ),
    "the double ring does not go as far as the window": (
        double_ring._NodeRings, "_nodes_in_reach", lambda self, call: 1,
        DoubleRingSchedule(2), Problem(contiguous(16, 4), 2, 1, Mask(window=6)),
    ),
}  # fmt: skip


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
    """bfloat16 gradients of the one K/V head of four ranks are those of a ring, but for a last place at the most."""
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
    (Problem(striped(22, 4), 4, 1, dtype=torch.float32), "ulysses"),
    (Problem(zigzag(21, 4), 2, 1, Mask(window=4)), "double-ring(node=2)"),
    (Problem(contiguous(3, 4), 8, 2), HybridSchedule(ring=2, between=DoubleRingSchedule(2))),
]


def solve_all(ring: Ring) -> list[tuple[Tensor, ...]]:
    return [program(ring, *job) for job in JOBS]
