"""The plainest block: the whole tile of scores at once, in float32 or float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringlab.merge import Partial, state_dtype
from ringlab.scores import TileScores
from ringlab.types import KeyValue, Query, RowState


class Naive:
    """Materialises the Lq×Lk scores: the reference among the blocks, for small tiles."""

    name = "naive"
    largest_causal: int | None = None
    thread_safe = True
    offers = frozenset({"softcap", "dropout"})

    def supports(self, q: Query) -> str | None:
        return unsupported_dtype(q)

    def forward(
        self,
        q: Query,
        k: KeyValue,
        v: KeyValue,
        *,
        causal: bool,
        scale: float,
        how: TileScores | None = None,
    ) -> Partial:
        q, k, v = _grouped(q, k, v)
        scores = _hidden(_scores(q, k, scale, how), causal)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
        weights = _times(weights, _factors(how, q))
        return Partial(_weighted_sum(weights, v, causal).flatten(1, 2), lse.flatten(1, 2))

    def backward(
        self,
        dout: Query,
        q: Query,
        k: KeyValue,
        v: KeyValue,
        out: Query,
        lse: RowState,
        delta: RowState,
        *,
        causal: bool,
        scale: float,
        how: TileScores | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups, dtype = k.shape[1], state_dtype(q.dtype)
        q, k, v = _grouped(q, k, v)
        dout, lse, delta = (x.to(dtype).unflatten(1, (groups, -1)) for x in (dout, lse, delta))
        # A row that sees no key has lse −inf; +inf in its place makes all its weights 0.
        lse = lse.masked_fill(lse == -math.inf, math.inf)
        scores = _scores(q, k, scale, how)
        slope, factors = how.slope(scores) if how else None, _factors(how, q)
        weights = torch.exp(_hidden(scores, causal) - lse.unsqueeze(-1))
        del scores  # a tile's worth of memory
        dscores = weights * (_times(dout @ v.mT, factors) - delta.unsqueeze(-1))
        dscores = _times(dscores, slope)
        dq = scale * (dscores @ k)
        dk = scale * (dscores.mT @ q).sum(dim=2)
        dv = (_times(weights, factors).mT @ dout).sum(dim=2)
        return dq.flatten(1, 2), dk, dv


def unsupported_dtype(q: Tensor) -> str | None:
    """Return why a block on the CPU cannot compute in the dtype of `q`, None if it can."""
    known = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return None if q.dtype in known else f"needs float64, float32, bfloat16 or float16, got {q.dtype}"


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q as (B, K, H/K, L, D), k and v as (B, K, 1, L, D), in the state dtype."""
    dtype = state_dtype(q.dtype)
    q = q.to(dtype).unflatten(1, (k.shape[1], -1))
    return q, k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)


def _scores(q: Tensor, k: Tensor, scale: float, how: TileScores | None) -> Tensor:
    scores = scale * (q @ k.mT)
    return how.capped(scores) if how else scores


def _factors(how: TileScores | None, q: Tensor) -> Tensor | None:
    """What weights of grouped heads are multiplied by, if by anything."""
    factors = how.factors(q.shape[0], q.shape[1] * q.shape[2], q) if how else None
    return None if factors is None else factors.unflatten(1, q.shape[1:3])


def _times(x: Tensor, factors: Tensor | None) -> Tensor:
    return x if factors is None else x * factors


def _hidden(scores: Tensor, causal: bool) -> Tensor:
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill_(hidden, -math.inf)
    return scores


def _weighted_sum(weights: Tensor, v: Tensor, causal: bool) -> Tensor:
    out = weights @ v
    if not causal or v.numel() == 0 or torch.isfinite(out.sum()):
        return out
    # A hidden key has weight 0, and 0·NaN = NaN: let a non-finite value reach those rows that see it.
    finite = torch.isfinite(v)
    spread = v.masked_fill(finite, 0.0).cumsum(dim=-2)
    last = torch.arange(weights.shape[-2], device=v.device).clamp(max=v.shape[-2] - 1)
    return weights @ v.masked_fill(~finite, 0.0) + spread[..., last, :]
