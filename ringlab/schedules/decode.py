"""Decode: a few new tokens against a K/V cache that is spread over the ranks.

Every rank has the new queries, attends to its own part of the cache, and the partial results (out, lse) are merged:
gathered and folded in rank order, or along a tree of log2 P exchanges. What is sent does not depend on the length of
the sequence: B·H·n·(D + 1) numbers of the state dtype per message. Source of the tree: arXiv 2408.04093.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from ringlab.agreement import agree
from ringlab.blocks import choice, get_block
from ringlab.blocks.protocol import Block
from ringlab.comm.protocol import Comm, side_by_side
from ringlab.errors import BackendError, DeviceError, DtypeError, MaskError, RinglabError, ShapeError
from ringlab.mask import Mask
from ringlab.merge import Partial, merge, state_dtype
from ringlab.schedules.cache import ShardedCache
from ringlab.schedules.tilewise import RunningPartial
from ringlab.scores import Scores, check_scale

MERGES = ("all-reduce", "tree")


@overload
def decode(
    q: Tensor,
    cache: ShardedCache,
    *,
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    block: str | Block = ...,
    merge: str = ...,
    return_lse: Literal[False] = ...,
    validate: bool = ...,
) -> Tensor: ...


@overload
def decode(
    q: Tensor,
    cache: ShardedCache,
    *,
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    block: str | Block = ...,
    merge: str = ...,
    return_lse: Literal[True],
    validate: bool = ...,
) -> tuple[Tensor, Tensor]: ...


def decode(
    q: Tensor,
    cache: ShardedCache,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    block: str | Block = "auto",
    merge: str = "all-reduce",
    return_lse: bool = False,
    validate: bool = True,
) -> Any:
    """Return attention of the sequence's last tokens over all of the cache, the same bits on every rank.

    q is (B, H, n, D), the queries of the n tokens that were appended last, the same on every rank. mask: causal,
    with a window or a prefix; causal where None. softcap: see `ring_attention`. merge: "all-reduce", one round of P − 1 messages to all others, or
    "tree", log2 P rounds of one message. With `return_lse` the result is (out, lse). `validate` makes the ranks
    compare their calls and the lengths of their caches first (512 bytes a round, log2 P rounds).

    Raises: ShapeError for an empty cache or q that does not fit it, DtypeError, DeviceError, MaskError or BackendError
    on a rank that is called wrongly, AgreementError on all others, and on all where caches differ; BackendError
    where gradients are asked for: nothing keeps what backward would need.
    """
    error: RinglabError | None = None
    try:
        _check(q, cache)
        check_scale(scale, q.dtype)
        seen = _mask(mask)
        if merge not in MERGES:
            raise BackendError(f"merge= one of {', '.join(MERGES)}", repr(merge))
        scores = Scores(softcap)
        chosen = get_block(block, q, scores.wishes)
    except RinglabError as raised:
        error = raised
    if validate and isinstance(cache, ShardedCache):
        said = (
            ""
            if error
            else _describe(q, cache, f"{seen} scale={scale} softcap={softcap} {chosen.name} merge={merge}")
        )
        agree(cache.ring.comm, said, error, cache.k.device)
    elif error is not None:
        raise error
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    attend = side_by_side(_attend) if chosen.thread_safe else _attend
    comm = cache.ring.comm
    if told := choice(block, chosen, scores.wishes):
        comm.chose(*told)
    part = comm.compute("decode", attend, q.detach(), cache, seen, chosen, scale, scores)
    whole = _all_reduced(comm, part) if merge == "all-reduce" else _along_a_tree(comm, part)
    out = whole.out.to(q.dtype)
    return (out, whole.lse) if return_lse else out


@dataclass(frozen=True)
class Stretch:
    """Query rows that see the same keys of this rank."""

    rows: slice
    keys: slice


def stretches(mask: Mask, positions: np.ndarray, S: int, n: int) -> list[Stretch]:
    """Return what the last `n` of `S` tokens see of keys at these ascending positions: each visible pair once.

    What all rows see is one stretch; only keys that some rows see and others do not are met row by row.
    """
    rows = np.arange(S - n, S)
    prefix = mask.prefixes[0]
    upper = rows + 1 if mask.causal else np.full(n, S)
    lower = np.zeros(n, np.int64)
    if mask.window is not None:
        lower = rows - mask.window + 1
        upper = np.minimum(upper, rows + mask.window)
    lower, upper = np.maximum(lower, prefix), np.maximum(upper, prefix)
    first, last = (np.searchsorted(positions, x) for x in (lower, upper))
    of_prefix = int(np.searchsorted(positions, prefix))
    found = [Stretch(slice(0, n), slice(0, of_prefix))]
    start, stop = int(first.max()), int(last.min())
    if start < stop:
        found.append(Stretch(slice(0, n), slice(start, stop)))
        edges = [(row, int(first[row]), start) for row in range(n)]
        edges += [(row, stop, int(last[row])) for row in range(n)]
    else:
        edges = [(row, int(first[row]), int(last[row])) for row in range(n)]
    found += [Stretch(slice(row, row + 1), slice(a, b)) for row, a, b in edges]
    return [stretch for stretch in found if stretch.keys.start < stretch.keys.stop]


def _attend(
    q: Tensor, cache: ShardedCache, mask: Mask, block: Block, scale: float, scores: Scores
) -> Partial:
    """Return the partial of all new rows over this rank's keys."""
    state, n = RunningPartial(q), q.shape[2]
    rows = np.arange(cache.length - n, cache.length)
    for stretch in stretches(mask, cache.positions, cache.length, n):
        k, v = (x[..., stretch.keys, :] for x in (cache.k, cache.v))
        more: dict[str, Any] = {}
        if scores.wishes:
            more["how"] = scores.of_tile(rows[stretch.rows], cache.positions[stretch.keys])
        part = block.forward(q[..., stretch.rows, :], k, v, causal=False, scale=scale, **more)
        state.add(stretch.rows, part)
    return state.value()


def _packed(part: Partial) -> Tensor:
    """Return out and lse as one message, (B, H, n, D + 1)."""
    return torch.cat([part.out, part.lse.unsqueeze(-1)], dim=-1)


def _unpacked(message: Tensor) -> Partial:
    return Partial(message[..., :-1], message[..., -1])


def _all_reduced(comm: Comm, part: Partial) -> Partial:
    """Return the merge of all ranks' partials, folded in rank order."""
    first, *others = comm.all_gather(_packed(part), tag="decode partials")
    total = _unpacked(first)
    for other in others:
        total = merge(total, _unpacked(other))
    return total


def _along_a_tree(comm: Comm, part: Partial) -> Partial:
    """Return the same after log2 P exchanges, each with the rank at twice the distance, lower ranks' partial first.

    Ranks beyond the largest power of two give theirs to a rank below it, and are told the result.
    """
    most = 1 << (comm.world_size.bit_length() - 1)
    total, beyond = _packed(part), comm.rank + most
    if comm.rank >= most:
        told = torch.empty_like(total)
        comm.exchange(send=(total,), to=comm.rank - most, tag="decode leaf").wait()
        return _unpacked(comm.exchange(receive=(told,), source=comm.rank - most, tag="decode told").wait()[0])
    if beyond < comm.world_size:
        leaf = torch.empty_like(total)
        leaf = comm.exchange(receive=(leaf,), source=beyond, tag="decode leaf").wait()[0]
        total = _packed(merge(_unpacked(total), _unpacked(leaf)))
    distance = 1
    while distance < most:
        other, into = comm.rank ^ distance, torch.empty_like(total)
        came = comm.exchange(send=(total,), to=other, receive=(into,), source=other, tag="decode tree")
        parts = (total, came.wait()[0]) if comm.rank < other else (came.wait()[0], total)
        total = _packed(merge(*map(_unpacked, parts)))
        distance *= 2
    if beyond < comm.world_size:
        comm.exchange(send=(total,), to=beyond, tag="decode told").wait()
    return _unpacked(total)


def _check(q: Any, cache: Any) -> None:
    """Raise what is wrong with this rank's arguments, if anything is."""
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
            "queries of tokens that are in the cache, one at least",
            f"{q.shape[2]} queries and " + ("an empty cache" if empty else f"{cache.length} tokens"),
            "append the new tokens' k and v to the cache first, on every rank",
        )
    if q.dtype != cache.k.dtype:
        raise DtypeError(f"q in the cache's {cache.k.dtype}", str(q.dtype))
    if q.device != cache.k.device:
        raise DeviceError(f"q on the cache's {cache.k.device}", str(q.device))
    if torch.is_grad_enabled() and q.requires_grad:
        raise BackendError(
            "decode without gradients", "q that requires them", "torch.no_grad(), or ring_attention to train"
        )


def _mask(mask: Mask | None) -> Mask:
    if mask is None:
        return Mask()
    if not isinstance(mask, Mask):
        raise MaskError("mask= a ringlab.Mask", f"a {type(mask).__name__}", "such as Mask(window=4096)")
    if mask.documents:
        raise MaskError(
            "a mask of one document per sequence", f"{len(mask.documents)} documents", "a sequence for each"
        )
    return mask


def _describe(q: Tensor, cache: ShardedCache, how: str) -> str:
    """What must be equal on all ranks."""
    ranks = str(cache.lengths) if len(cache.lengths) <= 16 else f"#{hash(tuple(cache.lengths)):x}"
    sizes = f"q {tuple(q.shape)} K={cache.k.shape[1]} {q.dtype} {state_dtype(q.dtype)}"
    return f"cache of {cache.length} tokens {ranks} {sizes} {how}"
