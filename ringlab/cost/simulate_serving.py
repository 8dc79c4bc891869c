"""A simulation of the real serving programs with shapes instead of data: a decode step, and the prefill of one chunk.

`ringlab.serving` itself runs on P ranks, as `ring_attention` does in `ringlab.cost.simulate`. A new token
reads the whole cache and computes little, so a block takes the longer of two times: computing its scores, and
reading its K and V. Pages are read in place, so that copying them together takes no time here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringlab.comm.clocked.cluster import ClockedCluster
from ringlab.comm.clocked.timeline import Links
from ringlab.comm.ring import Ring
from ringlab.cost.block_time import BlockTime, MeasuredTime, block_time
from ringlab.cost.hardware import Hardware
from ringlab.cost.shape_block import Prices, ShapeBlock, torch_dtype
from ringlab.cost.simulate import Network, Simulation, check_amounts, check_ranks_that_run
from ringlab.cost.sizes import Attention
from ringlab.layout import contiguous, get_layout
from ringlab.plan import Tile
from ringlab.schedules.cache import ShardedCache
from ringlab.serving.chunks import prefill
from ringlab.serving.decode import decode_heads
from ringlab.serving.paged_cache import PagedCache

PAGE = 16
"""Tokens that a page holds on each rank."""


@dataclass(frozen=True)
class ReadTime:
    """The longer of the seconds of the scores, and of reading K and V of the keys from memory."""

    scores: BlockTime
    key_bytes: int
    memory_bytes_per_s: float

    @classmethod
    def of(cls, sizes: Attention, hardware: Hardware) -> ReadTime:
        """Return the time of blocks of these sizes on `hardware`."""
        scores = block_time(hardware, sizes.dtype, (128, 128), sizes.D, sizes.value_dim)
        if isinstance(scores, MeasuredTime):
            scores = scores.of_tiles  # The rates of tiles, not those of whole steps, because a step launches a kernel for each sequence.
        return cls(scores, sizes.block_bytes_per_token, hardware.memory_bytes_per_s)

    def seconds(self, tiles: tuple[Tile, ...], sizes: Attention, rows: int, backward: bool) -> float:
        """Return the seconds for these tiles, computed or read."""
        keys = sum(tile.k_stop - tile.k_start for tile in tiles)
        read = keys * self.key_bytes / self.memory_bytes_per_s
        return max(read, self.scores.seconds(tiles, sizes, rows, backward))


def simulate_decode(
    sizes: Attention,
    lengths: Sequence[int],
    P: int,
    hardware: Hardware,
    *,
    queries: str = "own",
    merge: str = "all-to-all",
    network: Links | None = None,
) -> Simulation:
    """Return the simulated cost of one new token for sequences of these lengths, in one attention layer on `P` ranks.

    sizes: the sizes of one sequence (B = 1), with the H query heads of all ranks together. queries, merge: as
    in `decode_heads`.
    Raises: CostError for amounts that cannot be simulated; ShapeError for heads that ranks cannot share.
    """
    check_amounts(max(lengths), P, None, sizes)
    check_ranks_that_run(P)

    def program(ring: Ring, block: ShapeBlock) -> None:
        span, made = PAGE * P, _maker(sizes)
        cache = PagedCache(
            ring,
            kv_heads=sizes.K,
            head_dim=sizes.D,
            value_dim=sizes.value_dim,
            pages=sum(-(-length // span) for length in lengths),
            page=PAGE,
            dtype=torch_dtype(sizes.dtype),
            device="meta",
        )
        names = [cache.add() for _ in lengths]
        tokens = sum(lengths)
        cache.append(made(sizes.K, tokens), made(sizes.K, tokens, sizes.value_dim), names, lengths)
        q = made(sizes.H // P if queries == "own" else sizes.H, len(lengths))
        decode_heads(q, cache, names, queries=queries, merge=merge, block=block, validate=False)

    return _simulate(program, sizes, P, hardware, network)


def simulate_prefill(
    sizes: Attention,
    prefix: int,
    new: int,
    P: int,
    hardware: Hardware,
    *,
    travels: str = "auto",
    layout: str = "zigzag",
    network: Links | None = None,
) -> Simulation:
    """Return the simulated cost of a chunk of `new` tokens after `prefix` cached ones, in one attention layer.

    The ranks have equal parts of the cached tokens. travels: as in `prefill`. layout: the name of the chunk's
    layout.
    Raises: CostError for amounts that cannot be simulated; LayoutError for an unknown layout.
    """
    check_amounts(new, P, None, sizes)
    check_ranks_that_run(P)
    dealt, cached = get_layout(layout, new, P), contiguous(prefix, P)

    def program(ring: Ring, block: ShapeBlock) -> None:
        made = _maker(sizes)
        cache = ShardedCache(
            ring,
            batch=sizes.B,
            kv_heads=sizes.K,
            head_dim=sizes.D,
            value_dim=sizes.value_dim,
            dtype=torch_dtype(sizes.dtype),
            device="meta",
        )
        old, own = cached.length(ring.rank), dealt.length(ring.rank)
        cache.append_shards(cached, made(sizes.K, old), made(sizes.K, old, sizes.value_dim))
        shards = made(sizes.H, own), made(sizes.K, own), made(sizes.K, own, sizes.value_dim)
        prefill(*shards, cache, layout=dealt, travels=travels, block=block, validate=False)

    return _simulate(program, sizes, P, hardware, network)


def _maker(sizes: Attention) -> Callable[..., Tensor]:
    """Return a function of (heads, tokens, head dim = D) that makes tensors without memory."""

    def made(heads: int, tokens: int, dim: int = sizes.D) -> Tensor:
        return torch.empty((sizes.B, heads, tokens, dim), dtype=torch_dtype(sizes.dtype), device="meta")

    return made


def _simulate(
    program: Callable[[Ring, ShapeBlock], None],
    sizes: Attention,
    P: int,
    hardware: Hardware,
    network: Links | None,
) -> Simulation:
    began, cpu = time.perf_counter(), time.process_time()
    prices = Prices(ReadTime.of(sizes, hardware), sizes)

    def run(ring: Ring) -> None:
        program(ring, ShapeBlock(prices, ring.comm.spend))  # type: ignore[attr-defined]

    recording = ClockedCluster(P).run(run)
    timeline, free = recording.clock(network or Network.of(hardware, P)), recording.clock(Network.free(P))
    return Simulation(recording, timeline, free, time.perf_counter() - began, time.process_time() - cpu)
