"""Serving sends and holds what its formulas say, in bytes and messages on the trace and the memory meter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ringlab import ShardedCache, VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.comm.trace import Outcome, Trace
from ringlab.cost.serving import (
    decode_heads_traffic,
    gathered_page_bytes,
    helix_traffic,
    page_bytes,
    pages_needed,
    prefill_traffic,
    travelling_kv_bytes,
)
from ringlab.cost.sizes import Attention
from ringlab.errors import CostError, WorldSizeError
from ringlab.layout import zigzag
from ringlab.serving import HelixGrid, PagedCache, decode_heads, prefill

MHA = Attention(B=1, H=8, K=8, D=4, dtype="float32")
GQA = Attention(B=1, H=8, K=2, D=8, dtype="bfloat16")
MQA = Attention(B=2, H=8, K=1, D=4, dtype="float64")
WIDE = Attention(B=2, H=8, K=2, D=4, dtype="float32", Dv=12)
SIZES = [MHA, GQA, MQA, WIDE]


def drawn(sizes: Attention, heads: int, tokens: int, dim: int | None = None) -> Tensor:
    return torch.ones(sizes.B, heads, tokens, dim or sizes.D, dtype=getattr(torch, sizes.dtype))


def values(sizes: Attention, heads: int, tokens: int) -> Tensor:
    return drawn(sizes, heads, tokens, sizes.value_dim)


def cache_of(ring: Ring, sizes: Attention, tokens: int, K: int | None = None) -> ShardedCache:
    K = K or sizes.K
    dims = {"head_dim": sizes.D, "value_dim": sizes.value_dim}
    cache = ShardedCache(ring, batch=sizes.B, kv_heads=K, **dims, dtype=getattr(torch, sizes.dtype))
    cache.append(drawn(sizes, K, tokens), values(sizes, K, tokens))
    return cache


def sent(trace: Trace, rank: int) -> tuple[int, int]:
    found = [e.bytes_sent for e in trace.exchanges(rank) if e.bytes_sent]
    return sum(found), len(found)


def decodes(ring: Ring, sizes: Attention, tokens: int, new: int, how: dict[str, Any]) -> None:
    heads = sizes.H // ring.world_size if how["queries"] == "own" else sizes.H
    sinks = torch.zeros(heads)
    decode_heads(drawn(sizes, heads, new), cache_of(ring, sizes, tokens), sinks=sinks, **how)


WAYS = [{"queries": q, "merge": m} for q in ("own", "all") for m in ("all-to-all", "reduce-scatter")]


@pytest.mark.parametrize("how", WAYS, ids=lambda how: "-".join(how.values()))
def test_decode_sends_what_the_formula_says(how: dict[str, Any]) -> None:
    """Every rank sends the predicted bytes and messages, at 20 tokens and at 200."""
    for sizes, P, new in ((MHA, 4, 1), (GQA, 2, 3), (MQA, 8, 1), (GQA, 1, 1), (WIDE, 4, 2)):
        expected = decode_heads_traffic(sizes, P, new=new, **how)
        for tokens in (20, 200):
            trace = VirtualCluster(P, memory=False).run(decodes, sizes, tokens, new, how).trace
            for rank in range(P):
                assert sent(trace, rank) == (expected.total_bytes, expected.messages)


def decodes_pages(ring: Ring, lengths: tuple[int, ...]) -> None:
    cache = PagedCache(ring, kv_heads=GQA.K, head_dim=GQA.D, pages=99, page=2, dtype=torch.bfloat16)
    names = [cache.add() for _ in lengths]
    k = drawn(GQA, GQA.K, sum(lengths))
    cache.append(k, k, names, lengths)
    decode_heads(drawn(GQA, GQA.H // ring.world_size, len(lengths)), cache, names)


def test_a_batch_of_different_lengths_takes_one_round() -> None:
    """A ragged batch takes the messages of one sequence and the bytes of a batch of equal sequences."""
    expected = decode_heads_traffic(replace(GQA, B=3), 4)
    trace = VirtualCluster(4, memory=False).run(decodes_pages, (5, 40, 1)).trace
    for rank in range(4):
        assert sent(trace, rank) == (expected.total_bytes, expected.messages)


def on_a_grid(ring: Ring, sizes: Attention, token_ranks: int, merge: str) -> None:
    grid = HelixGrid(ring, token_ranks=token_ranks, head_ranks=ring.world_size // token_ranks)
    queries, keys = grid.attended(sizes.H), grid.attended(sizes.K)
    cache = cache_of(grid.tokens, sizes, 20, keys.stop - keys.start)
    grid.attend(drawn(sizes, queries.stop - queries.start, 1), cache, merge=merge)


@pytest.mark.parametrize("merge", ["all-to-all", "reduce-scatter"])
@pytest.mark.parametrize("token_ranks", [1, 2, 4])
def test_a_grid_sends_what_the_formula_says(token_ranks: int, merge: str) -> None:
    for sizes in (MHA, GQA, WIDE) if token_ranks > 1 else (MHA,):
        expected = helix_traffic(sizes, token_ranks, 4 // token_ranks, merge=merge)
        trace = VirtualCluster(4, memory=False).run(on_a_grid, sizes, token_ranks, merge).trace
        for rank in range(4):
            assert sent(trace, rank) == (expected.total_bytes, expected.messages)


def prefills(
    ring: Ring, sizes: Attention, chunks: tuple[int, ...], travels: str, whole: Tensor, whole_v: Tensor
) -> list[int]:
    """Feed chunks in zig-zag layout; return the cached tokens of each rank before the last chunk."""
    dims = {"head_dim": sizes.D, "value_dim": sizes.value_dim}
    tokens = -(-sum(chunks) // ring.world_size) + 2 * len(chunks)
    cache = ShardedCache(ring, batch=sizes.B, kv_heads=sizes.K, **dims, dtype=whole.dtype, capacity=tokens)
    lengths: list[int] = []
    for n in chunks:
        layout, lengths = zigzag(n, ring.world_size), list(cache.lengths)
        own = layout.length(ring.rank)
        q, k, v = whole[:, : sizes.H, :own], whole[:, : sizes.K, :own], whole_v[:, : sizes.K, :own]
        if n == chunks[-1]:
            prefill(q, k, v, cache, layout=layout, travels=travels, block="native")
        else:
            cache.append_shards(layout, k, v)
    return lengths


def run_prefill(sizes: Attention, P: int, chunks: tuple[int, ...], travels: str) -> Outcome:
    tensors = drawn(sizes, sizes.H, max(chunks)), values(sizes, sizes.H, max(chunks))
    return VirtualCluster(P).run(prefills, sizes, chunks, travels, *tensors)


@pytest.mark.parametrize("travels", ["kv", "q"])
@pytest.mark.parametrize("sizes", SIZES, ids=["MHA fp32", "GQA bf16", "MQA fp64", "wide v"])
def test_prefill_sends_what_the_formula_says(sizes: Attention, travels: str) -> None:
    """Every rank sends the predicted bytes and messages, even if P does not divide a length."""
    for P, chunks in ((1, (5, 8)), (2, (7,)), (3, (29, 10)), (4, (13, 1))):
        outcome = run_prefill(sizes, P, chunks, travels)
        for rank, prefix in enumerate(outcome.results):
            expected = prefill_traffic(sizes, zigzag(chunks[-1], P), prefix, travels=travels, rank=rank)
            found = [e.bytes_sent for e in outcome.trace.exchanges(rank)]
            assert (sum(found), len(found)) == (expected.total_bytes, expected.messages)
        most = prefill_traffic(sizes, zigzag(chunks[-1], P), outcome.results[0], travels=travels)
        assert most.total_bytes == max(outcome.trace.bytes_sent(rank) for rank in range(P))


@lru_cache(maxsize=16)
def peak(P: int, travels: str, cached: int, new: int) -> int:
    """Return the largest peak of a rank without its cache, q, k and v. All ranks must have equally many tokens."""
    outcome = run_prefill(GQA, P, (cached, new), travels)
    capacity = -(-(cached + new) // P) + 4
    return max(r.peak_bytes for r in outcome.memory) - capacity * GQA.block_bytes_per_token


@pytest.mark.parametrize("P", [1, 2, 4])
def test_what_travels_is_all_that_a_long_prefix_adds(P: int) -> None:
    """Twice the cached tokens add the predicted bytes if K and V travel, and no bytes if queries travel."""
    long, short = (travelling_kv_bytes(GQA, (cached + 16) // P, P) for cached in (512, 256))
    assert peak(P, "kv", 512, 16) - peak(P, "kv", 256, 16) == long - short
    assert peak(P, "q", 512, 16) - peak(P, "q", 256, 16) == 0


def pages_in_use(ring: Ring, sizes: Attention, tokens: int, k: Tensor, v: Tensor) -> int:
    """Decode from a paged cache of the predicted number of pages, and return that number."""
    pages = pages_needed([tokens], ring.world_size, 4)
    dims = {"head_dim": sizes.D, "value_dim": sizes.value_dim}
    cache = PagedCache(ring, kv_heads=sizes.K, **dims, pages=pages, page=4, dtype=k.dtype)
    name = cache.add()
    for start in range(0, tokens, 8):
        part = slice(start, start + 8)
        cache.append(k[:, :, part], v[:, :, part], [name], [k[:, :, part].shape[2]])
    decode_heads(drawn(sizes, sizes.H // ring.world_size, 1), cache, [name], block="blockwise")
    return pages


@pytest.mark.parametrize("sizes", [GQA, replace(GQA, Dv=24)], ids=["GQA", "wide v"])
def test_pages_and_their_copy_are_what_a_paged_cache_takes(sizes: Attention) -> None:
    runs = {
        S: VirtualCluster(2).run(pages_in_use, sizes, S, drawn(sizes, sizes.K, S), values(sizes, sizes.K, S))
        for S in (1024, 2048)
    }
    for rank in range(2):
        peaks = [run.memory[rank].peak_bytes for run in runs.values()]
        pools = [run.results[rank] * page_bytes(sizes, 4) for run in runs.values()]
        copies = [gathered_page_bytes(sizes, S // 2) for S in runs]
        assert peaks[1] - peaks[0] == sum(each[1] - each[0] for each in (pools, copies))


def test_shared_pages_are_counted_once() -> None:
    """The formula counts shared pages once, as a cache does."""

    def program(ring: Ring) -> None:
        for shared in (0, 3, 8, 13):
            cache = PagedCache(ring, kv_heads=1, head_dim=1, pages=50, page=2)
            first = cache.add()
            x = torch.ones(1, 1, 30, 1)
            cache.append(x[:, :, :shared], x[:, :, :shared], [first], [shared])
            names = [first, cache.fork(first), cache.fork(first)]
            for name, extra in zip(names, (3, 10, 1), strict=True):
                cache.append(x[:, :, :extra], x[:, :, :extra], [name], [extra])
            lengths = [shared + extra for extra in (3, 10, 1)]
            assert 50 - cache.free_pages == pages_needed(lengths, 2, 2, shared)

    VirtualCluster(2, memory=False).run(program)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: decode_heads_traffic(GQA, 3), CostError, "share 8 heads"),
        (lambda: decode_heads_traffic(GQA, 2, merge="tree"), CostError, "merge="),
        (lambda: helix_traffic(GQA, 2, 4), CostError, "share 2 heads"),
        (lambda: prefill_traffic(GQA, zigzag(4, 2), [1], travels="kv"), WorldSizeError, "each of 2 ranks"),
        (lambda: prefill_traffic(GQA, zigzag(4, 2), [1, 1], travels="v"), CostError, "kv or q"),
        (lambda: pages_needed([3], 2, 2, shared=4), CostError, "at least 4"),
    ],
)
def test_what_has_no_formula(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()
