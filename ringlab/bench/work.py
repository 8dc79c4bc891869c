"""The work that the CPU benchmarks share: causal attention, forward or with backward."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ringlab.attention import ring_attention
from ringlab.comm.ring import Ring
from ringlab.layout import zigzag


@dataclass(frozen=True)
class Work:
    """Sizes: B batch, H heads, S tokens, D head dim; float32, causal."""

    B: int = 1
    H: int = 8
    S: int = 8192
    D: int = 64

    def as_dict(self) -> dict[str, object]:
        """Return the sizes and what is computed, ready for JSON."""
        return {**asdict(self), "dtype": "float32", "causal": True, "layout": "zigzag", "block": "native"}

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and the gradient of out: whole sequences, fresh random numbers."""
        random = torch.Generator().manual_seed(seed)
        shape = (self.B, self.H, self.S, self.D)
        q, k, v, dout = (torch.randn(shape, generator=random) for _ in range(4))
        return q, k, v, dout


def sdpa(tensors: tuple[Tensor, ...], gradients: bool) -> None:
    """torch's own attention, the whole problem in one call."""
    q, k, v, dout = tensors
    if not gradients:
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.autograd.grad(out, (q, k, v), dout)


def shards(ring_rank: int, P: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return this rank's part of each tensor under the zig-zag layout."""
    layout = zigzag(tensors[0].shape[-2], P)
    return tuple(layout.shard(x, ring_rank) for x in tensors)


def ring_program(ring: Ring, S: int, shards: tuple[Tensor, ...], gradients: bool) -> None:
    """The same work on one rank of a ring, from shards that lie ready."""
    q, k, v, dout = shards
    layout = zigzag(S, ring.world_size)
    if not gradients:
        with torch.no_grad():
            ring_attention(q, k, v, ring=ring, layout=layout, block="native")
        return
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = ring_attention(q, k, v, ring=ring, layout=layout, block="native")
    torch.autograd.grad(out, (q, k, v), dout)
