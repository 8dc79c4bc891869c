"""Decode where each rank has a share of the query heads, and some tokens of every sequence.

Weights are tensor-parallel, so rank r computes the queries of its H/P heads. The K and V of all tokens are
spread over the same ranks. The queries are gathered, each rank attends to its own tokens with all heads, and
merged partials return to the ranks of their heads. If every rank already has the queries of all heads, as in
Helix, nothing is gathered.
Sources: vLLM's decode context parallelism; arXiv 2507.07120, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ringlab.blocks import get_block, record_block, record_short_tiles
from ringlab.blocks.protocol import Block
from ringlab.comm.protocol import thread_safe_if
from ringlab.comm.ring import Ring
from ringlab.errors import BackendError, ShapeError
from ringlab.handles import handle_of, object_of
from ringlab.mask import Mask
from ringlab.merge import Partial, state_dtype, with_sinks
from ringlab.rank_agreement import checked
from ringlab.schedules.cache import ShardedCache
from ringlab.schedules.decode import (
    attend_to_cache,
    check_gradients,
    fits_a_graph,
    mask_of_one_document,
    owned_results,
)
from ringlab.scores import ScoreRules, check_scale, check_sinks
from ringlab.serving.checks import (
    Cache,
    check_query,
    check_sequences,
    comm_of,
    describe_cache,
    lengths_of,
    shard_of,
    sizes_of,
)
from ringlab.serving.owners import MERGES, own_heads
from ringlab.serving.paged_cache import PagedCache
from ringlab.serving.tables import token_counts
from ringlab.torch_modes import ORDER, ends_graphs, without_autocast
from ringlab.types import Query, Sinks

QUERIES = ("own", "all")
_WHICH_HEADS = "queries='own' for a q of this rank's heads, queries='all' for one of all heads"


@overload
def decode_heads(
    q: Query,
    cache: Cache,
    sequences: Sequence[int] | None = ...,
    new: Sequence[int] | None = ...,
    *,
    queries: str = ...,
    heads: int | None = ...,
    merge: str = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Sinks | None = ...,
    block: str | Block = ...,
    return_lse: Literal[False] = ...,
    validate: bool = ...,
    ring: Ring | None = ...,
) -> Tensor: ...


@overload
def decode_heads(
    q: Query,
    cache: Cache,
    sequences: Sequence[int] | None = ...,
    new: Sequence[int] | None = ...,
    *,
    queries: str = ...,
    heads: int | None = ...,
    merge: str = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Sinks | None = ...,
    block: str | Block = ...,
    return_lse: Literal[True],
    validate: bool = ...,
    ring: Ring | None = ...,
) -> tuple[Tensor, Tensor]: ...


def decode_heads(
    q: Query,
    cache: Cache,
    sequences: Sequence[int] | None = None,
    new: Sequence[int] | None = None,
    *,
    queries: str = "own",
    heads: int | None = None,
    merge: str = "all-to-all",
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Sinks | None = None,
    block: str | Block = "auto",
    return_lse: bool = False,
    validate: bool = True,
    ring: Ring | None = None,
) -> Any:
    """Return attention of each sequence's last tokens over the whole cache, for this rank's H/P query heads.

    q: the queries of the tokens appended last, (B, heads, n, D) for a `ShardedCache`. For a `PagedCache` it
    is (1, heads, N, D), with the tokens of all `sequences` one after the other: `new[i]` tokens of
    `sequences[i]`, by default 1.
    queries: "own" if q has this rank's H/P heads, which are gathered first; "all" if it has all H heads on
    every rank.
    heads: H, which is compared with the heads of q. Without it, only one mistake is noticed: queries="own"
    for a q of all heads, because all ranks then have the same q.
    merge: how partials are merged on the ranks of their heads (see `ringlab.serving.owners`): "all-to-all"
    takes one round of messages, and "reduce-scatter" takes two.
    mask: causal by default; may have a window or a prefix, but no documents. It refers to each sequence's own
    positions.
    scale, softcap, block: as in `ring_attention`. Everything is computed in the cache's dtype, even under
    autocast.
    sinks: one logit for each head of q, as in `ring_attention`; they are counted once, after the ranks'
    partials are merged.
    return_lse: return (out, lse), where lse is (B, H/P, n) and a natural logarithm.
    validate: whether the ranks compare their calls and caches first, by messages of 512 bytes.
    ring: the ranks that compare their calls, by default those of the cache. `HelixGrid.attend` passes all
    ranks of its grid.

    Raises: ShapeError, CacheError, DtypeError, DeviceError, MaskError or BackendError on a rank that is
    called wrongly, and AgreementError on all other ranks; AgreementError on all ranks if their calls or
    caches differ; BackendError for a q or sinks that require gradients, because nothing is saved for
    backward.

    >>> import torch
    >>> from ringlab import VirtualCluster
    >>> from ringlab.serving import PagedCache, decode_heads
    >>> def program(ring):
    ...     cache = PagedCache(ring, kv_heads=2, head_dim=8, pages=4)
    ...     both = [cache.add(), cache.add()]
    ...     cache.append(torch.ones(1, 2, 7, 8), torch.full((1, 2, 7, 8), 3.0), both, new=[5, 2])
    ...     return decode_heads(torch.ones(1, 2, 2, 8), cache, both)
    >>> out, _ = VirtualCluster(2).run(program).results     # two of the four heads, a token of each sequence
    >>> out.shape, out.unique().item()
    (torch.Size([1, 2, 2, 8]), 3.0)
    """
    of_a_ring = isinstance(cache, (ShardedCache, PagedCache)) and (ring is None or isinstance(ring, Ring))
    if (
        torch.compiler.is_dynamo_compiling()
        and of_a_ring
        and fits_a_graph(q, sinks, mask, block, scale, softcap)
    ):
        out, lse = torch.ops.ringlab.decode_heads(
            ORDER, q, sinks, [handle_of(x) for x in (cache, mask, block, ring)],
            None if sequences is None else list(sequences), None if new is None else list(new), queries, heads, merge,
            block if isinstance(block, str) else "", scale, softcap, return_lse, validate,
            1 if queries == "own" else cache.ring.world_size, cache.value_dim,
        )  # fmt: skip
        return (out, lse) if return_lse else out
    return _decode(
        q, cache, sequences, new, queries=queries, heads=heads, merge=merge, mask=mask, scale=scale, softcap=softcap,
        sinks=sinks, block=block, return_lse=return_lse, validate=validate, ring=ring,
    )  # fmt: skip


@ends_graphs
def _decode(
    q: Any,
    cache: Any,
    sequences: Any,
    new: Any,
    *,
    queries: Any,
    heads: Any,
    merge: Any,
    mask: Any,
    scale: Any,
    softcap: Any,
    sinks: Any,
    block: Any,
    return_lse: bool,
    validate: bool,
    ring: Any,
) -> Any:
    """Return the result of `decode_heads`."""

    def check() -> tuple[tuple[list[_Rows], Mask, ScoreRules, Block], str]:
        rows = _rows(q, cache, sequences, new)
        _check_heads(q, cache, queries, heads, merge)
        check_scale(scale, q.dtype)
        check_sinks(sinks, q)
        check_gradients(sinks=sinks)
        visible, rules = mask_of_one_document(mask), ScoreRules(softcap)
        values = q.new_empty((0, 0, 0, sizes_of(cache).Dv))
        chosen = get_block(block, q, rules.requirements, values)
        options = f"{queries} {merge} {visible} scale={scale} softcap={softcap} {chosen.name}"
        options += "" if sinks is None else " sinks"
        of_rows = f"q {tuple(q.shape)} {[one.new for one in rows]}"
        return (rows, visible, rules, chosen), f"{of_rows} {describe_cache(cache, sequences)} {options}"

    compared = comm_of(cache) if ring is None else ring.comm
    rows, visible, rules, chosen = checked(compared if validate else None, check)
    comm = cache.ring.comm
    record_block(comm, block, chosen, rules.requirements)
    record_short_tiles(comm, chosen, ((one.new, shard_of(cache, one.sequence).k.shape[2]) for one in rows))
    q = q.detach()
    if queries == "own" and comm.world_size > 1:
        gathered = comm.all_gather(q, tag="decode queries")
        if validate:
            _check_different(gathered)
        q = torch.cat(gathered, dim=1)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    attend = thread_safe_if(chosen.thread_safe, _attend)
    with without_autocast(q.device.type):
        part = comm.compute("decode", attend, q, cache, rows, visible, chosen, scale, rules)
        of_own_heads = sinks if sinks is None or queries == "own" else sinks[own_heads(comm, len(sinks))]
        merged = with_sinks(MERGES[merge](comm, part), of_own_heads)
    out = merged.out.to(q.dtype)
    return (out, merged.lse) if return_lse else out


@torch.library.custom_op(
    "ringlab::decode_heads",
    mutates_args=("order",),
    tags=(torch.Tag.cudagraph_unsafe,),  # it sends messages, and plans on the CPU
    schema="(Tensor(a!) order, Tensor q, Tensor? sinks, SymInt[] handles, SymInt[]? sequences, SymInt[]? new,"
    " str queries, SymInt? heads, str merge, str block, float? scale, float? softcap, bool return_lse, bool validate,"
    " int shares, int value_dim) -> (Tensor out, Tensor lse)",
)
def _operator(
    order: Tensor, q: Tensor, sinks: Tensor | None, handles: list[int], sequences: list[int] | None,
    new: list[int] | None, queries: str, heads: int | None, merge: str, block: str, scale: float | None,
    softcap: float | None, return_lse: bool, validate: bool, shares: int, value_dim: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out and, if it is asked for, lse. This operator runs with the graph of torch.compile.

    order: see `ringlab.torch_modes.ORDER`. shares: the number of ranks that share the heads of q.
    """
    cache, mask, own_block, ring = map(object_of, handles)
    found = _decode(
        q.detach(), cache, sequences, new, queries=queries, heads=heads, merge=merge, mask=mask, scale=scale,
        softcap=softcap, sinks=None if sinks is None else sinks.detach(), block=block or own_block, return_lse=True,
        validate=validate, ring=ring,
    )  # fmt: skip
    return owned_results(found, return_lse)


@_operator.register_fake
def _shapes(order: Tensor, q: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return_lse, shares, value_dim = options[10], options[12], options[13]
    rows = q.shape[0], q.shape[1] // shares, q.shape[2]
    lse = q.new_empty(rows if return_lse else (0,), dtype=state_dtype(q.dtype))
    return q.new_empty((*rows, value_dim)), lse


@dataclass(frozen=True)
class _Rows:
    """The new tokens of one sequence: `new` rows of q from row `start` on.

    `sequence` is None for the tokens of a ShardedCache.
    """

    sequence: int | None
    start: int
    new: int


def _rows(q: Any, cache: Cache, sequences: Sequence[int] | None, new: Sequence[int] | None) -> list[_Rows]:
    """Return the rows of q by sequence. Raises: an error of `decode_heads` if q does not fit."""
    check_sequences(cache, sequences)
    if sequences is None:
        check_query(q, sizes_of(cache), None)
        new = [q.shape[2]] if new is None else new
    names: Sequence[int | None] = [None] if sequences is None else sequences
    new = token_counts(names, new)
    check_query(q, sizes_of(cache), sum(new))
    for name, n in zip(names, new, strict=True):
        held = sum(lengths_of(cache, name))
        if not 1 <= n <= held:
            raise ShapeError(
                "queries of at least one token of each sequence, all of them in the cache",
                f"{n} queries and {held} tokens" + ("" if name is None else f" of sequence {name}"),
                "append the new tokens' k and v to the cache first, on every rank",
            )
    starts = accumulate(new, initial=0)
    return [_Rows(name, start, n) for name, start, n in zip(names, starts, new, strict=False)]


def _check_heads(q: Tensor, cache: Cache, queries: str, given: int | None, merge: str) -> None:
    """Raise an error of `decode_heads` if the ranks cannot share the heads, or an option is unknown."""
    if queries not in QUERIES:
        raise BackendError(f"queries= one of {', '.join(QUERIES)}", repr(queries))
    if not isinstance(merge, str) or merge not in MERGES:
        raise BackendError(f"merge= one of {', '.join(MERGES)}", repr(merge))
    K, P = sizes_of(cache).K, cache.ring.world_size
    heads = q.shape[1] * (P if queries == "own" else 1)
    if given is not None and heads != given:
        raise ShapeError(
            f"{given} query heads on all ranks together, which is the value of heads=",
            f"{heads}: queries='{queries}', {q.shape[1]} heads in q and {P} ranks",
            _WHICH_HEADS,
        )
    if not heads or heads % K or heads % P:
        raise ShapeError(
            f"query heads divisible by the cache's {K} key/value heads and by {P} ranks",
            f"{heads} heads on all ranks together",
            _WHICH_HEADS,
        )


def _check_different(queries: list[Query]) -> None:
    """Raise ShapeError if all ranks gave the same queries.

    All ranks raise the error, because all of them have gathered the same queries.
    """
    first, *others = queries
    if first.numel() and first.min() < first.max() and all(map(partial(_alike, first), others)):
        raise ShapeError(
            "different heads from each rank, with queries='own'",
            f"the same {first.shape[1]} heads on all {len(queries)} ranks",
            _WHICH_HEADS,
        )


def _alike(one: Query, other: Query) -> bool:
    """Return whether the two queries are equal up to rounding."""
    return torch.allclose(one, other, rtol=0.0, atol=1e-2 * one.abs().max().item())


def _attend(
    q: Query,
    cache: Cache,
    rows: list[_Rows],
    mask: Mask,
    block: Block,
    scale: float,
    rules: ScoreRules,
) -> Partial:
    """Return the partial of all rows, where each row attends to this rank's keys of its own sequence."""
    parts = []
    for one in rows:
        part = q.narrow(2, one.start, one.new)
        parts.append(attend_to_cache(part, shard_of(cache, one.sequence), mask, block, scale, rules))
    if len(parts) == 1:
        return parts[0]
    return Partial(
        torch.cat([part.out for part in parts], dim=2), torch.cat([part.lse for part in parts], dim=2)
    )
