"""Attention with sinks: problems, the program that computes one, and the law that holds it to the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster, oracle, ring_attention
from ringlab.comm.ring import Ring
from ringlab.comm.trace import Outcome
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.layout import Layout, contiguous, striped, zigzag
from ringlab.mask import Mask
from tests.laws.draw import Shape, tensors
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
