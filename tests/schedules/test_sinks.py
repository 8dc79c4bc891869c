"""Attention sinks: every schedule and block against the oracle, the gradient of the sinks too, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster, attention, oracle, ring_attention
from ringlab.comm.ring import Ring
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.errors import AgreementError, DtypeError, RinglabError, ShapeError
from ringlab.layout import Layout, contiguous, striped, zigzag
from ringlab.mask import Mask
from tests.laws.draw import Shape, refute, tensors

LAYOUTS = (contiguous, striped, zigzag)
HOW = tuple((block, "ring") for block in ("naive", "blockwise", "native"))
HOW += (("naive", "allgather"), ("native", "ulysses"), ("blockwise", "double-ring(node=2)"))
Whole = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """An attention with sinks over two ranks, with four query heads on two key/value heads."""

    layout: Layout
    mask: Mask
    size: float
    softcap: float | None
    seed: int
    dtype: torch.dtype = torch.float64

    def tensors(self) -> Whole:
        return tensors(Shape(2, 4, 2, self.layout.S, self.layout.S, 4), self.seed, self.dtype)

    def sinks(self) -> Tensor:
        """Return logits around 0 and around the scores' largest sums, one of them so low that it takes nothing."""
        random = torch.Generator().manual_seed(self.seed)
        drawn = self.size * torch.randn(4, generator=random, dtype=torch.float64)
        drawn[3] = -1e4
        return drawn.to(self.dtype)

    def scoring(self) -> dict[str, Any]:
        return {"mask": self.mask, "softcap": self.softcap, "sinks": self.sinks().double().numpy()}

    def out_and_lse(self, sinks: np.ndarray) -> oracle.Result:
        """Return the oracle's result with these sinks."""
        q, k, v, _ = self.tensors()
        positions = np.arange(self.layout.S)
        visible = self.mask.visible(positions, positions)
        return oracle.attention(q, k, v, mask=visible, softcap=self.softcap, sinks=sinks)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    S = draw(st.integers(2, 16))
    mask = Mask(causal=draw(st.booleans()), window=draw(st.one_of(st.none(), st.integers(1, S))))
    softcap = draw(st.sampled_from([None, 2.0]))
    return Problem(
        draw(st.sampled_from(LAYOUTS))(S, 2),
        mask,
        draw(st.sampled_from([1.0, 20.0])),
        softcap,
        draw(st.integers(0, 99)),
    )


def program(ring: Ring, problem: Problem, block: str, schedule: str) -> tuple[Tensor, ...]:
    *qkv, dout = problem.layout.shard(problem.tensors(), ring.rank)
    leaves = (*(x.requires_grad_() for x in qkv), problem.sinks().requires_grad_())
    out, lse = ring_attention(
        *leaves[:3], ring=ring, layout=problem.layout, mask=problem.mask, softcap=problem.softcap,
        sinks=leaves[3], block=block, schedule=schedule, return_lse=True,
    )  # fmt: skip
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)


def solve(problem: Problem, block: str, schedule: str) -> tuple[Results, Tensor]:
    """Return the results of the whole sequence, and the sum of the ranks' gradients of the sinks."""
    shards = VirtualCluster(2, memory=False).run(program, problem, block, schedule).results
    out, lse, *gradients, dsinks = zip(*shards, strict=True)
    unshard = problem.layout.unshard
    return Results(unshard(out), unshard(lse, dim=-1), *map(unshard, gradients)), sum(dsinks)  # type: ignore[return-value]


def true_gradient_of_sinks(problem: Problem) -> tuple[np.ndarray, float]:
    """Return −Σ_i p_i (dout_i · out_i) of each head, p_i = e^(sink − lse_i); and the size of what is summed there."""
    sinks = problem.sinks().double().numpy()
    true, dout = problem.out_and_lse(sinks), problem.tensors()[3].double()
    weights = np.exp(sinks[:, None] - true.lse)
    products = dout.numpy() * true.out
    return -(weights * products.sum(-1)).sum((0, 2)), float(np.abs(products).sum())


def law_equals_the_oracle(problem: Problem, block: str, schedule: str) -> None:
    whole, scoring = problem.tensors(), problem.scoring()
    true = truth(*whole, **scoring)
    found, dsinks = solve(problem, block, schedule)
    allowed, measured = bounds(*whole, true=true, **scoring), errors(found, true)
    for name in NAMES:
        assert measured[name] <= allowed[name], (name, measured[name], allowed[name])
    expected, terms = true_gradient_of_sinks(problem)
    roundings = 100 if problem.dtype == torch.float64 else 1  # of each term
    allowed = roundings * torch.finfo(problem.dtype).eps * (1 + problem.size) * terms
    assert np.abs(dsinks.double().numpy() - expected).max() <= allowed


@settings(max_examples=40)
@given(problems(), st.sampled_from(HOW))
def test_ring_attention_with_sinks(problem: Problem, how: tuple[str, str]) -> None:
    law_equals_the_oracle(problem, *how)


def ignored(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    return out + 0 * sinks.sum(), lse


def with_another_sign(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    return right(out, lse, -sinks)


def not_in_lse(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    return right(out, lse, sinks)[0], lse


def of_the_next_head(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    return right(out, lse, sinks.roll(1))


def without_their_gradient(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = right(out, lse, sinks.detach())
    return out + 0 * sinks.sum(), lse


def with_a_fixed_lse(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    return right(out, lse.detach(), sinks)


right = attention.with_sinks
WRONG = (ignored, with_another_sign, not_in_lse, of_the_next_head, without_their_gradient, with_a_fixed_lse)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_law_notices(wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def law(with_sinks: Callable[..., Any], problem: Problem) -> None:
        monkeypatch.setattr(attention, "with_sinks", with_sinks)
        law_equals_the_oracle(problem, "naive", "ring")

    refute(law, right, wrong, [(Problem(zigzag(8, 2), Mask(), 1.0, None, seed),) for seed in range(3)])


def test_the_gradient_of_sinks_is_that_of_the_loss() -> None:
    """The formula of the truth itself, by differences."""
    problem = Problem(zigzag(8, 2), Mask(), 1.0, None, 0)
    dout = problem.tensors()[3].double().numpy()

    def loss(sinks: np.ndarray) -> float:
        return float((dout * problem.out_and_lse(sinks).out).sum())

    steps = 1e-5 * np.eye(4)
    sinks = problem.sinks().double().numpy()
    found = [(loss(sinks + step) - loss(sinks - step)) / 2e-5 for step in steps]
    assert np.allclose(found, true_gradient_of_sinks(problem)[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("block", ["native", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precisions(block: str, dtype: torch.dtype) -> None:
    problem = Problem(zigzag(16, 2), Mask(), 1.0, None, 0, dtype)
    law_equals_the_oracle(problem, block, "ring")


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
