"""A wrong call of decode or prefill is refused on every rank, by name, before anything is sent or stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringlab import ShardedCache
from ringlab.comm.ring import Ring
from ringlab.errors import (
    AgreementError,
    BackendError,
    CacheError,
    DeviceError,
    DtypeError,
    LayoutError,
    MaskError,
    RinglabError,
    ShapeError,
    WorldSizeError,
)
from ringlab.layout import Layout, Run, contiguous, zigzag
from ringlab.mask import Mask
from ringlab.serving import PagedCache, decode_heads, prefill
from tests.refusals import assert_refused, errors_on
from tests.schedules.problems import Broken


def paged(ring: Ring, pages: int = 4, held: int = 3) -> PagedCache:
    """Return a cache with sequence 0 of `held` tokens and sequence 1 of one token."""
    cache = PagedCache(ring, kv_heads=2, head_dim=4, pages=pages, page=2)
    for _ in range(2):
        cache.add()
    cache.append(torch.ones(1, 2, held + 1, 4), torch.ones(1, 2, held + 1, 4), [0, 1], [held, 1])
    return cache


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*(shape or (1, 2, 2, 4)), dtype=dtype)


def right_decode(cache: PagedCache) -> Any:
    return decode_heads(rows(), cache, [0, 1])


def chunk(cache: PagedCache, n: int = 4, wants: str = "", **change: Any) -> Any:
    """Prefill n further tokens of sequence 0."""
    layout = cache.next_layout(0, n)
    own = layout.length(cache.ring.rank)
    given: dict[str, Any] = {"q": rows(1, 4, own, 4), "k": rows(1, 2, own, 4), "v": rows(1, 2, own, 4)}
    given |= {"layout": layout, "sequence": 0} | change
    if wants:
        given[wants].requires_grad_()
    return prefill(given.pop("q"), given.pop("k"), given.pop("v"), cache, **given)


Wrong = tuple[Callable[[PagedCache], Any], type[Exception], str]
DECODES: dict[str, Wrong] = {
    "no sequences": (lambda c: decode_heads(rows(), c), CacheError, "sequences of a PagedCache"),
    "an unknown sequence": (lambda c: decode_heads(rows(), c, [0, 7]), CacheError, "[0, 7]"),
    "a sequence twice": (lambda c: decode_heads(rows(), c, [0, 0]), CacheError, "each at most once"),
    "rows of one sequence": (lambda c: decode_heads(rows(1, 2, 1, 4), c, [0, 1]), ShapeError, "2 new tokens"),
    "more rows than tokens": (lambda c: decode_heads(rows(), c, [1], [2]), ShapeError, "1 tokens of sequence 1"),
    "no row": (lambda c: decode_heads(rows(), c, [0, 1], [2, 0]), ShapeError, "at least one token"),
    "half a token": (lambda c: decode_heads(rows(), c, [0, 1], [1.0, 1]), ShapeError, "[1.0, 1]"),  # type: ignore[list-item]
    "a sequence that is not in a list": (lambda c: decode_heads(rows(), c, 1), CacheError, "got: 1"),  # type: ignore[call-overload]
    "a batch": (lambda c: decode_heads(rows(2, 2, 2, 4), c, [0, 1]), ShapeError, "q (1, H, n, 4)"),
    "heads that ranks cannot share": (
        lambda c: decode_heads(rows(1, 2, 2, 4), c, [0, 1], queries="all"), ShapeError, "and by 3 ranks",
    ),
    "heads that do not divide": (lambda c: decode_heads(rows(1, 1, 2, 4), c, [0, 1]), ShapeError, "3 heads"),
    "another dtype": (lambda c: decode_heads(rows(dtype=torch.float64), c, [0, 1]), DtypeError, "torch.float32"),
    "gradients": (lambda c: decode_heads(rows().requires_grad_(), c, [0, 1]), BackendError, "no_grad"),
    "sinks of all heads": (
        lambda c: decode_heads(rows(), c, [0, 1], sinks=torch.zeros(6)), ShapeError, "sinks as a tensor (2,)",
    ),
    "sinks that want gradients": (
        lambda c: decode_heads(rows(), c, [0, 1], sinks=torch.zeros(2, requires_grad=True)), BackendError, "no_grad",
    ),
    "an error that nobody foresaw": (lambda c: decode_heads(rows(), c, [0, 1], block=Broken()), KeyError, "on this machine"),
    "an unknown merge": (lambda c: decode_heads(rows(), c, [0, 1], merge="sum"), BackendError, "all-to-all"),
    "unknown queries": (lambda c: decode_heads(rows(), c, [0, 1], queries="some"), BackendError, "own, all"),
    "documents": (lambda c: decode_heads(rows(), c, [0, 1], mask=Mask(documents=(3,))), MaskError, "document"),
}  # fmt: skip
PREFILLS: dict[str, Wrong] = {
    "no sequence": (lambda c: chunk(c, sequence=None), CacheError, "sequences of a PagedCache"),
    "another layout": (lambda c: chunk(c, layout=contiguous(4, 3)), LayoutError, "cache.next_layout"),
    "no layout": (lambda c: chunk(c, layout=4), LayoutError, "cache.next_layout"),
    "too few pages": (lambda c: chunk(c, n=40), CacheError, "free pages"),
    "keys of another length": (lambda c: chunk(c, k=rows(1, 2, 9, 4)), ShapeError, "k of the new tokens"),
    "values of another head dim": (lambda c: chunk(c, v=rows(1, 2, 1, 5)), ShapeError, "v of the new tokens"),
    "queries of another length": (lambda c: chunk(c, q=rows(1, 4, 9, 4)), ShapeError, "new tokens"),
    "heads that do not divide": (
        lambda c: chunk(c, q=rows(1, 3, c.next_layout(0, 4).length(c.ring.rank), 4)), ShapeError, "3 heads",
    ),
    "a mask without causality": (lambda c: chunk(c, mask=Mask(causal=False)), MaskError, "causal mask"),
    "a prefix that is not here yet": (lambda c: chunk(c, mask=Mask(prefix=8)), MaskError, "among the 7 tokens"),
    "an unknown way": (lambda c: chunk(c, travels="v"), BackendError, "auto, kv, q"),
    "queries that want gradients": (lambda c: chunk(c, wants="q"), BackendError, "q that requires"),
    "keys that want gradients": (lambda c: chunk(c, wants="k"), BackendError, "k that requires"),
    "values that want gradients": (lambda c: chunk(c, wants="v"), BackendError, "v that requires"),
    "sinks that want gradients": (
        lambda c: chunk(c, sinks=torch.zeros(4, requires_grad=True)), BackendError, "sinks that require",
    ),
    "sinks of other heads": (lambda c: chunk(c, sinks=torch.zeros(2)), ShapeError, "sinks as a tensor (4,)"),
    "no keys": (lambda c: chunk(c, k=None), ShapeError, "k of the new tokens"),
    "a sequence that is a list": (lambda c: chunk(c, sequence=[0]), CacheError, "[[0]]"),
    "an error that nobody foresaw": (lambda c: chunk(c, block=Broken()), KeyError, "on this machine"),
}  # fmt: skip
CALLS = {f"decode: {name}": (*wrong, right_decode) for name, wrong in DECODES.items()} | {
    f"prefill: {name}": (*wrong, chunk) for name, wrong in PREFILLS.items()
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused_on_every_rank(name: str) -> None:
    wrong, kind, words, right = CALLS[name]

    def call(ring: Ring, at_fault: bool) -> None:
        cache = paged(ring)
        try:
            (wrong if at_fault else right)(cache)
        finally:
            assert cache.length(0) == 3, "the cache has changed"

    assert_refused(3, call, kind, words, (1,))


def assert_all_disagree(P: int, call: Callable[[Ring], Any]) -> None:
    assert [type(error) for error in errors_on(P, call)] == [AgreementError] * P


def test_caches_that_differ_are_refused() -> None:
    def of_tokens(ring: Ring) -> None:
        tokens = ShardedCache(ring, batch=1, kv_heads=2, head_dim=4)
        tokens.append(rows(1, 2, 3 + ring.rank, 4), rows(1, 2, 3 + ring.rank, 4))
        decode_heads(rows(), tokens)

    def of_values(ring: Ring) -> None:
        cache = PagedCache(ring, kv_heads=2, head_dim=4, value_dim=4 + ring.rank, pages=2)
        cache.append(rows(), rows(1, 2, 2, 4 + ring.rank), [cache.add()], [2])
        decode_heads(rows(1, 2, 1, 4), cache, [0])

    assert_all_disagree(2, lambda ring: right_decode(paged(ring, held=3 if ring.rank else 2)))
    assert_all_disagree(2, of_tokens)
    assert_all_disagree(2, of_values)


def test_sinks_on_one_rank_only_are_refused() -> None:
    def sinks(ring: Ring, heads: int) -> Tensor | None:
        return torch.zeros(heads) if ring.rank else None

    assert_all_disagree(2, lambda ring: decode_heads(rows(), paged(ring), [0, 1], sinks=sinks(ring, 2)))
    assert_all_disagree(2, lambda ring: chunk(paged(ring), sinks=sinks(ring, 4)))


def test_layouts_that_differ_are_refused() -> None:
    """Layouts that deal equal numbers of different tokens are refused."""
    dealt = Layout(4, 2, "dealt", ((Run(0, 1, 2),), (Run(2, 1, 2),)))
    other = Layout(4, 2, "dealt", ((Run(2, 1, 2),), (Run(0, 1, 2),)))

    def call(ring: Ring) -> None:
        cache = ShardedCache(ring, batch=1, kv_heads=2, head_dim=4)
        prefill(rows(), rows(), rows(), cache, layout=(dealt, other)[ring.rank])

    assert_all_disagree(2, call)


def sharded(c: PagedCache) -> ShardedCache:
    cache = ShardedCache(c.ring, batch=1, kv_heads=2, head_dim=4)
    cache.append(rows(), rows())
    return cache


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (lambda c: decode_heads(rows(), "cache"), CacheError, "a PagedCache"),
        (lambda c: prefill(rows(), rows(), rows(), None, layout=zigzag(2, 1)), CacheError, "NoneType"),
        (lambda c: decode_heads(rows(), sharded(c), [0]), CacheError, "without sequences="),
        (lambda c: prefill(rows(), rows(), rows(), sharded(c), layout=zigzag(2, 2)), WorldSizeError, "1 ranks"),
        (lambda c: PagedCache("ring", kv_heads=1, head_dim=1, pages=1), WorldSizeError, "ring="),
        (lambda c: PagedCache(c.ring, kv_heads=1, head_dim=1, pages=0), CacheError, "pages=0"),
        (lambda c: PagedCache(c.ring, kv_heads=1, head_dim=1, pages=1, page=3, interleave=2), CacheError, "divisible"),
        (lambda c: c.append(rows(1, 2, 1, 4), rows(1, 2, 1, 4), 0), CacheError, "got: 0"),
        (lambda c: c.append(rows(1, 2, 1, 4), rows(1, 2, 1, 4), [1, 0], [2, -1]), ShapeError, "≥ 0 for each"),
        (lambda c: c.append(rows(1, 2, 1, 4), rows(1, 2, 1, 4), [0, 1], [1]), ShapeError, "each of 2"),
        (lambda c: c.append(rows(1, 2, 1, 4), rows(1, 2, 1, 4), [0], [1.0]), ShapeError, "[1.0]"),
        (lambda c: c.append(rows(1, 2, 1, 4), rows(1, 2, 2, 4), [0]), ShapeError, "v of the new tokens"),
        (lambda c: c.append(*[rows(1, 2, 1, 4, dtype=torch.float64)] * 2, [0]), DtypeError, "float64"),
        (lambda c: c.append(*[rows(1, 2, 1, 4).to("meta")] * 2, [0]), DeviceError, "meta"),
        (lambda c: c.append(*[rows(1, 2, 90, 4)] * 2, [0], [90]), CacheError, "free(sequence)"),
        (lambda c: c.fork(0, 4), CacheError, "0 to 3 tokens"),
        (lambda c: c.fork(9), CacheError, "[9]"),
        (lambda c: c.shard(9), CacheError, "[9]"),
    ],
)  # fmt: skip
def test_a_wrong_use_of_a_cache(
    spoil: Callable[[PagedCache], Any], kind: type[RinglabError], words: str
) -> None:
    """A wrong use of a cache is refused and leaves the cache unchanged."""

    def contents(cache: PagedCache) -> Any:
        return cache.free_pages, [cache.shard(sequence).k.tolist() for sequence in cache.sequences]

    def call(ring: Ring) -> None:
        cache = paged(ring)
        before = contents(cache)
        try:
            spoil(cache)
        finally:
            assert contents(cache) == before

    [error] = errors_on(1, call)
    assert type(error) is kind and words in str(error), error
