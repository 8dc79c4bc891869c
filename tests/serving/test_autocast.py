"""Under autocast, serving computes in its cache's dtype. Virtual ranks cannot show this; processes can."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ringlab import ShardedCache, decode, launch
from ringlab.comm.ring import Ring
from ringlab.layout import zigzag
from ringlab.serving import decode_heads, prefill
from tests.serving.problems import whole


def served(ring: Ring, context: AbstractContextManager[Any], block: str) -> list[Tensor]:
    """Return float32 out and lse of a chunk, and of a token by each decode, all inside `context`."""
    q, k, v = whole(1, 4, 2, 12, 8, 0, torch.float32)
    layout = zigzag(11, ring.world_size)
    cache = ShardedCache(ring, batch=1, kv_heads=2, head_dim=8)
    found: list[Tensor] = []
    with context:
        for travels in ("kv", "q"):
            cache = ShardedCache(ring, batch=1, kv_heads=2, head_dim=8)
            shards = layout.shard((q[:, :, :11], k[:, :, :11], v[:, :, :11]), ring.rank)
            found += prefill(*shards, cache, layout=layout, travels=travels, block=block, return_lse=True)
        cache.append(k[:, :, 11:], v[:, :, 11:])
        last = q[:, :, 11:]
        found += decode(last, cache, block=block, return_lse=True)
        found += decode_heads(last, cache, queries="all", block=block, return_lse=True)
    return found


def same_bits(ring: Ring) -> list[bool]:
    """Return whether each tensor has the same bits under autocast."""
    equal = []
    for block in ("naive", "blockwise", "native"):
        plain = served(ring, nullcontext(), block)
        cast = served(ring, torch.autocast("cpu", torch.bfloat16), block)
        equal += [torch.equal(one, other) for one, other in zip(plain, cast, strict=True)]
    return equal


def test_autocast_changes_no_bit() -> None:
    assert launch(same_bits, 2, memory=False).results == [[True] * 24] * 2
