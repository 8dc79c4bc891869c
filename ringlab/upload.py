"""Copies values that Python has computed to a GPU, without waiting for the GPU.

A copy from ordinary memory makes Python wait until the GPU has run everything that was launched before. A copy from
pinned memory is queued on the current stream, and Python continues. A kernel on another stream could read such a copy
too early. Tables that are kept for later calls are therefore kept separately for each stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def upload(values: Shaped[np.ndarray | Tensor, "*axes"], device: torch.device) -> Shaped[Tensor, "*axes"]:
    """Return the values as a tensor on `device`, which kernels launched on the current stream may read.

    The tensor may share the memory of `values` if both are on one device.

    >>> upload(np.arange(3), torch.device("cpu"))
    tensor([0, 1, 2])
    """
    host = values if isinstance(values, Tensor) else torch.from_numpy(values)
    # A compiled graph cannot pin memory. It copies as torch does by default.
    if device.type != "cuda" or host.is_cuda or torch.compiler.is_compiling():
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)  # torch keeps the pinned memory until it is copied


def kept_for_each_stream(size: int) -> Callable[[F], F]:
    """Return a decorator that keeps the last `size` results of a function.

    The function's arguments are hashable, and its last argument is a device. Streams of a GPU share no results.
    """

    def keep(function: F) -> F:
        @lru_cache(size)
        def kept(stream: int, *args: Any) -> Any:
            return function(*args)

        @wraps(function)
        def call(*args: Any) -> Any:
            return kept(_current_stream(args[-1]), *args)

        call.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
        return cast(F, call)

    return keep


def _current_stream(device: torch.device) -> int:
    """Return the number of the stream on which kernels of this device are launched now; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
