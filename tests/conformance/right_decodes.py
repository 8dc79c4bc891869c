"""Correct decodes: the partial of one rank's part of a cache, and a decode over torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ringlab.merge import state_dtype

Local: TypeAlias = Callable[[Tensor, Tensor, Tensor, int, Tensor], tuple[Tensor, Tensor]]


def local(q: Tensor, k: Tensor, v: Tensor, total: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the partial (out, lse) of the last of `total` tokens over these keys, in the state's dtype."""
    k, v = (x.to(state_dtype(q.dtype)).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.to(k.dtype) @ k.mT / math.sqrt(q.shape[-1])
    rows = torch.arange(total - q.shape[2], total)
    scores = scores.masked_fill(rows[:, None] < positions, -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]) @ v, lse


def reduced(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], positions: Tensor) -> Tensor:
    """Decode by two all-reduces: the largest lse of all ranks, then sums scaled by that lse."""
    n = len(positions)
    out, lse = local(q, k[:, :, :n], v[:, :, :n], sum(lengths), positions)
    top = lse.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX)
    weight = torch.exp(lse - top)[..., None]
    sums = torch.cat([weight * out, weight], dim=-1)
    dist.all_reduce(sums)
    return (sums[..., :-1] / sums[..., -1:]).to(q.dtype)
