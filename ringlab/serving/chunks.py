"""Prefill in chunks: the next n tokens of a prompt attend to the cached prefix and causally to themselves.

The cache is spread over the ranks, and so is the chunk. Either the K/V of prefix and chunk travel around the
ring, or the queries travel and their partials return to the rows' owners. The K/V of a long prefix are many
bytes, and the queries of a short chunk are few.
Source: arXiv 2411.01783, section 3 (pass-KV and pass-Q).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

from torch import Tensor

from ringlab.blocks import get_block, record_block
from ringlab.blocks.protocol import Block
from ringlab.errors import BackendError, MaskError, ShapeError
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.merge import with_sinks
from ringlab.rank_agreement import checked
from ringlab.schedules.call import AttentionCall
from ringlab.schedules.decode import check_gradients, mask_of_one_document
from ringlab.scores import ScoreRules, check_scale, check_sinks
from ringlab.serving.checks import (
    Cache,
    check_query,
    check_sequences,
    comm_of,
    describe_cache,
    lengths_of,
    sizes_of,
)
from ringlab.serving.paged_cache import PagedCache
from ringlab.serving.prefill_schedules import TRAVELS, Chunk
from ringlab.torch_modes import ends_graphs, without_autocast
from ringlab.types import KeyValue, Query, Sinks, Value


@overload
def prefill(
    q: Query,
    k: KeyValue,
    v: Value,
    cache: Cache,
    sequence: int | None = ...,
    *,
    layout: Layout,
    travels: str = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Sinks | None = ...,
    block: str | Block = ...,
    return_lse: Literal[False] = ...,
    validate: bool = ...,
) -> Tensor: ...


@overload
def prefill(
    q: Query,
    k: KeyValue,
    v: Value,
    cache: Cache,
    sequence: int | None = ...,
    *,
    layout: Layout,
    travels: str = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Sinks | None = ...,
    block: str | Block = ...,
    return_lse: Literal[True],
    validate: bool = ...,
) -> tuple[Tensor, Tensor]: ...


@ends_graphs
def prefill(
    q: Query,
    k: KeyValue,
    v: Value,
    cache: Cache,
    sequence: int | None = None,
    *,
    layout: Layout,
    travels: str = "auto",
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Sinks | None = None,
    block: str | Block = "auto",
    return_lse: bool = False,
    validate: bool = True,
) -> Any:
    """Return attention of this rank's new tokens over all cached and new tokens, and append the new tokens.

    q, k, v: this rank's shards of the next tokens under `layout`. The layout's position 0 is the first of
    these tokens. A `ShardedCache` accepts any layout; a `PagedCache` accepts `cache.next_layout(sequence,
    n)`.
    sequence: the number of the sequence in a `PagedCache`.
    travels: "kv", "q", or "auto", which chooses the one that sends fewer bytes and records the choice in the
    trace.
    mask: must be causal. It may have a window, or a prefix that ends within the cached and new tokens, but
    no documents.
    scale, softcap, block: as in `ring_attention`. Everything is computed in the cache's dtype, even under
    autocast.
    sinks: (H,) logits as in `ring_attention`, the same on all ranks.
    return_lse: return (out, lse), where lse is (B, H, L) and a natural logarithm.
    validate: whether the ranks compare their calls and caches first, by messages of 512 bytes.

    Raises: ShapeError, CacheError, LayoutError, WorldSizeError, DtypeError, DeviceError, MaskError or
    BackendError on a rank that is called wrongly, and AgreementError on all other ranks; BackendError for q,
    k, v or sinks that require gradients, because nothing is saved for backward. After an error the cache is
    unchanged.

    >>> import torch
    >>> from ringlab import ShardedCache, VirtualCluster, oracle, zigzag
    >>> from ringlab.serving import prefill
    >>> q, k, v = torch.randn(3, 1, 2, 20, 8).unbind()
    >>> def program(ring):
    ...     cache, found = ShardedCache(ring, batch=1, kv_heads=2, head_dim=8), []
    ...     for chunk in (slice(0, 13), slice(13, 20)):
    ...         layout = zigzag(chunk.stop - chunk.start, ring.world_size)
    ...         shards = layout.shard((q[:, :, chunk], k[:, :, chunk], v[:, :, chunk]), ring.rank)
    ...         found.append(prefill(*shards, cache, layout=layout))
    ...     return found
    >>> chunks = zip(*VirtualCluster(2).run(program).results, strict=True)
    >>> out = torch.cat([zigzag(n, 2).unshard(chunk) for n, chunk in zip((13, 7), chunks)], dim=2)
    >>> torch.allclose(out.double(), torch.from_numpy(oracle.attention(q, k, v, causal=True).out), atol=1e-5)
    True
    """

    def check() -> tuple[tuple[Chunk, str], str]:
        chunk = _chunk(q, k, v, cache, sequence, layout, mask, scale, softcap, block)
        check_sinks(sinks, q)
        check_gradients(k=k, v=v, sinks=sinks)
        if travels not in ("auto", *TRAVELS):
            raise BackendError(f"travels= one of auto, {', '.join(TRAVELS)}", repr(travels))
        route = chunk.fewer_bytes if travels == "auto" else travels
        sequences = None if sequence is None else [sequence]
        options = f"{layout!r} #{hash(layout):x} {route} {chunk.mask} scale={scale} softcap={softcap} {chunk.call.block.name}"
        options += "" if sinks is None else " sinks"
        return (chunk, route), f"prefill H={q.shape[1]} {describe_cache(cache, sequences)} {options}"

    chunk, route = checked(comm_of(cache) if validate else None, check)
    comm = cache.ring.comm
    record_block(comm, block, chunk.call.block, chunk.call.rules.requirements)
    chunk.call.record_short_tiles()
    if travels == "auto":
        comm.record_choice("travels='auto'", route)
    with without_autocast(q.device.type):
        part = with_sinks(TRAVELS[route](chunk), sinks)
    if isinstance(cache, PagedCache):
        cache.append_shards(layout, chunk.k, chunk.v, chunk.sequence)
    else:
        cache.append_shards(layout, chunk.k, chunk.v)
    out = part.out.to(q.dtype)
    return (out, part.lse) if return_lse else out


def _chunk(
    q: Any,
    k: Any,
    v: Any,
    cache: Cache,
    sequence: int | None,
    layout: Layout,
    mask: Mask | None,
    scale: float | None,
    softcap: float | None,
    block: str | Block,
) -> Chunk:
    """Return the chunk of a call of `prefill`. Raises: the errors of `prefill` for a wrong call."""
    check_sequences(cache, None if sequence is None else [sequence])
    if isinstance(cache, PagedCache):
        assert sequence is not None
        cache.check_shards(layout, k, v, sequence)
    else:
        cache.check_shards(layout, k, v)
    check_query(q, sizes_of(cache), layout.length(cache.ring.rank))
    H, K = q.shape[1], k.shape[1]
    if not H or H % K:
        raise ShapeError(f"query heads divisible by the cache's {K} key/value heads", f"{H} heads")
    check_scale(scale, q.dtype)
    rules = ScoreRules(softcap)
    chosen = get_block(block, q, rules.requirements, v)
    start = sum(lengths_of(cache, sequence))
    whole = _mask(mask, start + layout.S)
    call = AttentionCall(
        cache.ring,
        layout,
        chosen,
        replace(whole, prefix=max(0, whole.prefixes[0] - start)),
        q.shape[3] ** -0.5 if scale is None else float(scale),
        (H, K),
        rules=rules,
    )
    return Chunk(q.detach(), k.detach(), v.detach(), cache, sequence, whole, call)


def _mask(mask: Mask | None, S: int) -> Mask:
    """Return the mask, which is causal by default.

    Raises: MaskError if it has documents, or if the first `S` tokens may see later ones under it.
    """
    mask = mask_of_one_document(mask)
    if not mask.causal or mask.prefixes[0] > S:
        raise MaskError(
            f"a causal mask, whose prefix is among the {S} tokens up to the end of the chunk",
            repr(mask),
            "pass the whole prefix in the first chunk; rows without a causal mask cannot be computed in chunks",
        )
    return mask
