"""ring-attention-pytorch: `ring_flash_attn`, its ring for CPUs in plain torch, contiguous or striped.

It returns no lse and takes no scale. On one rank its backward sends to itself, which gloo refuses. Its query
head h reads key/value head h mod K, while other rings read h // (H / K). So the heads are reordered.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ringlab.conformance.target.claims import Target

RANKS = (2, 3, 4, 8)


def make() -> Target:
    """Return the target. Raises: ImportError if the package is not installed."""
    module = importlib.import_module("ring_attention_pytorch.ring_flash_attention")
    return Target(
        attend_with(module.ring_flash_attn), over="torch.distributed", layouts=("contiguous", "striped"),
        causal=(False, True), dtypes=("float32",), ranks=RANKS, ragged=False, axes="BLHD",
    )  # fmt: skip


def attend_with(
    function: Callable[..., Float[Tensor, "B L H D"]],
) -> Callable[..., Float[Tensor, "B L H D"]]:
    """Return a function that computes attention on this rank's shards by the package's `function`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, layout: Any, world_size: int) -> Tensor:
        groups = q.shape[2] // k.shape[2]
        out = function(
            reordered(q, groups), k, v,
            causal=causal,
            ring_reduce_col=True,
            striped_ring_attn=causal and layout.name == "striped",
            ring_size=world_size,
        )  # fmt: skip
        return reordered(out, k.shape[2])

    return attend


def reordered(x: Float[Tensor, "B L H D"], inner: int) -> Float[Tensor, "B L H D"]:
    """Return `x` with head a·inner + b moved to place b·(H / inner) + a."""
    return x.unflatten(2, (-1, inner)).transpose(2, 3).flatten(2, 3)
