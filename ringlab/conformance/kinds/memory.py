"""Forms in which a tensor may lie in memory, as callers hand them over: views into larger buffers, and other orders of axes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Shaped
from torch import Tensor

_BEFORE, _BEHIND = 3, 2  # entries of a larger buffer on both sides of a view, along each axis


def laid(x: Shaped[Tensor, "..."], how: str) -> Shaped[Tensor, "..."]:
    """Return a tensor with the values of `x` in other memory; `x` itself if `how` is "". how: a key of `LAID`.

    Only "expanded" has two entries in one place, and may not be written.

    >>> laid(torch.arange(6).reshape(2, 3), "a part").stride()
    (8, 1)
    """
    return LAID[how](x) if how else x


def _part(x: Tensor) -> Tensor:
    buffer = _filled(x, [size + _BEFORE + _BEHIND for size in x.shape])
    return _written(buffer[tuple(slice(_BEFORE, _BEFORE + size) for size in x.shape)], x)


def _layer(x: Tensor) -> Tensor:
    return _written(_filled(x, [3, *x.shape])[1], x)


def _slots_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim > 2 else _part(x)


def _apart(x: Tensor) -> Tensor:
    return _written(_filled(x, [*x.shape, 2])[..., 0], x)


def _expanded(x: Tensor) -> Tensor:
    """Return `x` with stride 0 along each axis on which all entries are equal."""
    for axis, size in enumerate(x.shape):
        first = x.narrow(axis, 0, min(1, size))
        if size > 1 and torch.equal(first.expand_as(x), x):
            x = first.expand_as(x)
    return x


def _filled(x: Tensor, shape: list[int]) -> Tensor:
    """Return a buffer of values that no correct function reads: NaN, True, or a large prime number."""
    return x.new_full(shape, torch.nan if x.is_floating_point() else True if x.dtype == torch.bool else 7919)


def _written(view: Tensor, x: Tensor) -> Tensor:
    view.copy_(x)
    return view


LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "a layer": _layer,
    "a part": _part,
    "slots first": _slots_first,
    "dims apart": _apart,
    "expanded": _expanded,
}
"""Forms by name. "a layer": dense, within a stack of several such tensors, so with a storage offset. "a part": within a larger
tensor along each axis. "slots first": with the second and the third axis in the other order. "dims apart": every second entry
of a buffer, so that no axis is dense. "expanded": with stride 0 where entries are equal."""
