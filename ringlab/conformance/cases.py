"""The table of cases that attention must pass on every transport, block backend and schedule.

The axes are layouts, world sizes, sequence lengths, heads, head dims, dtypes, masks, head dims of v, and
attention sinks. Their full product has thousands of cases; the table covers every pair of values of two axes.
`refusal` gives the error with which a schedule must refuse a case whose heads or ranks do not fit it.
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

from ringlab import layout as layouts
from ringlab.attention import ring_attention
from ringlab.blocks import available as blocks
from ringlab.comm.ring import Ring
from ringlab.conformance.pairwise_cases import covering_pairs
from ringlab.conformance.tolerance import Results, Scoring, bounds, truth
from ringlab.errors import RinglabError, ShapeError, WorldSizeError
from ringlab.layout import Layout, dealt, per_document
from ringlab.mask import Mask

LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    **layouts.LAYOUTS,
    # ringlab does not register this layout. Code that registers it should use this name, which tests and
    # lessons 08 and 12 use.
    "token-fold": lambda S, P: dealt(S, P, chunk=1, folded=True),
    "chunk-3": lambda S, P: dealt(S, P, chunk=3),
    "chunk-5-folded": lambda S, P: dealt(S, P, chunk=5, folded=True),
}

MASKS: dict[str, Callable[[int], Mask]] = {
    "causal": lambda S: Mask(),
    "full": lambda S: Mask(causal=False),
    "window": lambda S: Mask(window=1 + S // 5),
    "window-both": lambda S: Mask(causal=False, window=1 + S // 4),
    "prefix": lambda S: Mask(prefix=1 + S // 6),
    "documents": lambda S: Mask(documents=_lengths(S)),
    "documents-both": lambda S: Mask(causal=False, documents=_lengths(S)),
    "packed": lambda S: Mask(window=1 + S // 7, prefix=(0, 0, 1, S // 9, 2), documents=_lengths(S)),
}
"""Each function takes the length of the sequence; "packed" has a window, and prefixes inside documents."""


def _lengths(S: int) -> tuple[int, ...]:
    """Return the lengths of five documents: short, empty, one token, most of the tokens, and the rest."""
    most = S - S // 9 - 1 - S // 4
    return S // 9, 0, 1, most, S // 4


ALL_LAYOUTS = LAYOUTS | {"per-document": lambda S, P: per_document(_lengths(S), P)}
"""LAYOUTS, and a layout that distributes each document of MASKS separately. `ringlab check` does not use the
latter."""

AXES: dict[str, tuple[Any, ...]] = {
    "layout": tuple(ALL_LAYOUTS),
    "P": (1, 2, 3, 4, 8),
    "S": (3, 17, 64, 97, 131),  # primes, and a length that is below most world sizes
    "group": (1, 2, 8),  # query heads per key/value head
    "D": (16, 40, 64, 80, 128, 256),
    "dtype": ("float64", "float32", "bfloat16"),
    "mask": tuple(MASKS),
    "Dv": (
        0,
        24,
        96,
    ),  # head dim of v; 0 means D. The other values are smaller than some D and larger than some D
    "sinks": (False, True),
}


@dataclass(frozen=True)
class Case:
    """One attention problem, and how it is spread over ranks.

    Dv: the head dim of v, or 0 if it is D. sinks: whether the heads have attention sinks.
    """

    layout: str
    P: int
    S: int
    group: int
    D: int
    dtype: str
    mask: str
    Dv: int = 0
    sinks: bool = False

    def __str__(self) -> str:
        of_v, sinks = f"-Dv{self.Dv}" if self.Dv else "", "-sinks" if self.sinks else ""
        return f"{self.layout}-P{self.P}-S{self.S}-gqa{self.group}-D{self.D}{of_v}-{self.dtype}-{self.mask}{sinks}"

    @property
    def heads(self) -> tuple[int, int]:
        """Return the numbers of query heads and key/value heads, (H, K)."""
        return (8, 1) if self.group == 8 else (2 * self.group, 2)

    def make_layout(self) -> Layout:
        """Return the layout of this case's sequence."""
        return ALL_LAYOUTS[self.layout](self.S, self.P)

    def make_mask(self) -> Mask:
        """Return the mask of this case's sequence."""
        return MASKS[self.mask](self.S)

    def make_sinks(self) -> Float[Tensor, " H"] | None:
        """Return a logit for each query head, from −2 to 2, in the dtype of q; None for a case without sinks."""
        dtype = getattr(torch, self.dtype)
        return torch.linspace(-2.0, 2.0, self.heads[0], dtype=torch.float64).to(dtype) if self.sinks else None


@dataclass(frozen=True)
class Problem:
    """The tensors of a case for the whole sequence, with the true results and the allowed errors."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    true: Results
    bounds: dict[str, float]


@lru_cache(maxsize=1)
def covering() -> tuple[Case, ...]:
    """Return cases that contain every pair of values of two different axes."""
    return tuple(Case(**chosen) for chosen in covering_pairs(AXES))


EVERY_THIRD = ("query-ring", "burst", "bidirectional", "multi-ring")
"""Schedules that share nearly all of their code with the ring, so each block backend computes only a third of
the cases."""


def cases_of(schedule: str, block: str) -> tuple[Case, ...]:
    """Return the cases that `block` computes under `schedule`; the blocks together compute all of them."""
    cases = covering()
    if schedule not in EVERY_THIRD or block not in blocks():
        return cases
    return cases[blocks().index(block) :: len(blocks())]


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same normally distributed q, k, v and dout of the whole sequence at every call."""
    draw = np.random.default_rng([case.S, case.group, case.D, list(MASKS).index(case.mask)]).standard_normal
    heads, kv_heads = case.heads
    rows, keys, Dv = (1, heads, case.S), (1, kv_heads, case.S), case.Dv or case.D
    shapes, dtype = ((*rows, case.D), (*keys, case.D), (*keys, Dv), (*rows, Dv)), getattr(torch, case.dtype)
    q, k, v, dout = (torch.from_numpy(draw(shape)).to(dtype) for shape in shapes)
    return q, k, v, dout


@lru_cache(maxsize=16)
def problem(case: Case) -> Problem:
    """Return the case's tensors with the oracle's results and the bounds that are derived from them."""
    tensors, scoring = inputs(case), scoring_of(case)
    true = truth(*tensors, **scoring)
    return Problem(*tensors, true, bounds(*tensors, true=true, **scoring))


def scoring_of(case: Case) -> Scoring:
    """Return the mask and the sinks of a case as keyword arguments of `truth` and `bounds`."""
    sinks = case.make_sinks()
    return {"mask": case.make_mask(), "sinks": None if sinks is None else sinks.double().numpy()}


def attend(
    ring: Ring,
    case: Case,
    block: str,
    schedule: str,
    device: str = "cpu",
    dlse: Float[Tensor, "B H L"] | None = None,
    **scored: Any,
) -> tuple[Tensor, ...]:
    """Run the program of a case: return this rank's shards of out, lse, dq, dk and dv, computed on `device`.

    dlse: the gradient of this rank's rows of lse, or None if no loss depends on them.
    scored: softcap, dropout and seed of `ring_attention`.
    """
    layout, sinks = case.make_layout(), case.make_sinks()
    *qkv, dout = (layout.shard(x, ring.rank).to(device) for x in inputs(case))
    q, k, v = (x.requires_grad_() for x in qkv)
    scored |= {} if sinks is None else {"sinks": sinks.to(device)}
    out, lse = ring_attention(
        q,
        k,
        v,
        ring=ring,
        layout=layout,
        mask=case.make_mask(),
        block=block,
        schedule=schedule,
        return_lse=True,
        **scored,
    )
    losses, given = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse.to(lse)))
    dq, dk, dv = torch.autograd.grad(losses, (q, k, v), given)
    return out.detach(), lse.detach(), dq, dk, dv


def join(case: Case, shards: list[tuple[Float[Tensor, "..."], ...]]) -> Results:
    """Return the results of the whole sequence, given the values of `attend` on every rank."""
    layout = case.make_layout()
    parts = list(zip(*shards, strict=True))
    whole = [layout.unshard(part, dim=-1 if index == 1 else -2) for index, part in enumerate(parts)]
    return Results(*whole)


def refusal(case: Case, schedule: str) -> type[RinglabError] | None:
    """Return the error with which `schedule` must refuse the case, or None if it must compute the case.

    If ranks divide the heads, each rank needs the same number of query heads, and whole key/value heads or an
    equal part of one. Groups of two ranks, the default of the hybrid and the double ring, need an even number
    of ranks.
    """
    if schedule in ("hybrid", "double-ring") and case.P % 2:
        return WorldSizeError
    sharing = {"ulysses": case.P, "hybrid": 2}.get(schedule, 1)
    H, K = case.heads
    splits = H % sharing == 0 and (K % sharing == 0 or sharing % K == 0)
    return None if splits else ShapeError
