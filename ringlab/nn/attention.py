"""`ContextParallelAttention`: an ordinary attention layer whose tokens may be spread over a ring.

A rank's tokens are scattered over the sequence, so rotary position embedding takes the positions as an
argument.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ringlab.errors import ShapeError
from ringlab.merge import state_dtype
from ringlab.nn.context import Context
from ringlab.types import KeyValue, Out, Query, Sinks, Value
from ringlab.upload import upload


def rotation(
    positions: Int[Tensor, " L"], D: int, base: float = 10_000.0
) -> tuple[Float[Tensor, "L half"], Float[Tensor, "L half"]]:
    """Return cos and sin of position · base^(−2i/D) for i < D/2.

    They are in float64, so that large positions stay exact.

    Source: arXiv 2104.09864, equation 15.
    """
    frequencies = base ** (-torch.arange(0, D, 2, dtype=torch.float64, device=positions.device) / D)
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(
    x: Float[Tensor, "B heads L D"], turn: tuple[Float[Tensor, "L half"], Float[Tensor, "L half"]]
) -> Float[Tensor, "B heads L D"]:
    """Return `x` with the pair (x[i], x[i + D/2]) of every token rotated by its angle i, in x's dtype."""
    cos, sin = (part.to(x.device, state_dtype(x.dtype)) for part in turn)
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class ContextParallelAttention(nn.Module):
    """Causal attention with grouped heads and rotary positions.

    Without a context it is an ordinary layer over a whole sequence, computed by torch's own attention. With a
    context, `x` is this rank's shard, and only the source of the positions and the computation of
    softmax(QKᵀ)V differ. Under tensor parallelism the projections return only this rank's heads, and the
    layer computes with these heads.

    value_dim: the head dim of v, if it differs from the head dim of q and k.
    sinks: whether each query head has a learned logit, `sinks` (H,), that takes weight but contributes no
    value. Over a ring the sinks count once, and their gradient is summed over the ranks like all other
    gradients. Tensor parallelism does not split them, so `ring_attention` raises an error on a rank that has
    only some of the heads.

    Raises: ShapeError if K/V heads do not divide the query heads, or the head dim is odd.

    >>> ContextParallelAttention(width=16, heads=4, kv_heads=2)(torch.zeros(1, 8, 16)).shape
    torch.Size([1, 8, 16])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        value_dim: int | None = None,
        sinks: bool = False,
        qk_norm: bool = False,
        rope_base: float = 10_000.0,
    ) -> None:
        super().__init__()
        kv_heads, D = kv_heads or heads, head_dim or width // heads
        if heads % kv_heads:
            raise ShapeError("query heads divisible by key/value heads", f"{heads} and {kv_heads}")
        if D % 2 or D < 2:
            raise ShapeError(
                "an even head dim, whose numbers are rotated in pairs", f"{D}", "give head_dim= another value"
            )
        self.heads, self.kv_heads, self.head_dim, self.rope_base = heads, kv_heads, D, rope_base
        self.value_dim = value_dim or D
        self.q = nn.Linear(width, heads * D, bias=False)
        self.k = nn.Linear(width, kv_heads * D, bias=False)
        self.v = nn.Linear(width, kv_heads * self.value_dim, bias=False)
        self.out = nn.Linear(heads * self.value_dim, width, bias=False)
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None
        self.q_norm = nn.RMSNorm(D, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(D, eps=1e-6) if qk_norm else nn.Identity()

    def forward(self, x: Float[Tensor, "B L E"], context: Context | None = None) -> Float[Tensor, "B L E"]:
        """Return the layer's output for each token of `x`.

        Raises: ShapeError for a shard of another length; the errors of `ring_attention`.
        """
        if context is not None:
            context.check_tokens(x)
        q, k = (_heads(project(x), self.head_dim) for project in (self.q, self.k))
        v = _heads(self.v(x), self.value_dim)
        positions = torch.arange(x.shape[1], device=x.device) if context is None else context.positions
        turn = rotation(upload(positions, x.device), self.head_dim, self.rope_base)
        q, k = rotate(self.q_norm(q), turn), rotate(self.k_norm(k), turn)
        attend = _attend_alone if context is None else context.attend
        out = attend(q, k, v, self.sinks)
        return self.out(out.transpose(1, 2).flatten(2))


def _heads(x: Float[Tensor, "B L HD"], dim: int) -> Float[Tensor, "B H L D"]:
    return x.unflatten(-1, (-1, dim)).transpose(1, 2)


def _attend_alone(q: Query, k: KeyValue, v: Value, sinks: Sinks | None) -> Out:
    """Return causal attention over a whole sequence, by torch.

    torch's own attention has no sinks. Here a sink is an additional first key, which every row sees and
    whose value is 0. The head dim has one more entry: 1 in the sink, the head's logit in each query, and 0
    in all other keys. An additional first query, whose result is dropped, keeps the mask square.
    """
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    scale = q.shape[-1] ** -0.5
    lowest = torch.finfo(q.dtype).min  # replaces −∞ (a sink without weight), because −∞ · 0 is NaN
    logits = (sinks / scale).clamp(min=lowest).to(q.dtype)[:, None, None].expand(*q.shape[:-1], 1)
    q = F.pad(torch.cat([q, logits], dim=-1), (0, 0, 1, 0))
    sink = F.pad(k.new_zeros(k.shape[-1]), (0, 1), value=1.0).expand(*k.shape[:2], 1, -1)
    k = torch.cat([sink, F.pad(k, (0, 1))], dim=2)
    v = F.pad(v, (0, 0, 1, 0))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[:, :, 1:]
