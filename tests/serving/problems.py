"""Serving problems: sequences in a cache on several ranks, programs that serve them, and the oracle's check."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab.comm.ring import Ring
from ringlab.conformance.tolerance import bounds, relative_error, truth
from ringlab.layout import Layout, contiguous, striped, zigzag
from ringlab.mask import Mask
from ringlab.schedules.cache import ShardedCache
from ringlab.serving.checks import Cache
from ringlab.serving.chunks import prefill
from ringlab.serving.decode import decode_heads
from ringlab.serving.paged_cache import PagedCache
from tests.laws.draw import Shape, tensors

Whole = tuple[Tensor, Tensor, Tensor]


def whole(B: int, H: int, K: int, S: int, D: int, seed: int, dtype: torch.dtype, Dv: int = 0) -> Whole:
    """Return q, k and v of a sequence of S tokens; Dv is the head dim of v, which is D if Dv is 0."""
    q, k, v, _ = tensors(Shape(B, H, K, S, S, D, Dv), seed, dtype)
    return q, k, v


def sinks_of(heads: int, dtype: torch.dtype) -> Tensor:
    """Return a sink for each head: some outweigh all keys, and some have no weight."""
    return torch.tensor([0.5, -1.0, 3.0, 2.0, -1e4]).repeat(heads)[:heads].to(dtype)


def assert_rows(out: Tensor, lse: Tensor, sequence: Whole, rows: slice, **how: Any) -> None:
    """Fail unless out and lse of these rows are within the bounds of attention over the whole sequence."""
    q, _, v = sequence
    inputs = *sequence, q.new_zeros((*q.shape[:-1], v.shape[-1]))
    true = truth(*inputs, **how)
    allowed = bounds(*inputs, true=true, **how)
    for name, mine, every in (("out", out, true.out), ("lse", lse, true.lse)):
        of_rows = every[:, :, rows]
        # The bound is relative to the largest entry of the whole, and `relative_error` to that of the rows.
        scale = np.abs(every).max() / (np.abs(of_rows).max() or 1.0)
        assert relative_error(mine, of_rows) <= allowed[name] * scale, f"{name} of {rows} is wrong"


@dataclass(frozen=True)
class Batch:
    """Sequences of these lengths plus `new` tokens each: paged, or one sequence in a cache with `layout`."""

    P: int
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    H: int = 4
    K: int = 2
    page: int = 2
    interleave: int = 1
    layout: Layout | None = None
    queries: str = "own"
    merge: str = "all-to-all"
    mask: Mask = field(default_factory=Mask)
    dtype: torch.dtype = torch.float64
    block: str = "naive"
    softcap: float | None = None
    sunk: bool = False
    Dv: int = 8

    def sequence(self, number: int) -> Whole:
        """Return q, k and v of a sequence, including its new tokens."""
        B = 1 if self.layout is None else 2
        S = self.lengths[number] + self.new[number]
        return whole(B, self.H, self.K, S, 8, number, self.dtype, self.Dv)

    @property
    def rules(self) -> dict[str, Any]:
        return {"mask": self.mask, "softcap": self.softcap}

    @property
    def sinks(self) -> Tensor | None:
        """Return a sink for each head, or None if the batch has no sinks."""
        return sinks_of(self.H, self.dtype) if self.sunk else None


def filled(ring: Ring, batch: Batch) -> tuple[Cache, list[int] | None]:
    """Return a cache with all tokens of all sequences, and the sequences' numbers."""
    sequences = [batch.sequence(number) for number in range(len(batch.lengths))]
    if batch.layout is not None:
        [(_, k, v)], [start] = sequences, batch.lengths
        shards = (batch.layout.shard(x[:, :, :start], ring.rank) for x in (k, v))
        cache = ShardedCache.of_shards(ring, batch.layout, *shards)
        cache.append(k[:, :, start:], v[:, :, start:])
        return cache, None
    pages = sum(k.shape[2] // (batch.page * batch.P) + 1 for _, k, _ in sequences)
    paged = PagedCache(
        ring,
        kv_heads=batch.K,
        head_dim=8,
        value_dim=batch.Dv,
        pages=pages,
        page=batch.page,
        interleave=batch.interleave,
        dtype=batch.dtype,
    )
    names = [paged.add() for _ in sequences]
    for name, (_, k, v), start in zip(names, sequences, batch.lengths, strict=True):
        paged.append(k[:, :, :start], v[:, :, :start], [name], [start])
    k, v = (
        torch.cat([s[which][:, :, n:] for s, n in zip(sequences, batch.lengths, strict=True)], 2)
        for which in (1, 2)
    )
    paged.append(k, v, names, batch.new)
    return paged, names


def decode_batch(ring: Ring, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return out and lse of the new tokens, for this rank's heads."""
    cache, names = filled(ring, batch)
    parts = [batch.sequence(n)[0][:, :, start:] for n, start in enumerate(batch.lengths)]
    q = torch.cat(parts, dim=2)
    sinks = batch.sinks
    if batch.queries == "own":
        q = q.chunk(ring.world_size, dim=1)[ring.rank]
        sinks = None if sinks is None else sinks.chunk(ring.world_size)[ring.rank]
    how: dict[str, Any] = {
        "queries": batch.queries,
        "merge": batch.merge,
        "block": batch.block,
        "sinks": sinks,
    }
    new = None if names is None else batch.new
    return decode_heads(q, cache, names, new, return_lse=True, **how, **batch.rules)


def assert_batch(results: list[tuple[Tensor, Tensor]], batch: Batch) -> None:
    """Fail unless the new rows of every sequence, joined from the ranks' heads, are right."""
    out, lse = (torch.cat(parts, dim=1) for parts in zip(*results, strict=True))
    for number, (start, stop) in enumerate(pairwise(accumulate(batch.new, initial=0))):
        first = batch.lengths[number]
        rows = slice(first, first + batch.new[number])
        how = batch.rules | {"sinks": None if batch.sinks is None else batch.sinks.double().numpy()}
        assert_rows(out[:, :, start:stop], lse[:, :, start:stop], batch.sequence(number), rows, **how)


@dataclass(frozen=True)
class Prompt:
    """A prompt fed in chunks of these lengths, to a paged cache or, with `layout`, to a ShardedCache."""

    P: int
    chunks: tuple[int, ...]
    H: int = 4
    K: int = 2
    layout: Any = None
    page: int = 2
    interleave: int = 1
    travels: str = "auto"
    mask: Mask = field(default_factory=Mask)
    dtype: torch.dtype = torch.float64
    block: str = "naive"
    softcap: float | None = None
    sunk: bool = False
    Dv: int = 8

    @property
    def sinks(self) -> Tensor | None:
        """Return a sink for each head, or None if the prompt has no sinks."""
        return sinks_of(self.H, self.dtype) if self.sunk else None

    def sequence(self) -> Whole:
        """Return q, k and v of the whole prompt."""
        B = 1 if self.layout is None else 2
        return whole(B, self.H, self.K, sum(self.chunks), 8, 3, self.dtype, self.Dv)


Fed = tuple[list[tuple[Layout, Tensor, Tensor]], Tensor, np.ndarray]


def feed(ring: Ring, prompt: Prompt) -> Fed:
    """Return layout, out and lse of each chunk on this rank, then the rank's final keys and positions."""
    sequence, found = prompt.sequence(), []
    cache, name = empty_cache(ring, prompt)
    for start, stop in pairwise(accumulate(prompt.chunks, initial=0)):
        layout = layout_of_chunk(cache, name, prompt, stop - start)
        shards = layout.shard(tuple(x[:, :, start:stop] for x in sequence), ring.rank)
        how: dict[str, Any] = {"travels": prompt.travels, "block": prompt.block, "sinks": prompt.sinks}
        rules = {"mask": prompt.mask, "softcap": prompt.softcap}
        out, lse = prefill(*shards, cache, name, layout=layout, return_lse=True, **how, **rules)
        found.append((layout, out, lse))
    if isinstance(cache, PagedCache):
        assert name is not None
        return found, cache.shard(name).k, cache.positions(name)
    return found, cache.k, cache.positions


def empty_cache(ring: Ring, prompt: Prompt) -> tuple[Cache, int | None]:
    """Return an empty cache for the prompt, and the number of its sequence."""
    if prompt.layout is not None:
        sizes = {"batch": 2, "kv_heads": prompt.K, "head_dim": 8, "value_dim": prompt.Dv}
        return ShardedCache(ring, **sizes, dtype=prompt.dtype), None
    pages = sum(prompt.chunks) // (prompt.page * prompt.P) + 1
    how: dict[str, Any] = {"page": prompt.page, "interleave": prompt.interleave, "dtype": prompt.dtype}
    how["value_dim"] = prompt.Dv
    paged = PagedCache(ring, kv_heads=prompt.K, head_dim=8, pages=pages, **how)
    return paged, paged.add()


def layout_of_chunk(cache: Cache, name: int | None, prompt: Prompt, n: int) -> Layout:
    if isinstance(cache, PagedCache):
        assert name is not None
        return cache.next_layout(name, n)
    return prompt.layout(n, prompt.P)


def assert_prompt(results: list[Fed], prompt: Prompt) -> None:
    """Fail unless all chunks form one causal attention, and the cache has each key at its position."""
    sequence = prompt.sequence()
    outs, lses = [], []
    for number in range(len(prompt.chunks)):
        of_ranks = [found[number] for found, _, _ in results]
        layout = of_ranks[0][0]
        outs.append(layout.unshard([out for _, out, _ in of_ranks]))
        lses.append(layout.unshard([lse for _, _, lse in of_ranks], dim=-1))
    S = sum(prompt.chunks)
    out, lse = torch.cat(outs, dim=2), torch.cat(lses, dim=2)
    sinks = None if prompt.sinks is None else prompt.sinks.double().numpy()
    assert_rows(out, lse, sequence, slice(0, S), mask=prompt.mask, softcap=prompt.softcap, sinks=sinks)
    positions = np.concatenate([where for _, _, where in results])
    assert (np.sort(positions) == np.arange(S)).all(), "a token is missing, or on two ranks"
    for _, k, where in results:
        assert torch.equal(k, sequence[1][:, :, torch.from_numpy(where)]), "keys at other positions"


def on(P: int, **change: Any) -> Batch:
    """Return a batch of four sequences: one begins empty, and one is empty on most ranks."""
    return Batch(P, (13, 0, 1, 30), (1, 1, 2, 3), **{"H": 2 * P, "K": 2, **change})


def prompt(P: int, **change: Any) -> Prompt:
    """Return a prompt in chunks of different lengths, one of which is a single token."""
    return Prompt(P, (7, 1, 12, 5), **{"H": 2 * P, "K": 2, **change})


CASES: dict[str, Batch | Prompt] = {
    "float32 batch, own queries, reduce-scatter": on(3, merge="reduce-scatter", dtype=torch.float32),
    "bfloat16 batch, all queries, reduce-scatter": on(
        3, queries="all", merge="reduce-scatter", dtype=torch.bfloat16, block="blockwise"
    ),
    "float64 batch, window and prefix": on(3, interleave=2, mask=Mask(window=4, prefix=2)),
    "float32 batch, soft cap": on(3, softcap=1.5, dtype=torch.float32, block="auto"),
    "bfloat16 batch, sinks of all queries, reduce-scatter": on(
        3, sunk=True, queries="all", merge="reduce-scatter", dtype=torch.bfloat16, block="native"
    ),
    "float64 sharded cache, sinks, window": Batch(
        3, (14,), (2,), 6, layout=zigzag(14, 3), queries="all", mask=Mask(window=4), sunk=True
    ),
    "float32 batch, v of another head dim": on(3, Dv=5, dtype=torch.float32, block="blockwise"),
    "float64 sharded cache, reduce-scatter": Batch(
        3, (14,), (2,), 6, layout=contiguous(14, 3), merge="reduce-scatter"
    ),
    "float32 chunks, prefix, queries travel": prompt(
        3, travels="q", interleave=2, mask=Mask(window=3, prefix=6), dtype=torch.float32
    ),
    "bfloat16 chunks, whichever is less": prompt(3, dtype=torch.bfloat16, block="native"),
    "bfloat16 zig-zag chunks, soft cap": prompt(
        3, layout=zigzag, travels="q", softcap=2.0, dtype=torch.bfloat16, block="blockwise"
    ),
    "bfloat16 chunks, v of another head dim, K/V travel": prompt(
        3, travels="kv", Dv=11, dtype=torch.bfloat16
    ),
    "float32 zig-zag chunks, v of another head dim, queries travel": prompt(
        3, layout=zigzag, travels="q", Dv=5, dtype=torch.float32, block="native"
    ),
    "bfloat16 chunks, sinks, queries travel": prompt(3, travels="q", sunk=True, dtype=torch.bfloat16),
    "float64 striped chunks, window": prompt(3, layout=striped, mask=Mask(window=4), travels="q"),
}
"""One table for virtual ranks and for processes, three ranks each."""


def serve(ring: Ring, case: Batch | Prompt) -> Any:
    """Run the program of a case."""
    return decode_batch(ring, case) if isinstance(case, Batch) else feed(ring, case)


def serve_all(ring: Ring) -> list[Any]:
    return [serve(ring, case) for case in CASES.values()]


def assert_case(results: list[Any], case: Batch | Prompt) -> None:
    """Fail unless a case's results are right."""
    if isinstance(case, Batch):
        assert_batch(results, case)
    else:
        assert_prompt(results, case)
