"""Picks tokens of arrays or tensors, and fills places without a token. Gradients flow through tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor


def as_one(x: Any) -> Any:
    """Return a tensor unchanged, and any other object as an array."""
    return x if isinstance(x, Tensor) else np.asarray(x)


def as_tensor(x: Any) -> Any:
    """Return a tensor of the values."""
    return x if isinstance(x, Tensor) else torch.from_numpy(np.array(x))


def like(ids: Int64[np.ndarray, "..."], other: Any) -> Any:
    """Return the ids as a tensor on the device of `other`, or unchanged if `other` is an array."""
    return torch.from_numpy(ids).to(other.device) if isinstance(other, Tensor) else ids


def picked(x: Any, places: Int64[np.ndarray, " n"], fill: Any = 0) -> Any:
    """Return copies of the elements of `x` at these places of its first axis; `fill` for places below 0."""
    there = np.flatnonzero(places >= 0)
    shape = (len(places), *x.shape[1:])
    if isinstance(x, Tensor):
        kept = x.index_select(0, torch.from_numpy(places[there]).to(x.device))
        if len(there) == len(places):
            return kept
        return x.new_full(shape, fill).index_copy(0, torch.from_numpy(there).to(x.device), kept)
    out = np.full(shape, fill, x.dtype)
    out[there] = x[places[there]]
    return out


def put(x: Any, places: Int64[np.ndarray, " n"], length: int, fill: Any) -> Any:
    """Return an array of `length` elements with the elements of `x` at these places, and `fill` elsewhere."""
    back = np.full(length, -1)
    back[places] = np.arange(len(places))
    return picked(x, back, fill)
