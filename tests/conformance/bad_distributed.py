"""Targets over torch.distributed that go wrong on rank 1, or go on without it."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Any:
    """All-gather attention, in which rank 1 goes wrong in a way of its own for each kind of input."""
    if dist.get_rank() == 1:
        if not q.is_contiguous():
            _hang()
        if q.abs().max() > 100:
            print("last words", flush=True)
            os._exit(3)
        if scale is not None:
            _print()
        if q.dtype == torch.float64:
            importlib.import_module("a_package_that_is_not_there")
        if q.shape[1] == 6:
            return None
    keys, values = ([torch.empty_like(x) for _ in range(dist.get_world_size())] for x in (k, v))
    dist.all_gather(keys, k.contiguous())
    dist.all_gather(values, v.contiguous())
    heads = q.shape[1] // k.shape[1]
    k, v = (torch.cat(x, 2).repeat_interleave(heads, 1) for x in (keys, values))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)


def _hang() -> None:
    while True:
        time.sleep(0.1)


def _print() -> None:
    while True:
        print("x" * 10_000)


def waits_for_the_dead(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    try:
        result: Tensor = attend(q, k, v)
    except RuntimeError:
        _hang()
    return result
