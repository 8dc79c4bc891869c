"""Common mistakes in the tiled backward, made on purpose: each function answers as a learner who makes it.

A walk over the tiles of the forward, and one small fault for each mistake. Arguments as in exercise
03; all of this is for small inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ringlab_course.exercises.e03_tiled_attention.mistakes import (
    masked,
    masked_locally,
    tile_scores,
    unmasked_diagonal,
    visited_tiles,
)

Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    tile: int,
    mask: Callable[..., Tensor] = masked,
    tile_lse: bool = False,
    tile_delta: bool = False,
    delta_weight: float = 1.0,
    dk_scale: float | None = None,
    delta_of_values: bool = False,
    assign: str = "",
    above: bool = False,
) -> Gradients:
    """Return (dq, dk, dv) from lse and delta; faults by keyword.

    `assign` names gradients that are set, not added to, in every tile; `above` visits the tiles above the
    diagonal as well, and masks only the one on it.
    """
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    delta = (dout * (v if delta_of_values else out)).sum(-1, keepdim=True)
    for rows, visited in visited_tiles(q.shape[-2], tile, causal and not above):
        for keys in visited:
            scores = tile_scores(q, k, rows, keys, causal and (not above or keys == rows), scale, mask)
            total = scores.logsumexp(-1, keepdim=True) if tile_lse else lse[..., rows].unsqueeze(-1)
            weights = torch.exp(scores - total)
            dweights = dout[..., rows, :] @ v[..., keys, :].mT
            used = (weights * dweights).sum(-1, keepdim=True) if tile_delta else delta[..., rows, :]
            dscores = weights * (dweights - delta_weight * used)
            for name, gradient, place in (("q", dq, rows), ("k", dk, keys), ("v", dv, keys)):
                if name in assign:
                    gradient[..., place, :] = 0.0
            dq[..., rows, :] += scale * (dscores @ k[..., keys, :])
            dk[..., keys, :] += (scale if dk_scale is None else dk_scale) * (dscores.mT @ q[..., rows, :])
            dv[..., keys, :] += weights.mT @ dout[..., rows, :]
    return dq, dk, dv


def tile_delta(*tensors: Tensor, **how: bool | float) -> Gradients:
    """delta summed over the keys of the tile alone."""
    return backward(*tensors, tile_delta=True, **how)


def tile_lse(*tensors: Tensor, **how: bool | float) -> Gradients:
    """The softmax of the tile alone, instead of exp(scores − final lse)."""
    return backward(*tensors, tile_lse=True, **how)


def no_delta(*tensors: Tensor, **how: bool | float) -> Gradients:
    """dS = P · dP."""
    return backward(*tensors, delta_weight=0.0, **how)


def unscaled_dk(*tensors: Tensor, **how: bool | float) -> Gradients:
    """dK = dSᵀ Q."""
    return backward(*tensors, dk_scale=1.0, **how)


def unscaled(*tensors: Tensor, scale: float, **how: bool | float) -> Gradients:
    """dQ = dS K and dK = dSᵀ Q."""
    dq, dk, dv = backward(*tensors, scale=scale, **how)
    return dq / scale, dk / scale, dv


def overwrites(*tensors: Tensor, **how: bool | float) -> Gradients:
    """dK and dV of a key tile keep the last query tile only."""
    return backward(*tensors, assign="kv", **how)


def overwrites_dq(*tensors: Tensor, **how: bool | float) -> Gradients:
    """dQ of a query tile keeps the last key tile only."""
    return backward(*tensors, assign="q", **how)


def overwrites_all(*tensors: Tensor, **how: bool | float) -> Gradients:
    """All three gradients keep the last tile only."""
    return backward(*tensors, assign="qkv", **how)


def plus_delta(*tensors: Tensor, **how: bool | float) -> Gradients:
    """dS = P · (dP + delta)."""
    return backward(*tensors, delta_weight=-1.0, **how)


def delta_of_values(*tensors: Tensor, **how: bool | float) -> Gradients:
    """delta = rowsum(dO ∘ V)."""
    return backward(*tensors, delta_of_values=True, **how)


def above_the_diagonal(*tensors: Tensor, **how: bool | float) -> Gradients:
    """Tiles above the diagonal are visited, and not masked."""
    return backward(*tensors, above=True, **how)


def backward_first_head(*tensors: Tensor, **how: bool | float) -> Gradients:
    """Every head gets the gradients of head 0."""
    dq, dk, dv = (x[:, :1].expand(x.shape) for x in backward(*tensors, **how))
    return dq, dk, dv


def backward_local_mask(*tensors: Tensor, **how: bool | float) -> Gradients:
    """The causal mask in the tile's own indices, in every tile that is visited."""
    return backward(*tensors, mask=masked_locally, **how)


def backward_open_diagonal(*tensors: Tensor, **how: bool | float) -> Gradients:
    """P is computed again without the mask of the diagonal tile."""
    return backward(*tensors, mask=unmasked_diagonal, **how)


def backward_no_tail(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    tile: int,
) -> Gradients:
    """S // tile tiles: the last S % tile tokens get and give no gradient."""
    S = q.shape[-2] // tile * tile
    head = (x[..., :S, :] for x in (dout, q, k, v, out))
    parts = backward(*head, lse[..., :S], causal=causal, scale=scale, tile=tile)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for full, part in zip((dq, dk, dv), parts, strict=True):
        full[..., :S, :] = part
    return dq, dk, dv
