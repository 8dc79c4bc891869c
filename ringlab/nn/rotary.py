"""Rotary position embedding. Ranks hold scattered tokens, so it asks for positions and never counts them itself."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ringlab.merge import state_dtype


def rotation(
    positions: Int[Tensor, " L"], D: int, base: float = 10_000.0
) -> tuple[Float[Tensor, "L half"], Float[Tensor, "L half"]]:
    """Return cos and sin of position · base^(−2i/D) for i < D/2, float64: positions of millions keep their angles.

    Source: arXiv 2104.09864, equation 15.
    """
    frequencies = base ** (-torch.arange(0, D, 2, dtype=torch.float64, device=positions.device) / D)
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(
    x: Float[Tensor, "B heads L D"], turn: tuple[Float[Tensor, "L half"], Float[Tensor, "L half"]]
) -> Float[Tensor, "B heads L D"]:
    """Return `x` with the pair (x[i], x[i + D/2]) of every token turned by its angle i, in x's dtype."""
    cos, sin = (part.to(x.device, state_dtype(x.dtype)) for part in turn)
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
