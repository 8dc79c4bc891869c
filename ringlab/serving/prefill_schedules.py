"""A chunk of a prompt, and the two ways to let its tokens attend to all ranks' tokens.

Either K and V travel around the ring, or queries and their partials do. `prefill` checks the chunk and
chooses the way.
Source: arXiv 2411.01783, section 3 (pass-KV and pass-Q).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from ringlab.blocks.tilewise import TilewiseForward
from ringlab.comm.protocol import Work, thread_safe_if
from ringlab.comm.ring import Ring
from ringlab.mask import Mask
from ringlab.merge import Partial, merge, state_dtype
from ringlab.schedules.call import AttentionCall
from ringlab.schedules.decode import row_tiles
from ringlab.scores import PLAIN_RULES
from ringlab.serving.checks import Cache, lengths_of, shard_of
from ringlab.serving.paged_cache import PagedCache
from ringlab.tile import Tile


@dataclass(frozen=True)
class Chunk:
    """The next tokens of a sequence on this rank, and the cached tokens.

    mask: the mask of the whole sequence. call: the attention of the chunk to itself, with the mask's part
    for the chunk.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cache: Cache
    sequence: Any
    mask: Mask
    call: AttentionCall

    @property
    def ring(self) -> Ring:
        """Return the ring of ranks."""
        return self.call.ring

    @property
    def prefix_lengths(self) -> list[int]:
        """Return the number of cached tokens on each rank."""
        return lengths_of(self.cache, self.sequence)

    @property
    def start(self) -> int:
        """Return the number of cached tokens on all ranks, which is the position of the first new token."""
        return sum(self.prefix_lengths)

    @property
    def fewer_bytes(self) -> str:
        """Return "kv" or "q": the one that takes fewer bytes in one hop of all ranks."""
        (B, H, _, D), size, n = self.q.shape, self.q.element_size(), self.call.layout.S
        K, Dv = self.v.shape[1], self.v.shape[-1]
        state = state_dtype(self.q.dtype).itemsize
        of_kv = B * K * (D + Dv) * size * (self.start + n)
        of_q = B * H * n * (D * size + (Dv + 1) * state)
        return "q" if of_q < of_kv else "kv"

    def prefix_tiles(self, rank: int, origin: int) -> tuple[Tile, ...]:
        """Return the tiles in which the new tokens of `rank` see the cached tokens of `origin`."""
        rows, keys = self.call.layout.length(rank), self.prefix_lengths[origin]
        if not rows or not keys:
            return ()
        if self.mask.plain:
            return (Tile(0, rows, 0, keys, causal=False),)
        positions = self.start + self.call.layout.positions(rank)
        tiles = row_tiles(self.mask, positions, self._positions(origin), self.start + self.call.layout.S)
        return tuple(Tile(t.rows.start, t.rows.stop, t.keys.start, t.keys.stop, causal=False) for t in tiles)

    def _positions(self, rank: int) -> Int64[np.ndarray, " L"]:
        if isinstance(self.cache, PagedCache):
            return self.cache.positions(self.sequence, rank)
        return self.cache.positions_of(rank)


@dataclass(frozen=True)
class Keys:
    """The K and V of one rank's cached tokens, and those of its new tokens."""

    prefix_k: Tensor
    prefix_v: Tensor
    k: Tensor
    v: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all four tensors in the order of the message."""
        return self.prefix_k, self.prefix_v, self.k, self.v


def attend(
    call: AttentionCall, chunk: Chunk, steps: TilewiseForward, rank: int, origin: int, keys: Keys
) -> None:
    """Make the new tokens of `rank` attend to the tokens of `origin`."""
    rules = PLAIN_RULES
    if call.rules.requirements:  # the only possible requirement is a soft cap, which needs no positions
        rules = call.rules.of_tile(np.empty(0, np.int64), np.empty(0, np.int64))
    steps.attend(chunk.prefix_tiles(rank, origin), keys.prefix_k, keys.prefix_v, rules)
    steps.attend(call.tiles(origin, rank), keys.k, keys.v, rules)


def keys_travel(chunk: Chunk) -> Partial:
    """Return the partial of this rank's new tokens. All cached and new K/V go around the ring."""
    ring, steps = chunk.ring, TilewiseForward(chunk.call.block, chunk.q, chunk.call.scale)
    shard = shard_of(chunk.cache, chunk.sequence)
    keys = Keys(shard.k, shard.v, chunk.k, chunk.v)
    attend_to = thread_safe_if(chunk.call.block.thread_safe, attend)
    for step in range(ring.world_size):
        work = None
        if step + 1 < ring.world_size:
            into = _like(keys, chunk, ring.origin(step + 1))
            work = ring.post(*keys.tensors, into=into, hops=step, tag=f"prefill kv {step}")
        ring.compute(
            f"prefill {step}", attend_to, chunk.call, chunk, steps, ring.rank, ring.origin(step), keys
        )
        if work is not None:
            keys = Keys(*work.wait())
    return steps.partial()


def _like(keys: Keys, chunk: Chunk, origin: int) -> tuple[Tensor, ...]:
    """Return buffers for the K and V of rank `origin`."""
    lengths = chunk.prefix_lengths[origin], chunk.call.layout.length(origin)
    return tuple(
        x.new_empty((*x.shape[:2], length, x.shape[3]))
        for x, length in zip(keys.tensors, np.repeat(lengths, 2).tolist(), strict=True)
    )


def queries_travel(chunk: Chunk) -> Partial:
    """Return the partial of this rank's new tokens. Queries go around the ring; partials return at once."""
    ring, lengths = chunk.ring, chunk.call.layout.lengths
    shard = shard_of(chunk.cache, chunk.sequence)
    keys = Keys(shard.k, shard.v, chunk.k, chunk.v)
    q, total = chunk.q, Partial.identity(chunk.q)
    returning: Work | None = None
    attend_to = thread_safe_if(chunk.call.block.thread_safe, attend)
    for step in range(ring.world_size):
        origin = ring.origin(step)
        work = None
        if step + 1 < ring.world_size:
            into = q.new_empty((*q.shape[:2], lengths[ring.origin(step + 1)], q.shape[3]))
            work = ring.post(q, into=(into,), hops=step, tag=f"prefill q {step}")
        steps = TilewiseForward(chunk.call.block, q, chunk.call.scale)
        ring.compute(f"prefill {step}", attend_to, chunk.call, chunk, steps, origin, ring.rank, keys)
        if returning is not None:
            total = _merge_returned(total, returning)
        if step == 0:
            total = steps.partial()
        else:
            returning = _return(chunk, steps.partial(), origin, step)
        if work is not None:
            [q] = work.wait()
    return total if returning is None else _merge_returned(total, returning)


def _merge_returned(total: Partial, returning: Work) -> Partial:
    """Return the merge of `total` with the partial that another rank has computed for this rank's queries."""
    [message] = returning.wait()
    return merge(total, Partial(message[..., :-1], message[..., -1]))


def _return(chunk: Chunk, part: Partial, origin: int, step: int) -> Work:
    """Send a partial to its rows' owner, and receive one from the rank that is `step` ranks ahead."""
    ring = chunk.ring
    message = torch.cat([part.out, part.lse.unsqueeze(-1)], dim=-1)
    into = message.new_empty((*message.shape[:2], chunk.q.shape[2], message.shape[3]))
    source = (ring.rank + step) % ring.world_size
    return ring.comm.exchange(
        send=(message,), to=origin, receive=(into,), source=source, tag=f"prefill partial {step}"
    )


TRAVELS: dict[str, Callable[[Chunk], Partial]] = {"kv": keys_travel, "q": queries_travel}
"""The two ways to prefill, by the name of the tensors that travel around the ring."""
