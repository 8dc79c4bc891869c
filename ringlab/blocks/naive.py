"""The block backend `naive`: the definition of attention in torch, which computes all scores at once."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.blocks.protocol import BackwardRows, Block
from ringlab.handles import Handled
from ringlab.merge import Partial, state_dtype
from ringlab.scores import PLAIN_RULES, TileRules
from ringlab.types import KeyValue, Query, Value


class Naive(Block, Handled):
    """Computes all Lq×Lk scores at once. It is the reference for the other backends, for small tiles."""

    name = "naive"
    largest_causal: int | None = None
    thread_safe = True
    supported_rules = frozenset({"softcap", "dropout"})

    def supports(self, q: Query) -> str | None:
        return unsupported_dtype(q)

    def forward(
        self,
        q: Query,
        k: KeyValue,
        v: Value,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> Partial:
        q, k, v = _grouped(q, k, v)
        scores = _masked(rules.capped(scale * (q @ k.mT)), causal)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
        weights = _times(weights, _dropout_factors(rules, q))
        return Partial(_weighted_sum(weights, v, causal).flatten(1, 2), lse.flatten(1, 2))

    def backward(
        self,
        rows: BackwardRows,
        k: KeyValue,
        v: Value,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> tuple[Query, KeyValue, Value]:
        groups, dtype = k.shape[1], state_dtype(rows.q.dtype)
        q, k, v = _grouped(rows.q, k, v)
        dout, lse, delta = (x.to(dtype).unflatten(1, (groups, -1)) for x in (rows.dout, rows.lse, rows.delta))
        # A row that sees no key has lse −inf. Replacing −inf by +inf makes all weights of the row 0.
        lse = lse.masked_fill(lse == -math.inf, math.inf)
        scores = rules.capped(scale * (q @ k.mT))
        slope, factors = rules.cap_slope(scores), _dropout_factors(rules, q)
        weights = torch.exp(_masked(scores, causal) - lse.unsqueeze(-1))
        del scores  # frees the memory of a tile
        dscores = weights * (_times(dout @ v.mT, factors) - delta.unsqueeze(-1))
        dscores = _times(dscores, slope)
        dq = scale * (dscores @ k)
        dk = scale * (dscores.mT @ q).sum(dim=2)
        dv = (_times(weights, factors).mT @ dout).sum(dim=2)
        return dq.flatten(1, 2), dk, dv


def unsupported_dtype(q: Float[Tensor, "..."]) -> str | None:
    """Return the reason why a block on the CPU cannot compute in the dtype of `q`, or None if it can."""
    known = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return None if q.dtype in known else f"needs float64, float32, bfloat16 or float16, got {q.dtype}"


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q as (B, K, H/K, L, D), k and v as (B, K, 1, L, D), in the state dtype."""
    dtype = state_dtype(q.dtype)
    q = q.to(dtype).unflatten(1, (k.shape[1], -1))
    return q, k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)


def _dropout_factors(rules: TileRules, q: Tensor) -> Tensor | None:
    """Return the dropout factors of the weights of grouped heads, or None without dropout."""
    factors = rules.dropout_factors(q.shape[0], q.shape[1] * q.shape[2], q)
    return None if factors is None else factors.unflatten(1, q.shape[1:3])


def _times(x: Tensor, factors: Tensor | None) -> Tensor:
    return x if factors is None else x * factors


def _masked(scores: Tensor, causal: bool) -> Tensor:
    """Return the scores with −inf where the causal mask hides the key."""
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _weighted_sum(weights: Tensor, v: Tensor, causal: bool) -> Tensor:
    if not causal or v.numel() == 0:
        return weights @ v
    if _read_at_once(v):
        out = weights @ v
        if torch.isfinite(out.sum()):
            return out
    # A hidden key has weight 0, but 0·NaN = NaN. A non-finite value must reach only the rows that see its
    # key.
    finite = torch.isfinite(v)
    spread = v.masked_fill(finite, 0.0).cumsum(dim=-2)
    last = torch.arange(weights.shape[-2], device=v.device).clamp(max=v.shape[-2] - 1)
    return weights @ v.masked_fill(~finite, 0.0) + spread[..., last, :]


def _read_at_once(x: Tensor) -> bool:
    """Return whether Python can read a value of `x` without waiting for a GPU to compute it."""
    return x.device.type == "cpu"
