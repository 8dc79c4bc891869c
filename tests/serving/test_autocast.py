"""Under autocast, serving computes in its cache's dtype. Virtual ranks cannot show this; processes can."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from ringlab import ShardedCache, decode, launch
from ringlab.comm.ring import Ring
from ringlab.layout import zigzag
from ringlab.schedules import decode as module
from ringlab.serving import chunks, decode_heads, prefill
from ringlab.serving import decode as heads
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


def compared(ring: Ring, forgets: bool) -> list[bool]:
    """Return whether each tensor has the same bits under autocast. forgets: keep autocast on in attention."""
    with pytest.MonkeyPatch.context() as patch:
        if forgets:
            for each in (module, heads, chunks):
                patch.setattr(each, "without_autocast", lambda kind: nullcontext())
        equal = []
        for block in ("naive", "blockwise", "native"):
            plain = served(ring, nullcontext(), block)
            cast = served(ring, torch.autocast("cpu", torch.bfloat16), block)
            equal += [torch.equal(one, other) for one, other in zip(plain, cast, strict=True)]
        return equal


def right_and_wrong(ring: Ring) -> tuple[list[bool], list[bool]]:
    return compared(ring, forgets=False), compared(ring, forgets=True)


def test_autocast_changes_no_bit_and_would_if_it_stayed_on() -> None:
    for right, wrong in launch(right_and_wrong, 2, memory=False).results:
        assert len(right) == 24 and all(right)
        of_blocks = [wrong[:8], wrong[8:16]]
        assert not any(outs for block in of_blocks for outs in block[::2]), "autocast changes nothing here"
