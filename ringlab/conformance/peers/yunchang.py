"""yunchang: its contiguous, zig-zag and striped rings, and its ring × Ulysses, over the stand-in for flash-attn.

The kernels take float16 and bfloat16. On one rank its backward sends to itself, which gloo refuses. The
package's other kinds of attention have no backward on a CPU.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ringlab.conformance.peers import ring_flash_attn
from ringlab.conformance.peers.flash_attn import in_place_of_flash_attn
from ringlab.conformance.target.claims import Target


def contiguous() -> Target:
    """Return the plain ring. Raises: ImportError without the package."""
    return make("ring_flash_attn_func", "contiguous")


def zigzag() -> Target:
    """Return the zig-zag ring, causal only. Raises: ImportError without the package."""
    return make("zigzag_ring_flash_attn_func", "zigzag")


def stripe() -> Target:
    """Return the striped ring, causal only. Raises: ImportError without the package."""
    return make("stripe_flash_attn_func", "striped")


def make(function: str, layout: str) -> Target:
    """Return one of the package's rings as a target. Raises: ImportError without the package."""
    return ring_flash_attn.of(getattr(_package().ring, function), layout)


def hybrid() -> Target:
    """Return LongContextAttention on 2 × 2 ranks: all-to-all in pairs of ranks, and rings across pairs.

    Raises: ImportError without the package.
    """
    package = _package()

    @lru_cache(maxsize=1)
    def layer(rank: int, world_size: int) -> Any:
        package.set_seq_parallel_pg(2, world_size // 2, rank, world_size)
        return package.LongContextAttention(ring_impl_type="basic")

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
        out: Tensor = layer(dist.get_rank(), dist.get_world_size())(
            q, k, v, softmax_scale=scale, causal=causal
        )
        return out

    return Target(
        attend, over="torch.distributed", layouts=("contiguous",), causal=(False, True),
        dtypes=ring_flash_attn.DTYPES, ranks=(4,), grouped=False, ragged=False, axes="BLHD", schedule="any",
    )  # fmt: skip


def _package() -> Any:
    with in_place_of_flash_attn():
        return importlib.import_module("yunchang")
