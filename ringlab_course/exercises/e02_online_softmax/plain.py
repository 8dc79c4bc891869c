"""Exercise 02: the plain implementation of streaming whose errors determine the tolerances."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
State = tuple[Tensor, Tensor, Tensor]


def update(maximum: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor) -> State:
    """Return the state (m, Σ e^(s − m), Σ e^(s − m) v) after one more block of keys."""
    new = torch.maximum(maximum, scores.amax(-1))
    anchor = torch.where(new == -math.inf, 0.0, new)
    factor, powers = torch.exp(maximum - anchor), torch.exp(scores - anchor[:, None])
    return new, total * factor + powers.sum(-1), acc * factor[:, None] + powers @ values


def stream(q: Tensor, k: Tensor, v: Tensor, block: int, dtype: torch.dtype = torch.float32) -> Pair:
    """Return (out, lse), computed with `update` over blocks of keys, with everything in `dtype`."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    state = (
        torch.full(q.shape[:1], -math.inf, dtype=dtype),
        torch.zeros(q.shape[:1], dtype=dtype),
        torch.zeros_like(q),
    )
    for start in range(0, len(k), block):
        keys = slice(start, start + block)
        state = update(*state, q @ k[keys].T * q.shape[-1] ** -0.5, v[keys])
    maximum, total, acc = state
    return acc / total[:, None], maximum + total.log()
