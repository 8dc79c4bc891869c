"""Small rings in which published mistakes stand in one line each, and what is measured on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab import oracle
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.conformance.mutants import MUTANTS
from ringlab.conformance.perform import on_virtual_ranks
from ringlab.conformance.runs import Run, expected
from ringlab.layout import Layout

Fold = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(out, maximum, sum) so far, the scores of a block and its values → (out, maximum, sum)."""


def fold(out: Tensor, top: Tensor, total: Tensor, scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the running state: out is not normalised, and rows that saw nothing yet keep a maximum of −inf."""
    higher = torch.maximum(top, scores.amax(-1))
    safe = higher.masked_fill(higher == -math.inf, 0.0)
    weights, kept = torch.exp(scores - safe[:, None]), torch.exp(top - safe)
    return out * kept[:, None] + weights @ v, higher, total * kept + weights.sum(-1)


def fold_of_block_maxima(
    out: Tensor, top: Tensor, total: Tensor, scores: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As published: each block subtracts its own maximum, which is −inf where a row sees no key of it."""
    own = scores.amax(-1)
    weights = torch.exp(scores - own[:, None])  # −inf − (−inf) is NaN
    higher = torch.maximum(top, own)
    kept, added = torch.exp(top - higher), torch.exp(own - higher)
    return (
        out * kept[:, None] + (weights @ v) * added[:, None],
        higher,
        total * kept + weights.sum(-1) * added,
    )


def fold_without_the_old_sum(
    out: Tensor, top: Tensor, total: Tensor, scores: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As published: out is normalised, o' = (o·e^(m−m') + …) / l'. The factor l of the old out is missing."""
    higher = torch.maximum(top, scores.amax(-1))
    kept, weights = torch.exp(top - higher), torch.exp(scores - higher[:, None])
    total = total * kept + weights.sum(-1)
    return (out * kept[:, None] + weights @ v) / total[:, None], higher, total


def ring_of(fold: Fold, layout: Layout, *, causal: bool, normalised: bool = False) -> tuple[Tensor, Tensor]:
    """Return (out, the true out) of one head on virtual ranks, block by block; whole blocks, none skipped."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(layout.S, 8, generator=draw, dtype=torch.float64) for _ in range(3))

    def program(ring: Ring) -> Tensor:
        mine = torch.from_numpy(layout.positions(ring.rank))
        here, keys, values = q[mine] / math.sqrt(q.shape[1]), k[mine], v[mine]
        out, top, total = (
            torch.zeros_like(here),
            torch.full((len(mine),), -math.inf).double(),
            torch.zeros(len(mine)).double(),
        )
        for step in range(ring.world_size):
            theirs = torch.from_numpy(layout.positions(ring.origin(step)))
            hidden = theirs > mine[:, None] if causal else torch.zeros(len(mine), len(theirs), dtype=bool)  # type: ignore[call-overload]
            out, top, total = fold(out, top, total, (here @ keys.T).masked_fill(hidden, -math.inf), values)
            if step < ring.world_size - 1:
                keys, values = ring.shift(keys, values, length=layout.length(ring.origin(step + 1)))
        return out if normalised else out / total[:, None]

    out = layout.unshard(VirtualCluster(layout.P).run(program).results)
    true = oracle.attention(*(x[None, None] for x in (q, k, v)), causal=causal).out[0, 0]
    return out, torch.from_numpy(true)


def wrong_ring(name: str, layout: str, *, causal: bool = True, P: int = 4, S: int = 16) -> dict[str, Any]:
    """Return (result, true result) of out, dq, dk and dv of a wrong ring in float64, on virtual ranks."""
    run = Run(P, S, layout, causal, H=2, K=2, D=16, dtype="float64")
    ran = on_virtual_ranks(MUTANTS[name].target(), run)
    true = expected(run.plain)[0]
    return {each: (ran.arrays[each], getattr(true, each)) for each in ("out", "dq", "dk", "dv")}


def error(result: Any, true: Any) -> float:
    """Return ‖result − true‖ / ‖true‖."""
    result, true = np.asarray(result), np.asarray(true)
    return float(np.linalg.norm(result - true) / np.linalg.norm(true))
