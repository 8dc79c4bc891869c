"""Bytes on the wire and in memory of serving: decode with shared heads, Helix's grid, and prefill in chunks.

All figures equal the bytes that `ringlab.serving` sends. `sizes` are those of the whole attention; B counts
sequences. Every rank that needs sinks has them, so that none are sent. Partials and lse travel in the state
dtype: float32, or float64 for float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringlab.cost.sizes import Attention, element_bytes
from ringlab.cost.traffic import Traffic, state_bytes
from ringlab.errors import CostError, WorldSizeError
from ringlab.layout import Layout


def decode_heads_traffic(
    sizes: Attention, P: int, *, new: int = 1, queries: str = "own", merge: str = "all-to-all"
) -> Traffic:
    """Return the traffic of each of `P` ranks for `new` tokens of each sequence, whose length does not matter.

    A rank sends the queries of its H/P heads to P − 1 others, unless each rank has "all" queries. Then it
    sends out and lse of H/P heads to each other rank ("all-to-all"), or first lse of all heads, and then out
    of H/P heads ("reduce-scatter").
    Raises: CostError for heads that P ranks cannot share, or an unknown way.
    """
    _check_heads(sizes.H, P)
    if queries not in ("own", "all") or merge not in ("all-to-all", "reduce-scatter"):
        raise CostError(
            "queries= own or all, merge= all-to-all or reduce-scatter", f"{queries!r} and {merge!r}"
        )
    if P == 1:
        return Traffic((), 0)
    rows, state = sizes.B * new * (P - 1), state_bytes(sizes.dtype)
    own = rows * sizes.H // P
    steps = [own * sizes.D * element_bytes(sizes.dtype)] if queries == "own" else []
    if merge == "all-to-all":
        steps.append(own * (sizes.value_dim + 1) * state)
    else:
        steps += [rows * sizes.H * state, own * sizes.value_dim * state]
    return Traffic(tuple(steps), len(steps) * (P - 1))


def helix_traffic(
    sizes: Attention, token_ranks: int, head_ranks: int, *, new: int = 1, merge: str = "all-to-all"
) -> Traffic:
    """Return the traffic of each rank of a grid of `token_ranks` × `head_ranks`, for `new` tokens of each sequence.

    The ranks of a row have the queries of all its heads, and send partials to each other only.
    Raises: CostError for heads that the grid cannot share. Source: arXiv 2507.07120.
    """
    _check_heads(sizes.K, head_ranks)
    _check_heads(sizes.H, token_ranks * head_ranks)
    of_row = replace(sizes, H=sizes.H // head_ranks, K=sizes.K // head_ranks)
    return decode_heads_traffic(of_row, token_ranks, new=new, queries="all", merge=merge)


def prefill_traffic(
    sizes: Attention, layout: Layout, prefix: Sequence[int], *, travels: str, rank: int | None = None
) -> Traffic:
    """Return the traffic of `rank` for a chunk under `layout`; if `rank` is None, of the rank that sends most.

    prefix: the number of cached tokens on each rank. travels: with "kv", K and V of the cached and the new
    tokens make P − 1 hops; with "q", the queries make P − 1 hops, and each of P − 1 ranks sends a partial
    home.
    Raises: WorldSizeError unless `prefix` has a number for each rank; CostError for an unknown way.
    Source: arXiv 2411.01783.
    """
    P = layout.P
    if len(prefix) != P:
        raise WorldSizeError(f"the cached tokens of each of {P} ranks", f"{len(prefix)} numbers")
    if travels not in ("kv", "q"):
        raise CostError("travels= kv or q", repr(travels))
    if rank is None:
        every = [prefill_traffic(sizes, layout, prefix, travels=travels, rank=r) for r in range(P)]
        return max(every, key=lambda traffic: traffic.total_bytes)
    if P == 1:
        return Traffic((), 0)
    origins = [(rank - step) % P for step in range(P)]
    if travels == "kv":
        held = [prefix[origin] + layout.length(origin) for origin in origins[:-1]]
        return Traffic(tuple(sizes.block_bytes_per_token * tokens for tokens in held), P - 1)
    rows = [sizes.B * sizes.H * layout.length(origin) for origin in origins]
    hops = [n * sizes.D * element_bytes(sizes.dtype) for n in rows[:-1]]
    home = [n * (sizes.value_dim + 1) * state_bytes(sizes.dtype) for n in rows[1:]]
    return Traffic(tuple(a + b for a, b in zip([*hops, 0], [0, *home], strict=True)), 2 * (P - 1))


def travelling_kv_bytes(sizes: Attention, longest: int, P: int) -> int:
    """Return the most bytes of K and V that a rank holds besides its cache while K and V travel in a prefill.

    longest: the cached and new tokens of the rank that has most. A rank holds one shard that is in use, or
    the copy of its shard that it sends, and one shard that arrives. If queries travel, K and V stay in the
    cache, so this is 0.
    """
    return (2 if P > 1 else 0) * longest * sizes.block_bytes_per_token


def gathered_page_bytes(sizes: Attention, tokens: int) -> int:
    """Return the bytes of a copy of all pages that `tokens` tokens of a sequence fill on a rank.

    `PagedCache.shard` makes this copy, for one sequence at a time. A kernel for pages and a `ShardedCache`
    need no copy.
    """
    return replace(sizes, B=1).block_bytes_per_token * tokens


def page_bytes(sizes: Attention, page: int) -> int:
    """Return the bytes of a page of one layer on one rank: K·(D + Dv)·e for each of the rank's `page` tokens in the page."""
    return replace(sizes, B=1).block_bytes_per_token * page


def pages_needed(lengths: Sequence[int], P: int, page: int, shared: int = 0) -> int:
    """Return the number of pages on `P` ranks for sequences of these lengths whose first `shared` tokens are equal.

    A page has P·page tokens. The last page of the shared tokens counts as shared only if it is full, because
    sequences that grow beyond the shared tokens copy a page that is not full. A sequence that has not grown
    yet needs a page less.
    Raises: CostError if a sequence is shorter than `shared`.
    """
    if any(length < shared for length in lengths):
        raise CostError(f"sequences of at least {shared} tokens", f"{min(lengths)} tokens")
    span = P * page
    once = shared // span
    return once + sum(-(-length // span) - once for length in lengths)


def _check_heads(heads: int, ranks: int) -> None:
    if ranks < 1 or heads % ranks:
        raise CostError(
            f"ranks that can share {heads} heads",
            f"{ranks}",
            f"divisors: {', '.join(str(d) for d in range(1, heads + 1) if heads % d == 0)}",
        )
