"""Decode: a few new tokens attend to a K/V cache that is spread over the ranks.

Every rank has the new queries and attends to its own part of the cache. Then the partials (out, lse) are
merged: either every rank gathers all of them and merges them in rank order, or they are merged along a tree
of log2 P exchanges. A message has B·H·n·(Dv + 1) numbers of the state dtype, whatever the length of the
sequence; Dv is the head dim of v.
Source of the tree: arXiv 2408.04093.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from ringlab.blocks import get_block, record_block, record_short_tiles
from ringlab.blocks.protocol import Block
from ringlab.blocks.tilewise import RunningPartial
from ringlab.comm.protocol import Comm, thread_safe_if
from ringlab.errors import BackendError, DeviceError, DtypeError, MaskError, ShapeError
from ringlab.handles import Handled, handle_of, object_of
from ringlab.mask import Mask
from ringlab.merge import Partial, merge, state_dtype, with_sinks
from ringlab.rank_agreement import checked
from ringlab.schedules.cache import CacheShard, ShardedCache
from ringlab.scores import PLAIN_RULES, ScoreRules, check_scale, check_sinks
from ringlab.torch_modes import ORDER, ends_graphs, owned, without_autocast
from ringlab.types import Query, Sinks

MERGES = ("all-reduce", "tree")


@overload
def decode(
    q: Query,
    cache: ShardedCache,
    *,
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Sinks | None = ...,
    block: str | Block = ...,
    merge: str = ...,
    return_lse: Literal[False] = ...,
    validate: bool = ...,
) -> Tensor: ...


@overload
def decode(
    q: Query,
    cache: ShardedCache,
    *,
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Sinks | None = ...,
    block: str | Block = ...,
    merge: str = ...,
    return_lse: Literal[True],
    validate: bool = ...,
) -> tuple[Tensor, Tensor]: ...


def decode(
    q: Query,
    cache: ShardedCache,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Sinks | None = None,
    block: str | Block = "auto",
    merge: str = "all-reduce",
    return_lse: bool = False,
    validate: bool = True,
) -> Any:
    """Return attention of the sequence's last tokens over the whole cache; all ranks return the same bits.

    q: the queries of the n tokens that were appended last, (B, H, n, D), the same on every rank.
    mask: causal by default; may have a window or a prefix, but no documents.
    scale, softcap, block: as in `ring_attention`. Everything is computed in the cache's dtype, even under
    autocast.
    sinks: (H,) logits as in `ring_attention`, the same on all ranks; they are counted once, after the ranks'
    partials are merged.
    merge: "all-reduce" takes one round of P − 1 messages to all other ranks; "tree" takes log2 P rounds of
    one message.
    return_lse: return (out, lse), where lse is (B, H, n) and a natural logarithm.
    validate: whether the ranks compare their calls and the lengths of their caches first, in log2 P rounds of
    512 bytes.

    Raises: ShapeError (for an empty cache, or a q that does not fit it), DtypeError, DeviceError, MaskError
    or BackendError on a rank that is called wrongly, and AgreementError on all other ranks; AgreementError
    on all ranks if caches differ; BackendError for a q or sinks that require gradients, because nothing is
    saved for backward.

    >>> import torch
    >>> from ringlab import ShardedCache, VirtualCluster, decode
    >>> def program(ring):
    ...     cache = ShardedCache(ring, batch=1, kv_heads=2, head_dim=8)
    ...     cache.append(torch.ones(1, 2, 5, 8), torch.full((1, 2, 5, 8), 3.0))
    ...     return decode(torch.ones(1, 4, 1, 8), cache)
    >>> out, same = VirtualCluster(2).run(program).results
    >>> out.shape, out.unique().item(), torch.equal(out, same)
    (torch.Size([1, 4, 1, 8]), 3.0, True)
    """
    if (
        torch.compiler.is_dynamo_compiling()
        and isinstance(cache, ShardedCache)
        and fits_a_graph(q, sinks, mask, block, scale, softcap)
    ):
        out, lse = torch.ops.ringlab.decode(
            ORDER, q, sinks, [handle_of(x) for x in (cache, mask, block)], block if isinstance(block, str) else "",
            scale, softcap, merge, return_lse, validate, cache.value_dim,
        )  # fmt: skip
        return (out, lse) if return_lse else out
    return _decode(q, cache, mask, scale, softcap, sinks, block, merge, return_lse, validate)


@ends_graphs
def _decode(
    q: Any,
    cache: Any,
    mask: Any,
    scale: Any,
    softcap: Any,
    sinks: Any,
    block: Any,
    merge: Any,
    return_lse: bool,
    validate: bool,
) -> Any:
    """Return the result of `decode`."""

    def check() -> tuple[tuple[Mask, ScoreRules, Block], str]:
        _check(q, cache)
        check_scale(scale, q.dtype)
        check_sinks(sinks, q)
        check_gradients(q=q, sinks=sinks)
        visible = mask_of_one_document(mask)
        if merge not in MERGES:
            raise BackendError(f"merge= one of {', '.join(MERGES)}", repr(merge))
        rules = ScoreRules(softcap)
        chosen = get_block(block, q, rules.requirements, cache.v)
        options = f"{visible} scale={scale} softcap={softcap} {chosen.name} merge={merge}"
        options += "" if sinks is None else " sinks"
        return (visible, rules, chosen), _describe(q, cache, options)

    compares = validate and isinstance(cache, ShardedCache)
    found = checked(cache.ring.comm if compares else None, check)
    visible, rules, chosen = found
    comm = cache.ring.comm
    record_block(comm, block, chosen, rules.requirements)
    record_short_tiles(comm, chosen, [(q.shape[2], cache.k.shape[2])])
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    attend = thread_safe_if(chosen.thread_safe, attend_to_cache)
    with without_autocast(q.device.type):
        part = comm.compute("decode", attend, q.detach(), cache, visible, chosen, scale, rules)
        whole = _merge_in_rank_order(comm, part) if merge == "all-reduce" else _merge_along_a_tree(comm, part)
        whole = with_sinks(whole, sinks)
    out = whole.out.to(q.dtype)
    return (out, whole.lse) if return_lse else out


def fits_a_graph(
    q: Any, sinks: Any, mask: Any, block: Any, scale: float | None, softcap: float | None
) -> bool:
    """Return whether an operator of torch.compile can take these arguments of a decode.

    Otherwise the graph ends before the call, which may then raise an error.
    """
    tensors = (q,) if sinks is None else (q, sinks)
    return (
        all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors)
        and q.ndim == 4
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and (mask is None or isinstance(mask, Handled))
        and isinstance(block, (str, Handled))
        and all(x is None or isinstance(x, (int, float)) for x in (scale, softcap))
    )


@torch.library.custom_op(
    "ringlab::decode",
    mutates_args=("order",),
    tags=(torch.Tag.cudagraph_unsafe,),  # it sends messages, and plans on the CPU
    schema="(Tensor(a!) order, Tensor q, Tensor? sinks, SymInt[] handles, str block, float? scale, float? softcap,"
    " str merge, bool return_lse, bool validate, int value_dim) -> (Tensor out, Tensor lse)",
)
def _operator(
    order: Tensor, q: Tensor, sinks: Tensor | None, handles: list[int], block: str, scale: float | None,
    softcap: float | None, merge: str, return_lse: bool, validate: bool, value_dim: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out and, if it is asked for, lse. This operator runs with the graph of torch.compile.

    order: see `ringlab.torch_modes.ORDER`.
    """
    cache, mask, own_block = map(object_of, handles)
    sinks = None if sinks is None else sinks.detach()
    found = _decode(q.detach(), cache, mask, scale, softcap, sinks, block or own_block, merge, True, validate)
    return owned_results(found, return_lse)


def owned_results(found: Any, return_lse: bool) -> tuple[Any, Any]:
    """Return (out, lse) as an operator may return them; lse is empty if it is not asked for."""
    out, lse = found
    return owned(out), owned(lse) if return_lse else lse.new_empty(0)


@_operator.register_fake
def _shapes(order: Tensor, q: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return_lse, value_dim = options[6], options[8]
    lse = q.new_empty(q.shape[:-1] if return_lse else (0,), dtype=state_dtype(q.dtype))
    return q.new_empty((*q.shape[:-1], value_dim)), lse


@dataclass(frozen=True)
class CacheTile:
    """Query rows, and keys of this rank's cache that all these rows see."""

    rows: slice
    keys: slice


def cache_tiles(mask: Mask, positions: Int64[np.ndarray, " L"], S: int, n: int) -> list[CacheTile]:
    """Return the tiles in which the last `n` of `S` tokens see the keys at these ascending positions.

    Each visible pair is in one tile. Keys that all rows see form one tile. Keys that only some rows see are
    in tiles of one row.
    """
    return row_tiles(mask, np.arange(S - n, S), positions, S)


def row_tiles(
    mask: Mask, rows: Int64[np.ndarray, " n"], positions: Int64[np.ndarray, " L"], S: int
) -> list[CacheTile]:
    """Return the tiles in which the tokens at `rows` (of `S` tokens) see the keys at these positions."""
    n, prefix = len(rows), mask.prefixes[0]
    upper = rows + 1 if mask.causal else np.full(n, S)
    lower = np.zeros(n, np.int64)
    if mask.window is not None:
        lower = rows - mask.window + 1
        upper = np.minimum(upper, rows + mask.window)
    lower, upper = np.maximum(lower, prefix), np.maximum(upper, prefix)
    first, last = (np.searchsorted(positions, x) for x in (lower, upper))
    of_prefix = int(np.searchsorted(positions, prefix))
    found = [CacheTile(slice(0, n), slice(0, of_prefix))]
    start, stop = int(first.max()), int(last.min())
    if start < stop:
        found.append(CacheTile(slice(0, n), slice(start, stop)))
        edges = [(row, int(first[row]), start) for row in range(n)]
        edges += [(row, stop, int(last[row])) for row in range(n)]
    else:
        edges = [(row, int(first[row]), int(last[row])) for row in range(n)]
    found += [CacheTile(slice(row, row + 1), slice(a, b)) for row, a, b in edges]
    return [tile for tile in found if tile.keys.start < tile.keys.stop]


def attend_to_cache(
    q: Query, cache: CacheShard, mask: Mask, block: Block, scale: float, rules: ScoreRules
) -> Partial:
    """Return the partial of all new rows over this rank's keys."""
    state, n = RunningPartial(q, cache.v.shape[3]), q.shape[2]
    rows = np.arange(cache.length - n, cache.length)
    for tile in cache_tiles(mask, cache.positions, cache.length, n):
        k, v = (x[..., tile.keys, :] for x in (cache.k, cache.v))
        of_tile = PLAIN_RULES
        if rules.requirements:
            of_tile = rules.of_tile(rows[tile.rows], cache.positions[tile.keys])
        part = block.forward(q[..., tile.rows, :], k, v, causal=False, scale=scale, rules=of_tile)
        state.add(tile.rows, part)
    return state.value()


def _pack(part: Partial) -> Tensor:
    """Return out and lse as one message of shape (B, H, n, Dv + 1)."""
    return torch.cat([part.out, part.lse.unsqueeze(-1)], dim=-1)


def _unpack(message: Tensor) -> Partial:
    return Partial(message[..., :-1], message[..., -1])


def _merge_in_rank_order(comm: Comm, part: Partial) -> Partial:
    """Return the merge of all ranks' partials, merged in rank order."""
    first, *others = comm.all_gather(_pack(part), tag="decode partials")
    total = _unpack(first)
    for other in others:
        total = merge(total, _unpack(other))
    return total


def _merge_along_a_tree(comm: Comm, part: Partial) -> Partial:
    """Return the merge of all ranks' partials after log2 P exchanges.

    The distance between the two ranks of an exchange doubles each time. Both merge the lower rank's partial
    first. Ranks beyond the largest power of two send their partial to a lower rank, and receive the result
    from that rank.
    """
    most = 1 << (comm.world_size.bit_length() - 1)
    total, beyond = _pack(part), comm.rank + most
    if comm.rank >= most:
        into = torch.empty_like(total)
        comm.exchange(send=(total,), to=comm.rank - most, tag="decode leaf").wait()
        work = comm.exchange(receive=(into,), source=comm.rank - most, tag="decode result")
        return _unpack(work.wait()[0])
    if beyond < comm.world_size:
        leaf = torch.empty_like(total)
        leaf = comm.exchange(receive=(leaf,), source=beyond, tag="decode leaf").wait()[0]
        total = _pack(merge(_unpack(total), _unpack(leaf)))
    distance = 1
    while distance < most:
        other, into = comm.rank ^ distance, torch.empty_like(total)
        work = comm.exchange(send=(total,), to=other, receive=(into,), source=other, tag="decode tree")
        parts = (total, work.wait()[0]) if comm.rank < other else (work.wait()[0], total)
        total = _pack(merge(*map(_unpack, parts)))
        distance *= 2
    if beyond < comm.world_size:
        comm.exchange(send=(total,), to=beyond, tag="decode result").wait()
    return _unpack(total)


def _check(q: Any, cache: Any) -> None:
    """Raise an error of `decode` if q or the cache is wrong on this rank."""
    if not isinstance(cache, ShardedCache):
        raise ShapeError(
            "a ringlab ShardedCache",
            type(cache).__name__,
            "such as ShardedCache.of_shards(ring, layout, k, v)",
        )
    B, K, _, D = cache.k.shape
    if not isinstance(q, Tensor) or q.ndim != 4 or (q.shape[0], q.shape[3]) != (B, D) or q.shape[1] % K:
        got = tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__
        raise ShapeError(f"q ({B}, H, n, {D}) with H divisible by the cache's {K} key/value heads", str(got))
    if not 1 <= q.shape[2] <= cache.length:
        empty = cache.length == 0
        raise ShapeError(
            "queries of at least one token, all of them in the cache",
            f"{q.shape[2]} queries and " + ("an empty cache" if empty else f"{cache.length} tokens"),
            "append the new tokens' k and v to the cache first, on every rank",
        )
    if q.dtype != cache.k.dtype:
        raise DtypeError(f"q in {cache.k.dtype}, the dtype of the cache", str(q.dtype))
    if q.device != cache.k.device:
        raise DeviceError(f"q on {cache.k.device}, the device of the cache", str(q.device))


def check_gradients(**tensors: Shaped[Tensor, "..."] | None) -> None:
    """Check that none of these tensors, passed by name, requires gradients. Raises: BackendError."""
    for name, x in tensors.items():
        if x is not None and torch.is_grad_enabled() and x.requires_grad:
            raise BackendError(
                "tensors without gradients: nothing is saved for backward",
                f"{name} that requires them",
                "use torch.no_grad(), or ring_attention to train",
            )


def mask_of_one_document(mask: Mask | None) -> Mask:
    """Return the mask, causal by default. Raises: MaskError if it has documents or is not a mask."""
    if mask is None:
        return Mask()
    if not isinstance(mask, Mask):
        raise MaskError("mask= a ringlab.Mask", f"a {type(mask).__name__}", "such as Mask(window=4096)")
    if mask.documents:
        raise MaskError(
            "a mask of one document per sequence",
            f"{len(mask.documents)} documents",
            "decode each as a sequence",
        )
    return mask


def _describe(q: Tensor, cache: ShardedCache, options: str) -> str:
    """Return a description of the call, which must be equal on all ranks."""
    ranks = str(cache.lengths) if len(cache.lengths) <= 16 else f"#{hash(tuple(cache.lengths)):x}"
    sizes = f"q {tuple(q.shape)} K={cache.k.shape[1]} Dv={cache.v.shape[3]} {q.dtype} {state_dtype(q.dtype)}"
    return f"cache of {cache.length} tokens {ranks} {sizes} {options}"
