"""One interface to both kinds of cache: sizes, lengths, and checks of queries against a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ringlab.comm.protocol import Comm
from ringlab.comm.ring import Ring
from ringlab.errors import CacheError, DeviceError, DtypeError, ShapeError
from ringlab.schedules.cache import CacheShard, ShardedCache
from ringlab.schedules.decode import check_gradients
from ringlab.serving.paged_cache import PagedCache

Cache: TypeAlias = ShardedCache | PagedCache


@dataclass(frozen=True)
class CacheSizes:
    """The batch, key/value heads and head dims of a cache, and the dtype and device of its tensors."""

    B: int
    K: int
    D: int
    Dv: int
    dtype: torch.dtype
    device: torch.device


def sizes_of(cache: Any) -> CacheSizes:
    """Return the sizes of a cache. Raises: CacheError for a value that is not a cache."""
    if isinstance(cache, PagedCache):
        return CacheSizes(1, cache.kv_heads, cache.head_dim, cache.value_dim, cache.dtype, cache.device)
    if isinstance(cache, ShardedCache):
        B, K, _, D = cache.k.shape
        return CacheSizes(B, K, D, cache.v.shape[3], cache.k.dtype, cache.k.device)
    raise CacheError("a ShardedCache or a PagedCache", type(cache).__name__)


def comm_of(cache: Any) -> Comm | None:
    """Return the transport of a cache's ranks, or None if the value has no ring."""
    ring = getattr(cache, "ring", None)
    return ring.comm if isinstance(ring, Ring) else None


def check_sequences(cache: Cache, sequences: Sequence[int] | None) -> None:
    """Check that a call on this cache may have the argument `sequences`.

    Raises: CacheError if a PagedCache gets no sequences or a ShardedCache gets some, or if `cache` is not a
    cache.
    """
    sizes_of(cache)
    if isinstance(cache, PagedCache):
        if not isinstance(sequences, Sequence) or not sequences:
            raise CacheError(
                "the sequences of a PagedCache", repr(sequences), "the numbers that add() returned"
            )
        cache.tables.check(sequences)
    elif sequences is not None:
        raise CacheError(
            "a ShardedCache without sequences=", repr(sequences), "PagedCache has numbered sequences"
        )


def lengths_of(cache: Cache, sequence: int | None) -> list[int]:
    """Return the number of tokens of a sequence on each rank; `sequence` is None for a ShardedCache."""
    if isinstance(cache, PagedCache):
        assert sequence is not None
        return cache.lengths(sequence)
    return cache.lengths


def shard_of(cache: Cache, sequence: int | None) -> CacheShard:
    """Return this rank's tokens of a sequence; `sequence` is None for a ShardedCache."""
    if isinstance(cache, PagedCache):
        assert sequence is not None
        return cache.shard(sequence)
    return cache


def check_query(q: Any, sizes: CacheSizes, tokens: int | None) -> None:
    """Check that q fits a cache of these sizes and, unless `tokens` is None, has `tokens` rows.

    Raises: ShapeError, DtypeError, DeviceError; BackendError for a q that requires gradients.
    """
    shape = tuple(q.shape) if isinstance(q, Tensor) else None
    if shape is None or len(shape) != 4 or (shape[0], shape[3]) != (sizes.B, sizes.D):
        raise ShapeError(f"q ({sizes.B}, H, n, {sizes.D})", str(shape or type(q).__name__))
    if tokens is not None and shape[2] != tokens:
        raise ShapeError(f"q with the rows of {tokens} new tokens", str(shape))
    if q.dtype != sizes.dtype:
        raise DtypeError(f"q in {sizes.dtype}, the dtype of the cache", str(q.dtype))
    if q.device != sizes.device:
        raise DeviceError(f"q on {sizes.device}, the device of the cache", str(q.device))
    check_gradients(q=q)


def describe_cache(cache: Cache, sequences: Sequence[int] | None) -> str:
    """Return a description of a cache and some of its sequences, which must be equal on all ranks."""
    sizes = sizes_of(cache)
    kind = f"K={sizes.K} D={sizes.D} Dv={sizes.Dv} {sizes.dtype}"
    if isinstance(cache, PagedCache):
        tables = cache.tables
        where = [(one, tables.lengths[one], *tables.pages[one]) for one in sequences or ()]
        shown = str(where) if len(str(where)) < 100 else f"#{hash(tuple(where)):x}"
        return f"pages of {cache.page} by {cache.interleave}, {kind}, sequences (length, pages) {shown}"
    lengths = str(cache.lengths) if len(cache.lengths) <= 16 else f"#{hash(tuple(cache.lengths)):x}"
    return f"cache of {cache.length} tokens {lengths} {kind}"
