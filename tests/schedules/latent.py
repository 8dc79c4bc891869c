"""Problems of latent attention: the program on a ring, and the truth by the definition in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringlab import VirtualCluster, latent_attention
from ringlab.comm.ring import Ring
from ringlab.layout import Layout
from ringlab.mask import Mask


@dataclass(frozen=True)
class Problem:
    """A latent attention, and the layout that spreads it over ranks."""

    layout: Layout
    H: int = 3
    Dn: int = 6
    Dr: int = 2
    Dv: int = 5
    R: int = 7
    B: int = 1
    mask: Mask = field(default_factory=Mask)
    dtype: torch.dtype = torch.float64
    through_lse: bool = False
    autocast: bool = False  # whether autocast makes bfloat16 from float32 weights
    seed: int = 0

    @lru_cache(maxsize=64)  # noqa: B019 (problems are few)
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the five inputs, dout and dlse, whole; the weights' scale gives K and V a size of 1."""
        draw = np.random.default_rng(self.seed).standard_normal
        S, D = self.layout.S, self.Dn + self.Dr
        shapes = (
            (self.B, self.H, S, D), (self.B, S, self.R), (self.B, S, self.Dr), (self.H, self.Dn, self.R),
            (self.H, self.Dv, self.R), (self.B, self.H, S, self.Dv), (self.B, self.H, S),
        )  # fmt: skip
        drawn = [torch.from_numpy(draw(shape)) for shape in shapes]
        for weight in drawn[3:5]:
            weight *= self.R**-0.5
        return tuple(x.to(self.dtype) for x in drawn)


class Results(NamedTuple):
    """All results of a latent attention; gradients of weights are sums over ranks."""

    out: Any
    lse: Any
    q: Any
    latent: Any
    k_rope: Any
    w_k: Any
    w_v: Any


def program(ring: Ring, problem: Problem, schedule: str = "ring", block: str = "naive") -> tuple[Tensor, ...]:
    """Return this rank's out, lse and five gradients."""
    layout, (*inputs, dout, dlse) = problem.layout, problem.tensors()
    own = [layout.shard(x, ring.rank, dim=-2).clone() for x in inputs[:3]] + [x.clone() for x in inputs[3:]]
    if problem.autocast:
        own[3:] = [x.float() for x in own[3:]]
    leaves = [x.requires_grad_() for x in own]
    with torch.autocast("cpu", torch.bfloat16, enabled=problem.autocast):
        out, lse = latent_attention(
            *leaves,
            ring=ring,
            layout=layout,
            mask=problem.mask,
            schedule=schedule,
            block=block,
            return_lse=True,
        )
    assert out.dtype == problem.dtype
    loss, cotangents = [out], [layout.shard(dout, ring.rank)]
    if problem.through_lse:
        loss.append(lse)
        cotangents.append(layout.shard(dlse, ring.rank, dim=-1).to(lse.dtype))
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves, cotangents)


def join(problem: Problem, shards: list[tuple[Tensor, ...]]) -> Results:
    """Return the results of the whole sequence from every rank's results of `program`."""
    out, lse, *gradients = zip(*shards, strict=True)
    unshard = problem.layout.unshard
    whole = [unshard(parts, dim=-2) for parts in gradients[:3]]
    weights = [sum(part.double() for part in parts) for parts in gradients[3:]]
    return Results(unshard(out), unshard(lse, dim=-1), *whole, *weights)


def solve(problem: Problem, schedule: str = "ring", block: str = "naive") -> Results:
    """Return the results of the whole sequence, from virtual ranks."""
    run = VirtualCluster(problem.layout.P, memory=False).run(program, problem, schedule, block)
    return join(problem, run.results)


@lru_cache(maxsize=64)
def truth(problem: Problem) -> Results:
    """Return the results by the definition: all K and V in float64, and gradients by autograd."""
    *inputs, dout, dlse = (x.double() for x in problem.tensors())
    q, latent, k_rope, w_k, w_v = leaves = [x.requires_grad_() for x in inputs]
    rotated = k_rope[:, None].expand(-1, problem.H, -1, -1)
    k = torch.cat((latent[:, None] @ w_k.mT, rotated), dim=-1)
    positions = np.arange(problem.layout.S)
    visible = torch.from_numpy(problem.mask.of_length(len(positions)).visible(positions, positions))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    out, lse = scores.softmax(-1) @ (latent[:, None] @ w_v.mT), scores.logsumexp(-1)
    loss, cotangents = ((out, lse), (dout, dlse)) if problem.through_lse else ((out,), (dout,))
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves, cotangents))


ROUNDINGS = 16
"""Roundings of the largest number of a result, in the dtype, that its error may take."""


def beyond(results: Results, problem: Problem) -> dict[str, tuple[float, float]]:
    """Return (error, allowed) of each result that is not within its bound."""
    unit, found = torch.finfo(problem.dtype).eps, {}
    for name, x, true in zip(Results._fields, results, truth(problem), strict=True):
        error = float((x.double() - true).abs().max())
        found[name] = error, ROUNDINGS * unit * (1 + float(true.abs().max()))
    return {name: pair for name, pair in found.items() if not pair[0] <= pair[1]}
