"""The table of cases that linear attention must pass on every transport and with every scan.

The kinds are layers of models: plain (Lightning attention without its decay), decay (Lightning, RetNet,
Mamba-2), delta (DeltaNet), gated-delta (Qwen3-Next, and Kimi Linear with one decay per head). The table
covers every pair of values of two axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.comm.ring import Ring
from ringlab.conformance.kinds.scan_tolerance import Inputs, Results, bounds, truth
from ringlab.conformance.pairwise_cases import covering_pairs
from ringlab.layout import Layout, contiguous, dealt, per_document, zigzag
from ringlab.merge import state_dtype
from ringlab.scan.attention import linear_attention


def _lengths(S: int) -> tuple[int, ...]:
    """Return the lengths of five documents: empty, short, one token, most of the tokens, and the rest."""
    return 0, S // 9, 1, S - S // 9 - 1 - S // 4, S // 4


LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "chunk-5": lambda S, P: dealt(S, P, chunk=5),
    "per-document": lambda S, P: per_document(_lengths(S), P),
}

AXES: dict[str, tuple[Any, ...]] = {
    "layout": tuple(LAYOUTS),
    "P": (1, 2, 3, 5),
    "S": (3, 13, 22),
    "heads": ((2, 2), (1, 3), (2, 4)),  # heads of q and k, and heads of v
    "D": (1, 4, 16),
    "Dv": (3, 16),
    "kind": ("plain", "decay", "delta", "gated-delta"),
    "dtype": ("float64", "float32", "bfloat16"),
    "packed": (False, True),
    "initial": (False, True),
    "chunk": (1, 4, 64),
}


@dataclass(frozen=True)
class Case:
    """One problem of linear attention and how it is spread over ranks."""

    layout: str
    P: int
    S: int
    heads: tuple[int, int]
    D: int
    Dv: int
    kind: str
    dtype: str
    packed: bool
    initial: bool
    chunk: int

    def __str__(self) -> str:
        marks = f"{'-packed' if self.packed else ''}{'-initial' if self.initial else ''}-chunk{self.chunk}"
        heads = "over".join(map(str, self.heads))
        sizes = f"P{self.P}-S{self.S}-heads{heads}-D{self.D}x{self.Dv}"
        return f"{self.layout}-{sizes}-{self.kind}-{self.dtype}{marks}"

    def make_layout(self) -> Layout:
        """Return the layout of this case's sequence."""
        return LAYOUTS[self.layout](self.S, self.P)


@dataclass(frozen=True)
class Problem:
    """A case's inputs for the whole sequence, with the true results and the allowed errors."""

    inputs: Inputs
    true: Results
    bounds: dict[str, float]


@lru_cache(maxsize=1)
def covering() -> tuple[Case, ...]:
    """Return cases that contain every pair of values of two different axes."""
    return tuple(Case(**chosen) for chosen in covering_pairs(AXES))


def inputs(case: Case) -> Inputs:
    """Return the inputs of the whole sequence, which are the same at every call.

    With the delta rule, keys have length 1 and β is from 0 to 2, because otherwise the state would grow
    without bound. Decays range from almost none to strong, in the state's dtype, and each head has one token
    that forgets everything.
    """
    generator = np.random.default_rng([case.S, case.D, case.Dv, *case.heads])
    dtype, B, (K, H), S = getattr(torch, case.dtype), 2, case.heads, case.S

    def draw(*shape: int) -> Tensor:
        return torch.from_numpy(generator.standard_normal(shape))

    q, k, v, dout = (
        draw(B, K, S, case.D),
        draw(B, K, S, case.D),
        draw(B, H, S, case.Dv),
        draw(B, H, S, case.Dv),
    )
    k = k / k.norm(dim=-1, keepdim=True) if "delta" in case.kind else k
    initial, dstate = draw(B, H, case.D, case.Dv), draw(B, H, case.D, case.Dv)
    decay = -torch.from_numpy(generator.exponential(10.0 ** generator.uniform(-3, 1, (1, H, 1)), (B, H, S)))
    decay[..., S // 2] = -torch.inf
    beta = torch.from_numpy(generator.uniform(0, 2, (B, H, S))).to(dtype)
    state = state_dtype(dtype)
    return Inputs(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        decay.to(state) if case.kind in ("decay", "gated-delta") else None,
        beta if "delta" in case.kind else None,
        initial.to(state) if case.initial else None,
        dout.to(dtype),
        dstate.to(state),
        _lengths(S) if case.packed else (),
    )


@lru_cache(maxsize=64)
def problem(case: Case) -> Problem:
    """Return the case's inputs with the oracle's results and the bounds that are derived from them."""
    given = inputs(case)
    true = truth(given)
    return Problem(given, true, bounds(given, true))


def attend(ring: Ring, case: Case, scan: str) -> tuple[Tensor | None, ...]:
    """Run the program of a case: return this rank's part of every result, in the order of `Results`."""
    return attend_to(ring, inputs(case), case.make_layout(), scan, case.chunk)


def attend_to(ring: Ring, given: Inputs, layout: Layout, scan: str, chunk: int) -> tuple[Tensor | None, ...]:
    """Return this rank's part of every result; the ranks share the gradient of the last state equally."""
    leaves = [
        x if x is None else layout.shard(x, ring.rank, dim=dim).clone().requires_grad_()
        for x, dim in zip(given.leaves[:5], (-2, -2, -2, -1, -1), strict=True)
    ]
    initial = None if given.initial is None else given.initial.clone().requires_grad_()
    q, k, v, decay, beta = leaves
    assert q is not None and k is not None and v is not None
    results = linear_attention(
        q, k, v, ring=ring, layout=layout, decay=decay, beta=beta, documents=given.documents,
        initial_state=initial, scan=scan, chunk=chunk, return_state=True,
    )  # fmt: skip
    cotangents = layout.shard(given.dout, ring.rank), given.dstate / ring.world_size
    wanted = [x for x in (*leaves, initial) if x is not None]
    found = iter(torch.autograd.grad(results, wanted, cotangents))
    gradients = (None if x is None else next(found) for x in (*leaves, initial))
    return *(x.detach() for x in results), *gradients


def join(layout: Layout, shards: list[tuple[Float[Tensor, "..."] | None, ...]]) -> Results:
    """Return the results of the whole sequence from the parts of all ranks."""
    out, states, dq, dk, dv, ddecay, dbeta, dinitial = zip(*shards, strict=True)

    def whole(parts: tuple[Any, ...], dim: int = -2) -> Tensor | None:
        return None if parts[0] is None else layout.unshard(parts, dim=dim)

    total = None if dinitial[0] is None else torch.stack(dinitial).sum(0)
    tokens = whole(out), states[0], whole(dq), whole(dk), whole(dv)
    return Results(*tokens, whole(ddecay, -1), whole(dbeta, -1), total)
