"""Attention sinks: every schedule and block against the oracle, the gradient of the sinks too, and what is refused.

They count once, whatever the number of ranks and blocks; bytes and memory are those of attention without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster, oracle, ring_attention
from ringlab.blocks.blockwise import Blockwise
from ringlab.comm.ring import Ring
from ringlab.comm.trace import Outcome
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import ring_traffic, ulysses_traffic
from ringlab.errors import (
    AgreementError,
    BackendError,
    DtypeError,
    RankFailedError,
    RinglabError,
    ShapeError,
)
from ringlab.layout import Layout, contiguous, striped, zigzag
from ringlab.mask import Mask
from ringlab.merge import Partial, sink_partial
from ringlab.schedules import block_schedule, ulysses
from ringlab.schedules.ring import RingSchedule
from tests.laws.draw import Shape, refute, tensors
from tests.philox import factors

LAYOUTS = (contiguous, striped, zigzag)
HOW = tuple((block, "ring") for block in ("naive", "blockwise", "native"))
HOW += (
    ("naive", "allgather"),
    ("native", "ulysses"),
    ("blockwise", "double-ring(node=2)"),
    ("naive", "hybrid(ulysses=2)"),
)
Whole = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """An attention with sinks over the ranks of a layout, with four query heads on two key/value heads."""

    layout: Layout
    mask: Mask = Mask()  # noqa: RUF009 (frozen)
    size: float = 1.0
    softcap: float | None = None
    seed: int = 0
    dtype: torch.dtype = torch.float64
    dropout: float = 0.0
    through_lse: bool = False
    Dv: int = 0

    def tensors(self) -> Whole:
        return tensors(Shape(2, 4, 2, self.layout.S, self.layout.S, 4, self.Dv), self.seed, self.dtype)

    def sinks(self) -> Tensor:
        """Return logits around 0 and around the scores' largest sums, one of them so low that it takes nothing."""
        random = torch.Generator().manual_seed(self.seed)
        drawn = self.size * torch.randn(4, generator=random, dtype=torch.float64)
        drawn[3] = -1e4
        return drawn.to(self.dtype)

    def dlse(self) -> Tensor | None:
        """Return the gradient of lse, whole; None if the loss is one of out alone."""
        random = torch.Generator().manual_seed(self.seed + 1)
        drawn = torch.randn(2, 4, self.layout.S, generator=random, dtype=torch.float64)
        return drawn if self.through_lse else None

    def scoring(self) -> dict[str, Any]:
        drawn = factors(2, 4, self.layout.S, self.dropout, self.seed) if self.dropout else None
        sinks = self.sinks().double().numpy()
        return {"mask": self.mask, "softcap": self.softcap, "sinks": sinks, "factors": drawn}

    def out_and_lse(self, sinks: np.ndarray) -> oracle.Result:
        """Return the oracle's result with these sinks."""
        q, k, v, _ = self.tensors()
        positions = np.arange(self.layout.S)
        how = self.scoring() | {"mask": self.mask.visible(positions, positions), "sinks": sinks}
        return oracle.attention(q, k, v, **how)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    S = draw(st.integers(2, 16))
    mask = Mask(causal=draw(st.booleans()), window=draw(st.one_of(st.none(), st.integers(1, S))))
    return Problem(
        draw(st.sampled_from(LAYOUTS))(S, draw(st.sampled_from([2, 4]))),
        mask,
        draw(st.sampled_from([1.0, 20.0])),
        draw(st.sampled_from([None, 2.0])),
        draw(st.integers(0, 99)),
        dropout=draw(st.sampled_from([0.0, 0.4])),
        through_lse=draw(st.booleans()),
        Dv=draw(st.sampled_from([0, 3])),
    )


def program(
    ring: Ring, problem: Problem, block: str, schedule: str, return_lse: bool = True
) -> tuple[Tensor, ...]:
    *qkv, dout = problem.layout.shard(problem.tensors(), ring.rank)
    leaves = (*(x.requires_grad_() for x in qkv), problem.sinks().requires_grad_())
    how: dict[str, Any] = {
        "mask": problem.mask,
        "softcap": problem.softcap,
        "block": block,
        "schedule": schedule,
    }
    how |= {"dropout": problem.dropout, "seed": problem.seed, "sinks": leaves[3], "layout": problem.layout}
    if not return_lse:
        out = ring_attention(*leaves[:3], ring=ring, **how)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)
    out, lse = ring_attention(*leaves[:3], ring=ring, return_lse=True, **how)
    whole = problem.dlse()
    dlse = None if whole is None else problem.layout.shard((whole,), ring.rank, dim=-1)[0].to(lse.dtype)
    of_out = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    return out.detach(), lse.detach(), *torch.autograd.grad(of_out[0], leaves, of_out[1])


def run(problem: Problem, *how: Any) -> Outcome:
    return VirtualCluster(problem.layout.P, memory=False).run(program, problem, *how)


def joined(problem: Problem, shards: list[Any]) -> tuple[Results, Tensor]:
    """Return the results of the whole sequence, and the sum of the ranks' gradients of the sinks."""
    out, lse, *gradients, dsinks = zip(*shards, strict=True)
    unshard = problem.layout.unshard
    return Results(unshard(out), unshard(lse, dim=-1), *map(unshard, gradients)), sum(dsinks)  # type: ignore[return-value]


def true_gradient_of_sinks(problem: Problem) -> tuple[np.ndarray, float]:
    """Return −Σ_i p_i (dout_i · out_i − dlse_i) of each head, p_i = e^(sink − lse_i); and the size of what is summed."""
    sinks = problem.sinks().double().numpy()
    true, dout, dlse = problem.out_and_lse(sinks), problem.tensors()[3].double(), problem.dlse()
    weights = np.exp(sinks[:, None] - true.lse)
    products, more = dout.numpy() * true.out, np.zeros_like(weights) if dlse is None else dlse.numpy()
    terms = float(np.abs(products).sum() + np.abs(more).sum())
    return -(weights * (products.sum(-1) - more)).sum((0, 2)), terms


def assert_right(problem: Problem, shards: list[Any]) -> None:
    whole, scoring, dlse = problem.tensors(), problem.scoring(), problem.dlse()
    more = {"dlse": None if dlse is None else dlse.numpy()}
    true = truth(*whole, **scoring, **more)
    found, dsinks = joined(problem, shards)
    allowed, measured = bounds(*whole, true=true, **scoring, **more), errors(found, true)
    for name in NAMES:
        assert measured[name] <= allowed[name], (name, measured[name], allowed[name])
    expected, terms = true_gradient_of_sinks(problem)
    roundings = 100 if problem.dtype == torch.float64 else 1  # of each term
    most = roundings * torch.finfo(problem.dtype).eps * (1 + problem.size) * terms
    assert np.abs(dsinks.double().numpy() - expected).max() <= most


def law_equals_the_oracle(problem: Problem, *how: Any) -> None:
    assert_right(problem, run(problem, *how).results)


@settings(max_examples=60)
@given(problems(), st.sampled_from(HOW))
def test_ring_attention_with_sinks(problem: Problem, how: tuple[str, str]) -> None:
    law_equals_the_oracle(problem, *how)


def ignored(partial: Partial, sinks: Tensor) -> None:
    """They change nothing."""


def with_another_sign(partial: Partial, sinks: Tensor) -> None:
    right(partial, -sinks)


def not_in_lse(partial: Partial, sinks: Tensor) -> None:
    lse = partial.lse.clone()
    right(partial, sinks)
    partial.lse.copy_(lse)


def not_in_out(partial: Partial, sinks: Tensor) -> None:
    out = partial.out.clone()
    right(partial, sinks)
    partial.out.copy_(out)


def of_the_next_head(partial: Partial, sinks: Tensor) -> None:
    right(partial, sinks.roll(1))


def counted_on_every_rank(partial: Partial, sinks: Tensor) -> None:
    """P times: as if each rank's block came with its own."""
    for _ in range(2):
        right(partial, sinks)


right = block_schedule.add_sinks
WRONG = (ignored, with_another_sign, not_in_lse, not_in_out, of_the_next_head, counted_on_every_rank)
PLAIN = [(Problem(zigzag(8, 2), seed=seed),) for seed in range(3)]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_law_notices(wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def law(add_sinks: Callable[..., Any], problem: Problem) -> None:
        monkeypatch.setattr(block_schedule, "add_sinks", add_sinks)
        law_equals_the_oracle(problem, "naive", "ring")

    refute(law, right, wrong, PLAIN)


def without_their_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    return torch.zeros_like(sinks)


def by_the_lse_of_keys(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The weight of the sink beside that of the keys, not among all."""
    keys = lse + torch.log1p(-torch.exp(sinks[:, None] - lse))
    return gradient(sinks, keys, delta)


def a_mean_over_rows(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    return gradient(sinks, lse, delta) / lse.shape[2]


def of_one_batch(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    return gradient(sinks, lse[:1], delta[:1])


def with_the_delta_of_keys(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The out before the sink took its weight, as where it is multiplied afterwards."""
    return gradient(sinks, lse, delta / (1 - torch.exp(sinks[:, None] - lse)))


gradient = block_schedule.sink_gradient
WRONG_GRADIENTS = (
    without_their_gradient,
    by_the_lse_of_keys,
    a_mean_over_rows,
    of_one_batch,
    with_the_delta_of_keys,
)


@pytest.mark.parametrize("wrong", WRONG_GRADIENTS, ids=lambda wrong: wrong.__name__)
def test_the_law_notices_a_wrong_gradient(wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def law(sink_gradient: Callable[..., Any], problem: Problem) -> None:
        monkeypatch.setattr(block_schedule, "sink_gradient", sink_gradient)
        law_equals_the_oracle(problem, "naive", "ring")

    refute(law, gradient, wrong, PLAIN)


def at_the_first_heads(mesh: Any, dsinks: Tensor, heads: int) -> Tensor:
    return torch.cat([dsinks, dsinks.new_zeros(heads - len(dsinks))])


def test_the_law_notices_gradients_of_other_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Ulysses a rank has some heads, and says which."""

    def law(place: Callable[..., Any], problem: Problem) -> None:
        monkeypatch.setattr(ulysses, "_among_all_heads", place)
        law_equals_the_oracle(problem, "naive", "ulysses")

    refute(law, ulysses._among_all_heads, at_the_first_heads, PLAIN)


def test_a_sink_is_merged_like_any_partial_and_one_of_minus_infinity_is_none() -> None:
    rows = Partial(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3))
    rows.lse[0, 1, 2], rows.out[0, 1, 2] = -torch.inf, 0.0
    before = Partial(rows.out.clone(), rows.lse.clone())
    block_schedule.add_sinks(rows, torch.full((2,), -torch.inf))
    assert torch.equal(rows.out, before.out) and torch.equal(rows.lse, before.lse)
    found = block_schedule.sink_gradient(torch.full((2,), -torch.inf), rows.lse, torch.ones(1, 2, 3))
    assert torch.equal(found, torch.zeros(2))
    assert sink_partial(torch.tensor([1.0, 2.0]), rows).lse.unique().tolist() == [1.0, 2.0]


JOBS = [
    (Problem(zigzag(13, 4), dropout=0.3, through_lse=True), "naive", "ring"),
    (Problem(striped(16, 4), dtype=torch.float32), "native", "ulysses"),
    (Problem(zigzag(16, 4), Mask(window=5), dtype=torch.bfloat16, Dv=3), "blockwise", "hybrid(ulysses=2)"),
]


def solve_all(ring: Ring) -> list[tuple[Tensor, ...]]:
    return [program(ring, *job) for job in JOBS]


def test_the_jobs_of_processes_are_right() -> None:
    for job in JOBS:
        law_equals_the_oracle(*job)


def test_the_gradient_of_sinks_is_that_of_the_loss() -> None:
    """The formula of the truth itself, by differences."""
    problem = Problem(zigzag(8, 2), through_lse=True, dropout=0.3)
    dout, dlse = problem.tensors()[3].double().numpy(), problem.dlse().numpy()  # type: ignore[union-attr]

    def loss(sinks: np.ndarray) -> float:
        out, lse = problem.out_and_lse(sinks)
        return float((dout * out).sum() + (dlse * lse).sum())

    steps = 1e-5 * np.eye(4)
    sinks = problem.sinks().double().numpy()
    found = [(loss(sinks + step) - loss(sinks - step)) / 2e-5 for step in steps]
    assert np.allclose(found, true_gradient_of_sinks(problem)[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("block", ["native", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precisions(block: str, dtype: torch.dtype) -> None:
    law_equals_the_oracle(Problem(zigzag(16, 2), dtype=dtype), block, "ring")


SIZES = {"B": 2, "H": 4, "K": 2, "D": 4, "dtype": "float32"}


def test_sinks_send_nothing() -> None:
    """Neither lse nor its gradient travels for them, under any schedule."""
    problem = Problem(zigzag(16, 2), dtype=torch.float32)
    formulas = {"ring": ring_traffic, "ulysses": ulysses_traffic}
    for schedule, formula in formulas.items():
        sent = {e.rank: 0 for e in run(problem, "native", schedule, False).trace.exchanges()}
        for each in run(problem, "native", schedule, False).trace.exchanges():
            sent[each.rank] += each.bytes_sent
        expected = sum(
            formula(Attention(**SIZES), 16, 2, backward=back).total_bytes for back in (False, True)
        )
        assert set(sent.values()) == {expected}, schedule


def test_the_backward_of_native_stays_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gradient of lse it goes to blockwise, which the trace says; sinks alone are no reason."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("blockwise computes")

    monkeypatch.setattr(Blockwise, "backward", never)
    problem = Problem(zigzag(16, 2), dtype=torch.float32)
    for schedule in ("ring", "ulysses"):
        assert not list(run(problem, "native", schedule).trace.choices())
    with pytest.raises(RankFailedError, match="blockwise computes"):
        run(replace(problem, through_lse=True), "native", "ring")


def once(ring: Ring, shards: list[Any], layout: Layout, sinks: Tensor | None, schedule: str) -> None:
    q, k, v, dout = shards[ring.rank]
    leaves = [x.requires_grad_() for x in (q, k, v)] + (
        [] if sinks is None else [sinks.clone().requires_grad_()]
    )
    out = ring_attention(*leaves[:3], ring=ring, layout=layout, sinks=(*leaves, None)[3], schedule=schedule)
    torch.autograd.grad(out, leaves, dout)


def peak_bytes(sinks: Tensor | None, schedule: str) -> int:
    layout = zigzag(1024, 4)
    whole = tensors(Shape(1, 4, 4, 1024, 1024, 64), 0, torch.float32)
    shards = [layout.shard(whole, rank) for rank in range(4)]
    reports = VirtualCluster(4).run(once, shards, layout, sinks, schedule).memory
    return max(report.peak_bytes for report in reports)


@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
def test_sinks_take_no_memory_but_some_numbers_a_row(schedule: str) -> None:
    """A second out would be 64 numbers a row and head."""
    rows = 4 * 256 * 4  # of one number for each row and head
    assert peak_bytes(torch.zeros(4), schedule) - peak_bytes(None, schedule) <= 4 * rows


def test_sinks_that_change_before_backward_are_noticed() -> None:
    def program(ring: Ring) -> None:
        x, sinks = torch.zeros(1, 2, 8, 4, requires_grad=True), torch.zeros(2, requires_grad=True)
        out = ring_attention(x, x, x, ring=ring, layout=zigzag(8, 1), sinks=sinks)
        with torch.no_grad():
            sinks.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    VirtualCluster(1).run(program)


class Deaf(RingSchedule):
    takes_sinks = False


def test_a_schedule_that_does_not_know_sinks_is_refused() -> None:
    def program(ring: Ring) -> None:
        x = torch.zeros(1, 2, 4, 8)
        with pytest.raises(BackendError, match="a schedule that takes sinks"):
            ring_attention(x, x, x, ring=ring, layout=zigzag(8, 2), sinks=torch.zeros(2), schedule=Deaf())

    VirtualCluster(2).run(program)


@pytest.mark.parametrize(
    ("sinks", "error", "says"),
    [
        (torch.zeros(3), ShapeError, r"sinks as a tensor \(2,\)"),
        (0.5, ShapeError, "float"),
        (torch.zeros(2, dtype=torch.int64), DtypeError, "floating point"),
    ],
)
def test_wrong_sinks_are_refused_on_every_rank(sinks: Any, error: type[RinglabError], says: str) -> None:
    caught: list[type] = []

    def program(ring: Ring) -> None:
        x = torch.zeros(1, 2, 4, 8)
        given = sinks if ring.rank == 1 else torch.zeros(2)
        try:
            ring_attention(x, x, x, ring=ring, layout=zigzag(8, 2), sinks=given)
        except (error, AgreementError) as found:
            caught.append(type(found))
            if ring.rank == 1:
                with pytest.raises(error, match=says):
                    raise found from None

    VirtualCluster(2).run(program)
    assert set(caught) == {error, AgreementError}


def test_sinks_on_one_rank_only_are_refused() -> None:
    def program(ring: Ring) -> None:
        x = torch.zeros(1, 2, 4, 8)
        with pytest.raises(AgreementError, match="sinks"):
            ring_attention(
                x, x, x, ring=ring, layout=zigzag(8, 2), sinks=torch.zeros(2) if ring.rank else None
            )

    VirtualCluster(2).run(program)
