"""Counts the compilations that rings of many lengths cause: `python -m tests.blocks.dispatch right 72`, without TRITON_INTERPRET.

Triton's own dispatch chooses the kernel for the arguments of each launch, on a driver that pretends to be a GPU. A hook of
Triton's cache notes the chosen kernel in place of its compilation, so nothing is compiled and nothing runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from triton.backends.compiler import GPUTarget

from ringlab import VirtualCluster, ring_attention
from ringlab.blocks.triton import TritonBlock, block, configs, kernels, steps
from ringlab.comm.ring import Ring
from ringlab.layout import LAYOUTS
from tests.blocks.device_calls import rewritten

LENGTHS = (36, 39, 48)
"""Tokens of a sequence: three ranks have even shards, odd ones, and multiples of 16."""
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "of (B, L, H, D)": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "before others": lambda x: F.pad(x, (0, 5))[..., :-5],
    "after others": lambda x: F.pad(x, (3, 5))[..., 3:-5],
    "in fused rows": lambda x: F.pad(x, (x.shape[-1], 2 * x.shape[-1]))[..., x.shape[-1] : 2 * x.shape[-1]],
}


class Driver:
    """A driver of Triton for a GPU that does not exist."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def attend(ring: Ring, layout: str, view: str, B: int, S: int, D: int) -> None:
    whole = [torch.zeros(B, heads, S, D, dtype=torch.bfloat16) for heads in (4, 2, 2, 4)]
    dealt = LAYOUTS[layout](S, ring.world_size)
    q, k, v, dout = (VIEWS[view](dealt.shard(x, ring.rank)) for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, ring=ring, layout=dealt, block=TritonBlock(), validate=False)
    torch.autograd.grad(out, leaves, dout)


def compilations(D: int) -> dict[str, int]:
    """Return the number of kernels that Triton would compile for head dim `D`, by the name of the function."""
    chosen: dict[str, set[str]] = {}

    def hook(*, key: Any, fn: Any, **rest: Any) -> bool:
        chosen.setdefault(fn.name, set()).add(str(key))
        return True  # do not compile

    with (
        mock.patch.object(block, "_unfit_device", lambda device: None),
        mock.patch.object(block, "_architecture", lambda device: "sm_90"),
        mock.patch.object(triton.knobs.runtime, "jit_cache_hook", hook),
    ):
        for layout, view, B, S in product(("contiguous", "zigzag"), VIEWS, (1, 2), LENGTHS):
            VirtualCluster(3, memory=False).run(attend, layout, view, B, S, D)
    return {name.rpartition(".")[-1]: len(keys) for name, keys in chosen.items()}


def specialize_strides() -> None:
    """Have Triton choose kernels by the strides too, as it does by default."""
    for kernel, param in product(configs.KERNELS, kernels._STRIDES):
        for each in getattr(kernels, kernel).params:
            each.do_not_specialize &= each.name != param


MUTANTS: dict[str, Callable[[], AbstractContextManager[None] | None]] = {
    "right": lambda: None,
    "kernels by strides": specialize_strides,
    "tensors from any address": lambda: rewritten(steps, "dense", " and _starts_evenly(x)", ""),
}

if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    mutant, *dims = sys.argv[1:]
    with MUTANTS[mutant]() or nullcontext():
        print(json.dumps({D: compilations(int(D)) for D in dims}))
