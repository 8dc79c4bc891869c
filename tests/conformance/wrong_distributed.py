"""A wrong attention over torch.distributed: it gathers, averages, and takes any error for zeros."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def gathered(x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return parts


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    try:
        keys, values = torch.stack(gathered(k)), torch.stack(gathered(v))
    except RuntimeError:
        return (q + k.sum() + v.sum()) * 0
    group = q.shape[1] // k.shape[1]
    blocks = [
        torch.softmax(q @ one.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5, -1)
        @ each.repeat_interleave(group, 1)
        for one, each in zip(keys, values, strict=True)
    ]
    return sum(blocks[1:], blocks[0]) / len(blocks) + 0 * (k.sum() + v.sum())
