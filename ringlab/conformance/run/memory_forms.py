"""The forms in which a caller's tensors lie in memory: with gaps, in the middle of a buffer, or several in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

AWAY = 16
"""The number of entries before a tensor in its buffer: 32 bytes and more, as kernels need for aligned loads."""


def _swapped(a: int, b: int) -> Callable[[Sequence[Tensor], int], list[Tensor]]:
    """Return a function that gives tensors the strides that they have after a transposition of these axes."""

    def swapped(shards: Sequence[Tensor], heads: int) -> list[Tensor]:
        one, other = (a, b) if shards[0].ndim == 4 else (-2, -1)
        return [x.transpose(one, other).contiguous().transpose(one, other) for x in shards]

    return swapped


def away(x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Return a dense copy in the middle of a buffer, whose other entries are 10,000 or True.

    >>> away(torch.ones(2)).storage_offset()
    16
    """
    buffer = torch.full((x.numel() + 2 * AWAY,), 10_000, device=x.device).to(x.dtype)
    return buffer[AWAY : AWAY + x.numel()].view(x.shape).copy_(x)


def _in_one_buffer(shards: Sequence[Tensor], heads: int) -> list[Tensor]:
    """Return q, k and v as views of one tensor, as after a projection to all of their heads, if their other axes agree."""
    *qkv, dout = shards
    others = {(x.dtype, *(size for axis, size in enumerate(x.shape) if axis != heads)) for x in qkv}
    if len(others) > 1:
        return [away(x) for x in shards]
    parts = torch.cat(qkv, dim=heads).split([x.shape[heads] for x in qkv], dim=heads)
    return [*parts, away(dout)]


def _expanded(shards: Sequence[Tensor], heads: int) -> list[Tensor]:
    """Return k and v as one head that is read with stride 0, which needs values that are equal in all heads."""
    q, k, v, dout = shards
    k, v = (x.narrow(heads, 0, 1).expand_as(x) for x in (k, v))
    return [q, k, v, dout]


FORMS: dict[str, Callable[[Sequence[Tensor], int], list[Tensor]]] = {
    "": lambda shards, heads: list(shards),
    "heads": _swapped(1, 2),
    "dims": _swapped(-2, -1),
    "offset": lambda shards, heads: [away(x) for x in shards],
    "one buffer": _in_one_buffer,
    "expanded": _expanded,
}
"""The forms by name: functions of (q, k, v, dout) and of their axis of heads."""
WORDS = {
    "heads": "strided in heads", "dims": "strided in dims", "offset": "in the middle of buffers",
    "one buffer": "in one buffer", "expanded": "expanded from one head",
}  # fmt: skip
"""What a report says about the inputs in each form."""


def away_in(value: Any) -> Any:
    """Return an argument with its tensors, or those of a list, in the middle of buffers; a trained one stays as it is."""
    if isinstance(value, list):
        return [away_in(each) for each in value]
    return away(value) if isinstance(value, Tensor) and not value.requires_grad else value
