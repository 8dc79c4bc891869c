"""The cache holds every token once, evenly spread, and grows rarely; it refuses tokens that do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.errors import (
    AgreementError,
    BackendError,
    DeviceError,
    DtypeError,
    LayoutError,
    MaskError,
    RinglabError,
    ShapeError,
    WorldSizeError,
)
from ringlab.layout import Layout, Run, contiguous, striped, zigzag
from ringlab.mask import Mask
from ringlab.schedules.cache import GROWTH, ShardedCache
from ringlab.schedules.decode import decode
from tests.laws.draw import LAYOUTS
from tests.refusals import assert_refused, errors_on
from tests.schedules.problems import Broken, Plain

Filled = tuple[list[int], np.ndarray, Tensor, Tensor]


def numbered(S: int) -> tuple[Tensor, Tensor]:
    """Return k and v whose numbers are the positions of the tokens."""
    k = torch.arange(float(S)).reshape(1, 1, S, 1).expand(1, 2, S, 3).contiguous()
    return k, -k


def fill(ring: Ring, layout: Layout, counts: list[int]) -> tuple[Filled, list[list[int]]]:
    """Fill a cache by a prefill and appended tokens; return its contents, and the lengths after each step."""
    k, v = numbered(layout.S + sum(counts))
    shards = (layout.shard(x[..., : layout.S, :], ring.rank) for x in (k, v))
    cache, at = ShardedCache.of_shards(ring, layout, *shards), layout.S
    history = [list(cache.lengths)]
    for count in counts:
        cache.append(k[..., at : at + count, :], v[..., at : at + count, :])
        at += count
        history.append(list(cache.lengths))
    return (cache.lengths, cache.positions, cache.k, cache.v), history


def law_every_token_once_and_in_balance(layout: Layout, counts: list[int]) -> None:
    results = VirtualCluster(layout.P, memory=False).run(fill, layout, counts).results
    for rank, ((lengths, positions, k, v), history) in enumerate(results):
        assert history == results[0][1], "ranks count differently"
        assert lengths[rank] == len(positions) == k.shape[2]
        assert (np.diff(positions) > 0).all()
        assert (k[0, 0, :, 0].numpy() == positions).all() and (v == -k).all()
        for before, after in pairwise(history):
            spread = [max(lengths) - min(lengths) for lengths in (before, after)]
            assert spread[1] <= max(1, spread[0]), "the balance is lost"
    held = np.concatenate([positions for (_, positions, _, _), _ in results])
    assert (np.sort(held) == np.arange(layout.S + sum(counts))).all()


@settings(max_examples=50)
@given(LAYOUTS, st.lists(st.integers(0, 5), max_size=6))
def test_every_token_once_and_in_balance(layout: Layout, counts: list[int]) -> None:
    law_every_token_once_and_in_balance(layout, counts)


def test_prompts_that_are_not_in_order_are_sorted() -> None:
    backwards = Layout(6, 2, "backwards", ((Run(4, 1, 2), Run(0, 1, 1)), (Run(1, 1, 3),)))
    law_every_token_once_and_in_balance(backwards, [2])


def follow(ring: Ring) -> tuple[list[list[int]], list[int], list[int]]:
    """Append shards, tokens and shards; return all ranks' positions, and this rank's `next_positions`."""
    cache, following = ShardedCache(ring, batch=1, kv_heads=2, head_dim=3), []
    for layout in (zigzag(9, 3), None, striped(5, 3)):
        k, v = numbered(14)
        if layout is None:
            following += cache.next_positions(2).tolist()
            cache.append(k[:, :, 9:11], v[:, :, 9:11])
        else:
            following += cache.next_positions(layout).tolist()
            at = cache.length
            shards = (layout.shard(x[:, :, : layout.S] + (at if x is k else -at), ring.rank) for x in (k, v))
            cache.append_shards(layout, *shards)
    assert cache.k[0, 0, :, 0].tolist() == cache.positions.tolist()
    return [cache.positions_of(rank).tolist() for rank in range(3)], cache.positions.tolist(), following


def test_every_rank_knows_where_each_token_is() -> None:
    results = VirtualCluster(3, memory=False).run(follow).results
    for rank, (everywhere, mine, following) in enumerate(results):
        assert everywhere == results[0][0] and everywhere[rank] == mine
        assert set(following) - set(mine) <= {9, 10}  # all ranks get these tokens, and one rank stores each
    assert (np.sort(np.concatenate(results[0][0])) == np.arange(16)).all()


def test_it_grows_without_copying_everything_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that grows token by token copies only a bounded multiple of its tokens."""
    copied: list[int] = []
    grow = ShardedCache._grow

    def counted(cache: ShardedCache, least: int) -> None:
        copied.append(cache._filled)
        grow(cache, least)

    def program(ring: Ring, tokens: int) -> None:
        cache = ShardedCache(ring, batch=1, kv_heads=1, head_dim=1)
        for _ in range(tokens):
            cache.append(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))

    monkeypatch.setattr(ShardedCache, "_grow", counted)
    for tokens in (100, 1000):
        copied.clear()
        VirtualCluster(1, memory=False).run(program, tokens)
        assert 0 < sum(copied) <= tokens * GROWTH / (GROWTH - 1), tokens


def test_room_is_used_before_it_grows() -> None:
    def program(ring: Ring) -> list[int]:
        layout = contiguous(4, 2)
        k, v = (layout.shard(x, ring.rank) for x in numbered(4))
        cache = ShardedCache.of_shards(ring, layout, k, v, room=2)
        before = cache._k.data_ptr()
        cache.append(*numbered(4))
        return [cache.capacity, cache.local_length, int(cache._k.data_ptr() == before)]

    assert VirtualCluster(2).run(program).results == [[4, 4, 1]] * 2


def a_cache(ring: Ring, tokens: int = 6) -> ShardedCache:
    cache = ShardedCache(ring, batch=1, kv_heads=2, head_dim=3)
    cache.append(*numbered(tokens))
    return cache


def query(**change: Any) -> Tensor:
    return torch.ones(*change.get("shape", (1, 4, 1, 3)), dtype=change.get("dtype", torch.float32))


WRONG: dict[str, tuple[Callable[[ShardedCache], Any], type[Exception], str]] = {
    "more queries than tokens": (lambda c: decode(query(shape=(1, 4, 7, 3)), c), ShapeError, "6 tokens"),
    "no query": (lambda c: decode(query(shape=(1, 4, 0, 3)), c), ShapeError, "at least one"),
    "another batch": (lambda c: decode(query(shape=(2, 4, 1, 3)), c), ShapeError, "q (1, H, n, 3)"),
    "heads that do not divide": (lambda c: decode(query(shape=(1, 3, 1, 3)), c), ShapeError, "cache's 2"),
    "another head dim": (lambda c: decode(query(shape=(1, 4, 1, 4)), c), ShapeError, "(1, 4, 1, 4)"),
    "no tensor": (lambda c: decode(3, c), ShapeError, "int"),  # type: ignore[call-overload]
    "another dtype": (lambda c: decode(query(dtype=torch.float64), c), DtypeError, "torch.float32"),
    "another device": (lambda c: decode(query().to("meta"), c), DeviceError, "meta"),
    "a query that wants gradients": (lambda c: decode(query().requires_grad_(), c), BackendError, "no_grad"),
    "sinks of other heads": (
        lambda c: decode(query(), c, sinks=torch.zeros(3)), ShapeError, "sinks as a tensor (4,)",
    ),
    "sinks that want gradients": (
        lambda c: decode(query(), c, sinks=torch.zeros(4, requires_grad=True)), BackendError, "no_grad",
    ),
    "packed documents": (
        lambda c: decode(query(), c, mask=Mask(documents=(3, 3))), MaskError, "one document",
    ),
    "no mask": (lambda c: decode(query(), c, mask="causal"), MaskError, "str"),  # type: ignore[call-overload]
    "an unknown merge": (lambda c: decode(query(), c, merge="ring"), BackendError, "all-reduce, tree"),
    "a softcap of nothing": (lambda c: decode(query(), c, softcap=0.0), MaskError, "softcap="),
    "a softcap that the block does not know": (
        lambda c: decode(query(), c, softcap=2.0, block=Plain()), BackendError, "block='blockwise'",
    ),
    "a scale of NaN": (lambda c: decode(query(), c, scale=math.nan), DtypeError, "finite"),
    "an unknown block": (lambda c: decode(query(), c, block="fast"), BackendError, "'fast'"),
    "no block": (lambda c: decode(query(), c, block=None), BackendError, "got: None"),  # type: ignore[call-overload]
    "an error that nobody foresaw": (lambda c: decode(query(), c, block=Broken()), KeyError, "on this machine"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_on_every_rank(name: str) -> None:
    wrong_call, kind, words = WRONG[name]

    def call(ring: Ring, at_fault: bool) -> None:
        (wrong_call if at_fault else lambda c: decode(query(), c))(a_cache(ring))

    for wrong in ((0, 1), (1,)):
        assert_refused(2, call, kind, words, wrong)


def empty(ring: Ring) -> None:
    decode(query(), ShardedCache(ring, batch=1, kv_heads=2, head_dim=3))


def other_lengths(ring: Ring) -> None:
    """Decode where rank 1's cache lacks a token."""
    decode(query(), a_cache(ring, 6 if ring.rank != 1 else 5))


def other_places(ring: Ring) -> None:
    """Decode where counts are equal on all ranks, but positions differ."""
    layout = (contiguous, zigzag)[ring.rank % 2](5, ring.world_size)
    k, v = (layout.shard(x, ring.rank) for x in numbered(5))
    decode(query(), ShardedCache.of_shards(ring, layout, k, v))


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        (empty, ShapeError, "an empty cache"),
        (other_lengths, AgreementError, "rank 1: cache of 5 tokens"),
        (other_places, AgreementError, "cache of 5 tokens ["),
    ],
)
def test_empty_and_different_caches_are_refused_on_every_rank(
    program: Callable[[Ring], Any], kind: type[RinglabError], words: str
) -> None:
    for error in errors_on(3, program):
        assert type(error) is kind and words in str(error), error


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (lambda c: c.append(*numbered(2)[:1], numbered(3)[1]), ShapeError, "v of the new tokens"),
        (lambda c: c.append(numbered(1)[0][:, :1], numbered(1)[1]), ShapeError, "k of the new tokens"),
        (lambda c: c.append(*(x.double() for x in numbered(1))), DtypeError, "float64"),
        (lambda c: c.append(*(x.to("meta") for x in numbered(1))), DeviceError, "meta"),
        (lambda c: ShardedCache("ring", batch=1, kv_heads=1, head_dim=1), WorldSizeError, "ring="),
        (lambda c: ShardedCache.of_shards(c.ring, "zigzag", *numbered(2)), LayoutError, "zigzag(S, P)"),
        (lambda c: ShardedCache.of_shards(c.ring, contiguous(2, 2), *numbered(2)), WorldSizeError, "1 ranks"),
        (
            lambda c: ShardedCache.of_shards(c.ring, contiguous(3, 1), *numbered(2)),
            ShapeError,
            "(B, K, 3, D)",
        ),
    ],
)
def test_what_does_not_fit_a_cache(
    spoil: Callable[[ShardedCache], Any], kind: type[RinglabError], words: str
) -> None:
    [error] = errors_on(1, lambda ring: spoil(a_cache(ring)))
    assert type(error) is kind and words in str(error), error


def test_decode_without_a_cache() -> None:
    with pytest.raises(ShapeError, match="ShardedCache"):
        decode(query(), None)  # type: ignore[call-overload]
