"""Blocks for which smaller tensors travel, such as a latent in MLA. K and V are made from them on arrival.

K of head h is [latent·W_Kᵀ of h, k_rope], and V is latent·W_Vᵀ. They are computed again in backward. Their
gradients become gradients of the latent and of k_rope, which return to the owner, and gradients of the
weights, which stay and are summed over the blocks.
Source: arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ringlab.blocks.protocol import Gradient
from ringlab.merge import state_dtype
from ringlab.types import BlockTensor, KeyValue, Value

Latent = Float[Tensor, "B 1 Lk R"]
Rope = Float[Tensor, "B 1 Lk Dr"]
UpKeys = Float[Tensor, "H Dn R"]
UpValues = Float[Tensor, "H Dv R"]


class Expansion(Protocol):
    """Makes the K and V of a block from the two tensors that travel in their place."""

    def expand(self, one: BlockTensor, other: BlockTensor) -> tuple[KeyValue, Value]:
        """Return K and V of the block."""
        ...

    def contract(self, one: BlockTensor, other: BlockTensor, gradients: list[Gradient]) -> list[Gradient]:
        """Return the gradients of the two tensors, given those of K and V. Add up those of the weights."""
        ...

    def with_weights(self, *weights: Shaped[Tensor, "..."]) -> Expansion:
        """Return the same expansion with these tensors as its weights."""
        ...

    def begin_backward(self) -> Expansion:
        """Return the same expansion with new sums for the gradients of the weights."""
        ...

    def weight_gradients(self) -> tuple[Tensor, ...]:
        """Return the gradients of the weights over all blocks so far."""
        ...


class LatentExpansion:
    """The `Expansion` of a latent (B, 1, L, R) and the rotated keys (B, 1, L, Dr), which all heads share."""

    def __init__(self, w_k: UpKeys, w_v: UpValues, rope: int) -> None:
        self.w_k, self.w_v, self.rope = w_k, w_v, rope
        self.sums: tuple[UpKeys, UpValues] | None = None

    def expand(self, one: Latent, other: Rope) -> tuple[KeyValue, Value]:
        """Return K (B, H, L, Dn + Dr) and V (B, H, L, Dv)."""
        rotated = other.expand(-1, len(self.w_k), -1, -1)
        return torch.cat((one @ self.w_k.mT, rotated), dim=-1), one @ self.w_v.mT

    def contract(self, one: Latent, other: Rope, gradients: list[Gradient]) -> list[Gradient]:
        """Return the gradients of the latent and of the rotated keys, in the state dtype."""
        return [self._contract(one, gradient) for gradient in gradients]

    def _contract(self, latent: Latent, gradient: Gradient) -> Gradient:
        dw_k, dw_v = self.weight_gradients()
        dtype, Dn = dw_k.dtype, self.w_k.shape[1]
        keys = latent.narrow(-2, gradient.keys.start, gradient.dk.shape[-2]).to(dtype)
        of_heads, dv = gradient.dk[..., :Dn].to(dtype), gradient.dv.to(dtype)
        dw_k += (of_heads.mT @ keys).sum(dim=0)
        dw_v += (dv.mT @ keys).sum(dim=0)
        of_latent = _over_heads(of_heads, self.w_k) + _over_heads(dv, self.w_v)
        return Gradient(gradient.keys, of_latent, gradient.dk[..., Dn:].to(dtype).sum(dim=1, keepdim=True))

    def with_weights(self, *weights: Float[Tensor, "H _ R"]) -> LatentExpansion:
        """Return the same expansion with other tensors (w_k, w_v) of the same values."""
        w_k, w_v = weights
        return LatentExpansion(w_k, w_v, self.rope)

    def begin_backward(self) -> LatentExpansion:
        """Return the same expansion with zero sums."""
        begun = LatentExpansion(self.w_k, self.w_v, self.rope)
        dtype = state_dtype(self.w_k.dtype)
        begun.sums = torch.zeros_like(self.w_k, dtype=dtype), torch.zeros_like(self.w_v, dtype=dtype)
        return begun

    def weight_gradients(self) -> tuple[UpKeys, UpValues]:
        """Return the gradients of W_K and W_V over the blocks so far, in the state dtype."""
        assert self.sums is not None  # set by `begin_backward`
        return self.sums


def _over_heads(gradient: Float[Tensor, "B H L D"], weight: Float[Tensor, "H D R"]) -> Latent:
    """Return the sum over heads of gradient·weight, computed as one product."""
    rows = gradient.transpose(1, 2).flatten(2)
    return (rows @ weight.to(rows.dtype).flatten(0, 1)).unsqueeze(1)
