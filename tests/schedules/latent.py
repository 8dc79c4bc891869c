"""Problems of latent attention: the program, the truth in float64, and the allowed errors.

The truth computes all K and V in float64 and runs the oracle on them. The plainest implementation computes
them in the dtype of the latent and leaves all gradients to autograd.

The allowed errors of attention's own results (out, lse, dq) are those of `ringlab.conformance.tolerance` for
the truth's K and V, rounded to the dtype. Gradients of the latent and the weights are sums of products with
dK and dV. Their allowed error is the bound of dK and dV times the largest sum of |factors|, plus one
rounding when they are stored. In bfloat16 the stored rounding is nearly the whole error, so the sum's part
is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringlab import VirtualCluster, latent_attention, oracle
from ringlab.comm.ring import Ring
from ringlab.conformance.tolerance import FACTOR, bounds, relative_error
from ringlab.layout import Layout
from ringlab.mask import Mask

INPUTS = ("q", "latent", "k_rope", "w_k", "w_v")


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
    own = [layout.shard(x, ring.rank).clone() for x in inputs[:3]] + [x.clone() for x in inputs[3:]]
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
    whole = [unshard(parts) for parts in gradients[:3]]
    weights = [sum(part.double() for part in parts) for parts in gradients[3:]]
    return Results(unshard(out), unshard(lse, dim=-1), *whole, *weights)


def solve(problem: Problem, schedule: str = "ring", block: str = "naive") -> Results:
    """Return the results of the whole sequence, from virtual ranks."""
    run = VirtualCluster(problem.layout.P, memory=False).run(program, problem, schedule, block)
    return join(problem, run.results)


def keys_and_values(latent: Tensor, k_rope: Tensor, w_k: Tensor, w_v: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of all heads, by the definition."""
    rotated = k_rope[:, None].expand(-1, len(w_k), -1, -1)
    return torch.cat((latent[:, None] @ w_k.mT, rotated), dim=-1), latent[:, None] @ w_v.mT


@lru_cache(maxsize=64)
def truth(problem: Problem) -> tuple[Results, dict[str, float]]:
    """Return the results in float64, and the allowed relative errors."""
    q, latent, k_rope, w_k, w_v, dout, dlse = (x.double() for x in problem.tensors())
    k, v = keys_and_values(latent, k_rope, w_k, w_v)
    positions = np.arange(problem.layout.S)
    visible = problem.mask.of_length(len(positions)).visible(positions, positions)
    out, lse = oracle.attention(q, k, v, mask=visible)
    whole = dlse.numpy() if problem.through_lse else None
    dq, dk, dv = oracle.gradients(q, k, v, dout, dlse=whole, mask=visible)
    of_keys, Dn = dk[..., : problem.Dn], problem.Dn
    wk, wv, c = w_k.numpy(), w_v.numpy(), latent.numpy()
    true = Results(
        out, lse, dq,
        np.einsum("bhld,hdr->blr", of_keys, wk) + np.einsum("bhld,hdr->blr", dv, wv),
        dk[..., Dn:].sum(1), np.einsum("bhld,blr->hdr", of_keys, c), np.einsum("bhld,blr->hdr", dv, c),
    )  # fmt: skip
    return true, _allowed(problem, true, (k, v), (dk, dv), whole)


def _allowed(
    problem: Problem,
    true: Results,
    kv: tuple[Tensor, Tensor],
    dkv: tuple[np.ndarray, np.ndarray],
    dlse: np.ndarray | None,
) -> dict[str, float]:
    q, latent, _, w_k, w_v, dout, _ = problem.tensors()
    dtype = problem.dtype
    attention = bounds(q, kv[0].to(dtype), kv[1].to(dtype), dout, mask=problem.mask, dlse=dlse)
    # Bounds are relative to the largest gradient, or to 1 if all are 0, since rows that see one key have no
    # dK.
    off_k, off_v = (
        attention[name] * (np.abs(x).max() or 1.0) for name, x in zip(("dk", "dv"), dkv, strict=True)
    )
    c, wk, wv = (x.double().abs().numpy() for x in (latent, w_k, w_v))
    passed_on = {
        "latent": off_k * wk.sum((0, 1)).max() + off_v * wv.sum((0, 1)).max(),
        "k_rope": off_k * problem.H,
        "w_k": off_k * c.sum((0, 1)).max(),
        "w_v": off_v * c.sum((0, 1)).max(),
    }
    unit = torch.finfo(dtype).eps
    plain = {
        name: relative_error(x, t)
        for name, x, t in zip(Results._fields, plainest(problem), true, strict=True)
    }
    allowed = {"out": attention["out"], "lse": attention["lse"], "q": attention["dq"]}
    for name, moved in passed_on.items():
        rounded = moved / (np.abs(getattr(true, name)).max() or 1.0) if dtype != torch.bfloat16 else 0.0
        allowed[name] = unit + rounded
    return {name: FACTOR * plain[name] + allowed[name] for name in allowed}


def plainest(problem: Problem) -> Results:
    """Return the results with every tensor materialised in the dtype, and gradients by autograd."""
    *inputs, dout, dlse = problem.tensors()
    leaves = [x.clone().requires_grad_() for x in inputs]
    k, v = keys_and_values(*leaves[1:])
    scores = leaves[0] @ k.mT * leaves[0].shape[-1] ** -0.5
    positions = np.arange(problem.layout.S)
    visible = problem.mask.of_length(len(positions)).visible(positions, positions)
    scores = scores.masked_fill(~torch.from_numpy(visible), -torch.inf)
    out, lse = (
        scores.softmax(-1) @ v,
        scores.to(torch.promote_types(scores.dtype, torch.float32)).logsumexp(-1),
    )
    loss, cotangents = ((out, lse), (dout, dlse.to(lse.dtype))) if problem.through_lse else ((out,), (dout,))
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves, cotangents))


def beyond(results: Results, problem: Problem) -> dict[str, tuple[float, float]]:
    """Return (error, allowed) of each result that is not within its bound."""
    true, allowed = truth(problem)
    found = {name: relative_error(x, t) for name, x, t in zip(Results._fields, results, true, strict=True)}
    return {name: (found[name], allowed[name]) for name in allowed if not found[name] <= allowed[name]}
