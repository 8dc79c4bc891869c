"""Attention problems, and the program that computes one with any schedule.

A block that knows no soft caps and no dropout, as somebody's own may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringlab import VirtualCluster, ring_attention
from ringlab.blocks.native import Native
from ringlab.comm.ring import Ring
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.layout import Layout
from ringlab.mask import Mask
from tests.laws.draw import Shape, tensors
from tests.philox import factors


@dataclass(frozen=True)
class Problem:
    """An attention, and how it is spread over ranks. Dv: the head dim of v, D if 0."""

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

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and dout, whole."""
        shape = Shape(self.B, self.H, self.K, self.layout.S, self.layout.S, self.D, self.Dv)
        return tensors(shape, self.seed, self.dtype)

    def dlse(self) -> Tensor | None:
        """Return the gradient of lse, whole; None if the loss is one of out alone."""
        random = torch.Generator().manual_seed(self.seed)
        shape = self.B, self.H, self.layout.S
        return torch.randn(shape, generator=random, dtype=torch.float64) if self.through_lse else None

    def scoring(self) -> dict[str, Any]:
        """Return what the oracle must know beside the tensors."""
        kept = factors(self.B, self.H, self.layout.S, self.dropout, self.seed) if self.dropout else None
        return {"mask": self.mask, "softcap": self.softcap, "factors": kept}


def program(
    ring: Ring, problem: Problem, schedule: Any, return_lse: bool = True, block: str = "naive"
) -> tuple[Tensor, ...]:
    """Return this rank's rows of out and lse, and its dq, dk and dv."""
    layout = problem.layout
    *qkv, dout = layout.shard(problem.tensors(), ring.rank)
    q, k, v = (x.requires_grad_() for x in qkv)
    how: dict[str, Any] = {"mask": problem.mask, "schedule": schedule, "block": block}
    how |= {"softcap": problem.softcap, "dropout": problem.dropout, "seed": problem.seed}
    if not return_lse:
        out = ring_attention(q, k, v, ring=ring, layout=layout, **how)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)
    out, lse = ring_attention(q, k, v, ring=ring, layout=layout, return_lse=True, **how)
    whole = problem.dlse()
    dlse = None if whole is None else layout.shard((whole,), ring.rank, dim=-1)[0].to(lse.dtype)
    loss = (out,) if dlse is None else (out, lse)
    gradients = torch.autograd.grad(loss, (q, k, v), (dout, dlse)[: len(loss)])
    return out.detach(), lse.detach(), *gradients


def solve(problem: Problem, schedule: Any, block: str = "naive") -> Results:
    """Return the results of the whole sequence, from virtual ranks."""
    layout = problem.layout
    shards = VirtualCluster(layout.P, memory=False).run(program, problem, schedule, True, block).results
    out, lse, *gradients = zip(*shards, strict=True)
    return Results(layout.unshard(out), layout.unshard(lse, dim=-1), *map(layout.unshard, gradients))


def assert_equals_the_oracle(results: Results, problem: Problem) -> None:
    """Fail unless every error is within the bound derived for this problem."""
    whole = problem.dlse()
    how = problem.scoring() | {"dlse": None if whole is None else whole.numpy()}
    true = truth(*problem.tensors(), **how)
    allowed = bounds(*problem.tensors(), true=true, **how)
    measured = errors(results, true)
    wrong = {name: (measured[name], allowed[name]) for name in NAMES if not measured[name] <= allowed[name]}
    assert not wrong, f"(error, allowed) {wrong}"


class Broken(Native):
    """A block whose own check fails, by an error that no caller foresees."""

    def supports(self, q: Tensor) -> str | None:
        raise KeyError("on this machine")


class Plain(Native):
    name = "plain"
    supported_rules: frozenset[str] = frozenset()
