"""Attention problems, the program that computes a problem with any schedule, and the bounds of its results.

The module also has a block without soft caps and dropout, as a user's own block may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab import VirtualCluster, oracle, ring_attention
from ringlab.blocks.native import Native
from ringlab.comm.ring import Ring
from ringlab.comm.trace import Outcome
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.layout import Layout
from ringlab.mask import Mask
from tests.laws.draw import Shape, tensors
from tests.philox import factors


@dataclass(frozen=True)
class Problem:
    """An attention problem on ranks. Dv: head dim of v, or 0 for D. sinks: their size, or 0 for no sinks."""

    layout: Layout
    H: int
    K: int
    mask: Mask = field(default_factory=Mask)
    D: int = 4
    B: int = 1
    dtype: torch.dtype = torch.float64
    seed: int = 0
    through_lse: bool = False
    Dv: int = 0
    softcap: float | None = None
    dropout: float = 0.0
    sinks: float = 0.0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and dout, whole."""
        shape = Shape(self.B, self.H, self.K, self.layout.S, self.layout.S, self.D, self.Dv)
        return tensors(shape, self.seed, self.dtype)

    def dlse(self) -> Tensor | None:
        """Return the whole gradient of lse, or None if the loss depends only on out."""
        random = torch.Generator().manual_seed(self.seed)
        shape = self.B, self.H, self.layout.S
        return torch.randn(shape, generator=random, dtype=torch.float64) if self.through_lse else None

    def logits(self) -> Tensor | None:
        """Return a sink for each head; the last sink is so low that it takes no weight."""
        if not self.sinks:
            return None
        random = torch.Generator().manual_seed(self.seed)
        drawn = self.sinks * torch.randn(self.H, generator=random, dtype=torch.float64)
        drawn[-1] = -1e4
        return drawn.to(self.dtype)

    def scoring(self) -> dict[str, Any]:
        """Return the oracle's arguments apart from the tensors."""
        kept = factors(self.B, self.H, self.layout.S, self.dropout, self.seed) if self.dropout else None
        logits = self.logits()
        sinks = None if logits is None else logits.double().numpy()
        return {"mask": self.mask, "softcap": self.softcap, "factors": kept, "sinks": sinks}


def program(
    ring: Ring, problem: Problem, schedule: Any, return_lse: bool = True, block: str = "naive"
) -> tuple[Tensor, ...]:
    """Return this rank's rows of out and lse, and its dq, dk, dv and, with sinks, their gradient."""
    layout, sinks = problem.layout, problem.logits()
    *qkv, dout = layout.shard(problem.tensors(), ring.rank)
    leaves = [x.requires_grad_() for x in qkv] + ([] if sinks is None else [sinks.requires_grad_()])
    how: dict[str, Any] = {"mask": problem.mask, "schedule": schedule, "block": block, "sinks": sinks}
    how |= {"softcap": problem.softcap, "dropout": problem.dropout, "seed": problem.seed}
    if not return_lse:
        out = ring_attention(*leaves[:3], ring=ring, layout=layout, **how)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)
    out, lse = ring_attention(*leaves[:3], ring=ring, layout=layout, return_lse=True, **how)
    whole = problem.dlse()
    dlse = None if whole is None else layout.shard((whole,), ring.rank, dim=-1)[0].to(lse.dtype)
    loss = (out,) if dlse is None else (out, lse)
    gradients = torch.autograd.grad(loss, leaves, (dout, dlse)[: len(loss)])
    return out.detach(), lse.detach(), *gradients


def joined(problem: Problem, shards: list[tuple[Tensor, ...]]) -> Results:
    """Return the results of the whole sequence, without the gradient of sinks."""
    unshard = problem.layout.unshard
    out, lse, *gradients = list(zip(*shards, strict=True))[:5]
    return Results(unshard(out), unshard(lse, dim=-1), *map(unshard, gradients))


def run(problem: Problem, schedule: Any, block: str = "naive", return_lse: bool = True) -> Outcome:
    """Return the outcome of a run on virtual ranks."""
    cluster = VirtualCluster(problem.layout.P, memory=False)
    return cluster.run(program, problem, schedule, return_lse, block)


def solve(problem: Problem, schedule: Any, block: str = "naive") -> Results:
    """Return the results of the whole sequence, from virtual ranks."""
    return joined(problem, run(problem, schedule, block).results)


def hold(problem: Problem, schedule: Any, block: str = "naive") -> None:
    """Fail unless virtual ranks give the oracle's results, and its gradient of sinks."""
    shards = run(problem, schedule, block).results
    assert_equals_the_oracle(joined(problem, shards), problem)
    if problem.sinks:
        found = sum(shard[5] for shard in shards).double().numpy()
        expected, terms = true_gradient_of_sinks(problem)
        roundings = 100 if problem.dtype == torch.float64 else 1  # roundings of each term
        most = roundings * torch.finfo(problem.dtype).eps * (1 + problem.sinks) * terms
        assert np.abs(found - expected).max() <= most, "the gradient of sinks is wrong"


def assert_equals_the_oracle(results: Results, problem: Problem) -> None:
    """Fail unless every error is within the bound derived for this problem."""
    whole = problem.dlse()
    how = problem.scoring() | {"dlse": None if whole is None else whole.numpy()}
    true = truth(*problem.tensors(), **how)
    allowed = bounds(*problem.tensors(), true=true, **how)
    measured = errors(results, true)
    wrong = {name: (measured[name], allowed[name]) for name in NAMES if not measured[name] <= allowed[name]}
    assert not wrong, f"(error, allowed) {wrong}"


def out_and_lse(problem: Problem, sinks: np.ndarray) -> oracle.Result:
    """Return the oracle's out and lse with these sinks."""
    q, k, v, _ = problem.tensors()
    positions = np.arange(problem.layout.S)
    visible = problem.mask.of_length(problem.layout.S).visible(positions, positions)
    return oracle.attention(q, k, v, **problem.scoring() | {"mask": visible, "sinks": sinks})


def true_gradient_of_sinks(problem: Problem) -> tuple[np.ndarray, float]:
    """Return each head's −Σ_i p_i (dout_i · out_i − dlse_i), p_i = e^(sink − lse_i), and the terms' size."""
    sinks = problem.scoring()["sinks"]
    true, dout, dlse = out_and_lse(problem, sinks), problem.tensors()[3].double(), problem.dlse()
    weights = np.exp(sinks[:, None] - true.lse)
    products, more = dout.numpy() * true.out, np.zeros_like(weights) if dlse is None else dlse.numpy()
    terms = float(np.abs(products).sum() + np.abs(more).sum())
    return -(weights * (products.sum(-1) - more)).sum((0, 2)), terms


class Broken(Native):
    """A block whose own check fails with an error that no caller expects."""

    def supports(self, q: Tensor) -> str | None:
        raise KeyError("on this machine")


class Plain(Native):
    name = "plain"
    supported_rules: frozenset[str] = frozenset()
