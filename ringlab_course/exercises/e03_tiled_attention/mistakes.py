"""Common mistakes in the tiled forward and backward: each function answers as a learner who makes the mistake.

Each is a walk over the tiles with one small fault. Arguments are those of exercise 03; inputs are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor


def cuts(S: int, tile: int) -> list[slice]:
    """Return the tiles of S tokens as slices, the last one shorter when `tile` does not divide S."""
    return [slice(start, min(start + tile, S)) for start in range(0, S, tile)]


def masked(scores: Tensor, row: int, key: int, causal: bool) -> Tensor:
    """Return the scores with −inf where the key's global position is after the query's."""
    if not causal:
        return scores
    queries = torch.arange(row, row + scores.shape[-2]).unsqueeze(-1)
    keys = torch.arange(key, key + scores.shape[-1])
    return scores.masked_fill(keys > queries, -math.inf)


def masked_locally(scores: Tensor, row: int, key: int, causal: bool) -> Tensor:
    """The mistake: positions are counted inside the tile."""
    return masked(scores, 0, 0, causal)


def unmasked_diagonal(scores: Tensor, row: int, key: int, causal: bool) -> Tensor:
    """The mistake: tiles above the diagonal are skipped, those on it are left whole."""
    return scores


def visited_tiles(S: int, tile: int, causal: bool) -> Iterator[tuple[slice, list[slice]]]:
    """Yield every query tile with the key tiles that it visits."""
    for rows in cuts(S, tile):
        yield rows, [keys for keys in cuts(S, tile) if not causal or keys.start < rows.stop]


def tile_scores(
    q: Tensor, k: Tensor, rows: slice, keys: slice, causal: bool, scale: float, mask: Callable
) -> Tensor:
    """Return the scores of one tile, masked."""
    return mask(scale * (q[..., rows, :] @ k[..., keys, :].mT), rows.start, keys.start, causal)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    tile: int,
    mask: Callable[..., Tensor] = masked,
    rescale: bool = True,
    rescale_acc: bool = True,
    subtract: bool = True,
    above: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) by a running maximum m, sum l and accumulator acc; faults by keyword."""
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for rows, visited in visited_tiles(q.shape[-2], tile, causal and not above):
        m, total, acc = torch.full_like(lse[..., rows], -math.inf), 0.0, 0.0
        for keys in visited:
            masks = causal and (not above or keys == rows)
            scores = tile_scores(q, k, rows, keys, masks, scale, mask)
            top = torch.maximum(m, scores.amax(-1)) if subtract else torch.zeros_like(m)
            powers = torch.exp(scores - top.unsqueeze(-1))
            old = torch.exp(m - top) if rescale and subtract else torch.ones_like(m)
            total = total * old + powers.sum(-1)
            acc = (acc * old.unsqueeze(-1) if rescale_acc else acc) + powers @ v[..., keys, :]
            m = top
        out[..., rows, :], lse[..., rows] = acc / total.unsqueeze(-1), m + torch.log(total)
    return out, lse


def averages(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, tile: int
) -> tuple[Tensor, Tensor]:
    """Every tile normalised by itself, the results averaged; lse is right."""
    out, lse = torch.zeros_like(q), forward(q, k, v, causal=causal, scale=scale, tile=tile)[1]
    for rows, visited in visited_tiles(q.shape[-2], tile, causal):
        parts = [
            torch.softmax(tile_scores(q, k, rows, keys, causal, scale, masked), -1) @ v[..., keys, :]
            for keys in visited
        ]
        out[..., rows, :] = sum(parts) / len(parts)
    return out, lse


def no_rescale(q: Tensor, k: Tensor, v: Tensor, **how: bool | float) -> tuple[Tensor, Tensor]:
    """The maximum grows, what was accumulated under the old one stays."""
    return forward(q, k, v, rescale=False, **how)


def acc_not_rescaled(q: Tensor, k: Tensor, v: Tensor, **how: bool | float) -> tuple[Tensor, Tensor]:
    """The sum follows the growing maximum, the accumulator does not."""
    return forward(q, k, v, rescale_acc=False, **how)


def out_not_rescaled(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, tile: int
) -> tuple[Tensor, Tensor]:
    """Every tile adds e^(score − lse so far) v to out, and out does not follow the growing lse."""
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for rows, visited in visited_tiles(q.shape[-2], tile, causal):
        for keys in visited:
            scores = tile_scores(q, k, rows, keys, causal, scale, masked)
            lse[..., rows] = torch.logaddexp(lse[..., rows], scores.logsumexp(-1))
            out[..., rows, :] += torch.exp(scores - lse[..., rows].unsqueeze(-1)) @ v[..., keys, :]
    return out, lse


def no_maximum(q: Tensor, k: Tensor, v: Tensor, **how: bool | float) -> tuple[Tensor, Tensor]:
    """e^score without subtracting a maximum."""
    return forward(q, k, v, subtract=False, **how)


def forward_local_mask(q: Tensor, k: Tensor, v: Tensor, **how: bool | float) -> tuple[Tensor, Tensor]:
    """The causal mask in the tile's own indices, in every tile that is visited."""
    return forward(q, k, v, mask=masked_locally, **how)


def forward_open_diagonal(q: Tensor, k: Tensor, v: Tensor, **how: bool | float) -> tuple[Tensor, Tensor]:
    """Tiles above the diagonal skipped, no mask on the diagonal."""
    return forward(q, k, v, mask=unmasked_diagonal, **how)


def forward_above_the_diagonal(q: Tensor, k: Tensor, v: Tensor, **how: bool | float) -> tuple[Tensor, Tensor]:
    """Tiles above the diagonal are visited, and not masked."""
    return forward(q, k, v, above=True, **how)


def forward_no_tail(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, tile: int
) -> tuple[Tensor, Tensor]:
    """S // tile tiles: the last S % tile tokens are neither queries nor keys."""
    S = q.shape[-2] // tile * tile
    out, lse = torch.zeros_like(q), torch.zeros_like(q[..., 0])
    head = (x[..., :S, :] for x in (q, k, v))
    out[..., :S, :], lse[..., :S] = forward(*head, causal=causal, scale=scale, tile=tile)
    return out, lse


def own_scale(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, tile: int
) -> tuple[Tensor, Tensor]:
    """D^−½ whatever `scale` says."""
    return forward(q, k, v, causal=causal, scale=q.shape[-1] ** -0.5, tile=tile)


def no_scale(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, tile: int
) -> tuple[Tensor, Tensor]:
    """Scores are q·k, without the scale."""
    return forward(q, k, v, causal=causal, scale=1.0, tile=tile)


def forward_first_head(q: Tensor, k: Tensor, v: Tensor, **how: bool | float) -> tuple[Tensor, Tensor]:
    """Every head gets the result of head 0."""
    out, lse = forward(q, k, v, **how)
    return out[:, :1].expand(q.shape), lse[:, :1].expand(lse.shape)


def lse_is_maximum(q: Tensor, k: Tensor, v: Tensor, **how: bool | float) -> tuple[Tensor, Tensor]:
    """The running maximum is returned as lse, without + ln l."""
    out, _ = forward(q, k, v, **how)
    return out, _whole_scores(q, k, **how).amax(-1)


def lse_is_sum(q: Tensor, k: Tensor, v: Tensor, **how: bool | float) -> tuple[Tensor, Tensor]:
    """The running sum l is returned as lse, without ln and without the maximum."""
    out, lse = forward(q, k, v, **how)
    return out, torch.exp(lse - _whole_scores(q, k, **how).amax(-1))


def _whole_scores(q: Tensor, k: Tensor, *, causal: bool, scale: float, tile: int) -> Tensor:
    return masked(scale * (q @ k.mT), 0, 0, causal)


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
