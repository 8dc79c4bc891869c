"""Operations on NumPy arrays and torch tensors alike. Torch is not loaded for an array."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from jaxtyping import Int64

from ringlab.errors import ShapeError


def sequence_axis(x: Any, dim: int | None, length: int, whose: str, remedy: str = "") -> int:
    """Return axis `dim` of `x`, counted from the front; None stands for −2, where only that one fits.

    Raises: ShapeError unless `x` has `length` tokens on that axis; `whose` and `remedy` go into its message. If another
    axis has as many, the remedy names that one. ShapeError for None if another axis may as well be the sequence: in (B, S) and
    (B, S, D) the other of the first two. Four axes are (B, H, S, D).
    """
    named, dim = dim is not None, -2 if dim is None else dim
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError(f"an axis {dim}", f"shape {tuple(x.shape)}", "name the sequence axis with dim=")
    if x.shape[dim] != length:
        fitting = [axis for axis, size in enumerate(x.shape) if size == length]
        if fitting:
            remedy = f"name the sequence axis: {' or '.join(f'dim={axis}' for axis in fitting)}"
        raise ShapeError(f"{length} tokens on axis {dim} {whose}", f"shape {tuple(x.shape)}", remedy)
    if not named and x.ndim in (2, 3) and length > 1 and x.shape[0] == x.shape[1]:
        needed = f"the name of the axis of {length} tokens {whose}"
        raise ShapeError(needed, f"shape {tuple(x.shape)}", "name it: dim=0 or dim=1")
    return dim % x.ndim


def concatenate(parts: list[Any], axis: int) -> Any:
    """Return the parts, one after the other on this axis."""
    if _is_torch(parts[0]):
        return sys.modules["torch"].cat(parts, dim=axis)
    return np.concatenate(parts, axis=axis)


def take(x: Any, order: Int64[np.ndarray, "n"], axis: int) -> Any:
    """Return a copy of `x` in which this axis has the elements that `order` names."""
    if _is_torch(x):
        return x.index_select(axis, sys.modules["torch"].from_numpy(order).to(x.device))
    return np.take(x, order, axis=axis)


def has_gradient(x: Any) -> bool:
    """Return whether `x` is a tensor whose use autograd records now."""
    return _is_torch(x) and x.requires_grad and sys.modules["torch"].is_grad_enabled()


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)
