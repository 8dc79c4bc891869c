"""Partial attention results and their merge, a commutative monoid up to rounding.

A partial is what a query block knows after seeing some keys: `out`, normalised over those keys,
and `lse`, the natural logarithm of their sum of exponentials. The identity is (0, -inf): no key
seen. State is float32 at least (float64 for float64 inputs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ringlab.errors import ShapeError


@dataclass(frozen=True)
class Partial:
    """Attention over some of the keys: out (B, H, L, D), normalised, and its lse (B, H, L)."""

    out: Tensor
    lse: Tensor

    def __post_init__(self) -> None:
        if self.out.shape[:-1] != self.lse.shape:
            raise ShapeError(f"lse of shape {tuple(self.out.shape[:-1])}", f"{tuple(self.lse.shape)}")

    @classmethod
    def identity(cls, q: Tensor) -> Partial:
        """Return (0, -inf) for the rows of `q`, in the state dtype."""
        dtype = state_dtype(q.dtype)
        out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        return cls(out, torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device))


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulators for inputs of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(a: Partial, b: Partial) -> Partial:
    """Return the partial over the keys of both: L = logaddexp(La, Lb), out = oa·e^(La−L) + ob·e^(Lb−L).

    The weights add up to one, so out is computed as oa + e^(Lb−L)·(ob − oa), which leaves oa
    bitwise alone where b has seen no key.
    """
    lse = torch.logaddexp(a.lse, b.lse)
    return Partial(torch.lerp(a.out, b.out.to(a.out.dtype), _weight(b.lse, lse)), lse)


def merge_into(state: Partial, rows: slice, part: Partial) -> None:
    """Merge `part` into the `rows` of `state`, in place."""
    lse = state.lse[..., rows]
    total = torch.logaddexp(lse, part.lse)
    state.out[..., rows, :].lerp_(part.out.to(state.out.dtype), _weight(part.lse, total))
    lse.copy_(total)


def _weight(lse: Tensor, total: Tensor) -> Tensor:
    """e^(lse − total), and 0 where lse is −inf: there −inf − (−inf) would be NaN."""
    return torch.exp(lse - total).masked_fill_(lse == -math.inf, 0.0).unsqueeze(-1)
