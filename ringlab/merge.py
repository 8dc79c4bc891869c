"""Partial attention results and their merge, a commutative monoid up to rounding.

Block backends return partials, and the schedules merge them into a running partial. A partial is attention
over some of the keys: `out`, normalised over those keys, and `lse`, the natural logarithm of the sum of
exp(score) over them. The identity, before any key is seen, is (0, −inf). Partials are float32 at least, and
float64 for float64 inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.errors import ShapeError
from ringlab.types import Sinks


@dataclass(frozen=True)
class Partial:
    """Attention over some of the keys: out (B, H, L, Dv), normalised, and its lse (B, H, L).

    Raises: ShapeError unless lse has the shape of out without the head dim.

    >>> import torch
    >>> from ringlab.blocks import get_block
    >>> from ringlab.merge import merge
    >>> q, k, v = torch.ones(3, 1, 2, 8, 4).unbind()  # 8 queries and 8 keys of 2 heads
    >>> block = get_block("naive", q)
    >>> one = block.forward(q, k[..., :3, :], v[..., :3, :], causal=False, scale=0.5)
    >>> other = block.forward(q, k[..., 3:, :], v[..., 3:, :], causal=False, scale=0.5)
    >>> whole = block.forward(q, k, v, causal=False, scale=0.5)
    >>> torch.allclose(merge(one, other).lse, whole.lse)
    True
    """

    out: Tensor
    lse: Tensor

    def __post_init__(self) -> None:
        if self.out.shape[:-1] != self.lse.shape:
            raise ShapeError(f"lse of shape {tuple(self.out.shape[:-1])}", f"{tuple(self.lse.shape)}")

    @classmethod
    def identity(cls, q: Float[Tensor, "*rows D"], value_dim: int | None = None) -> Partial:
        """Return (0, −inf) for the rows of `q`, in the state dtype.

        value_dim: v's head dim, by default q's head dim.
        """
        dtype, Dv = state_dtype(q.dtype), q.shape[-1] if value_dim is None else value_dim
        out = torch.zeros((*q.shape[:-1], Dv), dtype=dtype, device=q.device)
        return cls(out, torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device))


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulators for inputs of `dtype`: float64 for float64, and otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(a: Partial, b: Partial) -> Partial:
    """Return the partial over the keys of a and b: L = logaddexp(La, Lb), out = oa·e^(La−L) + ob·e^(Lb−L).

    In rows where one partial has seen no key, the result is the out of the other partial, bit for bit.
    """
    weight_a, weight_b = _weights(a.lse, b.lse)
    out = torch.addcmul(a.out * weight_a, b.out.to(a.out.dtype), weight_b)
    return Partial(out, torch.logaddexp(a.lse, b.lse))


def merge_into(state: Partial, rows: slice, part: Partial) -> None:
    """Merge `part` into the `rows` of `state`, in place. The caller must own the memory of `state`."""
    out, lse = state.out[..., rows, :], state.lse[..., rows]
    weight, weight_part = _weights(lse, part.lse)
    out.mul_(weight).addcmul_(part.out.to(out.dtype), weight_part)
    lse.copy_(torch.logaddexp(lse, part.lse))


def sink_partial(sinks: Sinks, like: Partial) -> Partial:
    """Return the partial of the sinks: one more key for each row of `like`, with a logit but no value.

    Merge the partial once, after all keys. Each weight of a row is then multiplied by e^lse / (e^lse +
    e^sink).
    Source: arXiv 2508.10925.

    >>> rows = Partial(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3))  # Σ e^score is 1 in each row
    >>> merge(rows, sink_partial(torch.zeros(2), rows)).out.unique()
    tensor([0.5000])
    """
    lse = sinks.to(like.lse.dtype)[:, None].expand_as(like.lse)
    return Partial(like.out.new_zeros(()).expand_as(like.out), lse)


def with_sinks(whole: Partial, sinks: Sinks | None) -> Partial:
    """Return a partial over all keys, merged with the sinks of its heads if there are any."""
    return whole if sinks is None else merge(whole, sink_partial(sinks, whole))


def _weights(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights e^(a − L) and e^(b − L), computed from b − a. They are 1 and 0 where b is −inf.

    The weights are not computed from L, because a large L is rounded and the weights would not add up to 1. Neither
    weight is computed as 1 minus the other, because a small weight would lose its digits.
    """
    gap = (b - a).masked_fill(b == -math.inf, -math.inf).unsqueeze(-1)
    return torch.sigmoid(-gap), torch.sigmoid(gap)
