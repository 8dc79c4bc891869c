"""Wrong attentions whose errors depend on all inputs and settings, so another input shows another error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringlab import plain_ring, ring_attention
from ringlab.comm.ring import Ring
from ringlab.conformance.mutants import MUTANTS
from ringlab.conformance.target.claims import Target

_through_lse = MUTANTS["gradient_of_lse_added"].module().attend


class _ScaledBack(torch.autograd.Function):
    """The identity, whose gradient is halved unless `right`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, right: bool) -> Tensor:
        ctx.right = right
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient if ctx.right else gradient / 2), None


def half_of_dk(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: list[Tensor]) -> Any:
    """Run the plain ring with a wrong dk on all ranks but the last."""
    k = _ScaledBack.apply(k, ring.rank == ring.world_size - 1)
    return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)


class _SentBack(torch.autograd.Function):
    """The identity, whose gradient goes to the next rank, as if backward left out its last hop."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.ring.shift(gradient.contiguous()), None


def keeps_gradients_of_the_rank_before(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: list[Tensor]
) -> Any:
    """Run the plain ring, but give each rank the dk of the rank before it."""
    k = _SentBack.apply(k, ring) if ring.world_size > 1 else k
    return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)


class _Swapped(torch.autograd.Function):
    """The identity of two tensors, each of which gets the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), y.clone()

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, of_y: Tensor) -> tuple[Tensor, Tensor]:
        return of_y, of_x


def returns_dv_as_dk(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: list[Tensor]
) -> Any:
    """Run the plain ring, but exchange dk and dv."""
    k, v = _Swapped.apply(k, v)
    return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)


def values_with_keys(
    q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, layout: Any, causal: bool, mask: Any = None,
    scale: float | None = None, softcap: float | None = None, return_lse: bool = True,
) -> Any:  # fmt: skip
    """Run ringlab's ring with a tenth of the keys added to the values."""
    masked: dict[str, Any] = {"causal": causal} if mask is None else {"mask": mask}
    return ring_attention(
        q,
        k,
        v + 0.1 * k,
        ring=ring,
        layout=layout,
        scale=scale,
        softcap=softcap,
        return_lse=return_lse,
        **masked,
    )


def _turned(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def tokens_first(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: list[Tensor]
) -> Any:
    """Run a wrong ring whose inputs and output are (B, L, H, D) and whose lse is (B, L, H)."""
    out, lse = plain_ring.attend(
        ring, _turned(q), _turned(k), _turned(v + 0.1 * k), causal=causal, positions=positions
    )
    return _turned(out), _turned(lse)


def no_batch(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: list[Tensor]) -> Any:
    """Run a wrong ring whose inputs and output are (L, H, D)."""
    out, lse = tokens_first(ring, q[None], k[None], v[None], causal=causal, positions=positions)
    return out[0], lse[0]


def tokens_before_batch(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: list[Tensor]
) -> Any:
    """Run a wrong ring whose inputs and output are (L, B, H, D)."""
    out, lse = tokens_first(ring, *(x.transpose(0, 1) for x in (q, k, v)), causal=causal, positions=positions)
    return out.transpose(0, 1), lse


def packed(ring: Ring, qkv: Tensor, *, causal: bool, positions: list[Tensor]) -> Any:
    """Run a wrong ring whose one input is (B, 3, H, L, D)."""
    q, k, v = qkv.unbind(1)
    return plain_ring.attend(ring, q, k, v + 0.1 * k, causal=causal, positions=positions)


def _own_gradients(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *, causal: bool, positions: list[Tensor]
) -> Any:  # fmt: skip
    call = plain_ring.Call(ring, positions, causal, q.shape[-1] ** -0.5)
    dq, dk, dv = plain_ring.backward(call, q, k, v, out, lse, dout)
    return dq, dk + 0.1 * dv, dv


def documents(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: Any, segment_ids: Any = None
) -> Any:
    """Run the plain ring and ignore the boundaries of documents."""
    return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)


tokens_first_target = Target(tokens_first, axes="BLHD")
no_batch_target = Target(no_batch, axes="LHD")
tokens_before_batch_target = Target(tokens_before_batch, axes="LBHD")
own_gradients = Target(plain_ring.attend, gradients=_own_gradients)
with_options = Target(
    lambda q, k, v, *, ring, layout, causal, factor: values_with_keys(
        q, k, v * factor, ring=ring, layout=layout, causal=causal
    ),
    options={"factor": 0.5},
)
loss_on_lse = Target(_through_lse)


def own_loss(ring: Ring, tokens: Tensor) -> float:
    return 1.0 + ring.rank
