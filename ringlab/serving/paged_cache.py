"""A paged K/V cache of sequences of different lengths, each spread over all ranks.

Token t of a sequence is on rank (t // interleave) mod P, whatever the sequence's length. This is vLLM's
interleaved context parallelism. A rank keeps its tokens of a sequence in pages of `page` tokens, so the same
page of all ranks together contains P·page tokens of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ringlab.comm.ring import Ring, check_ring
from ringlab.errors import CacheError, DeviceError, DtypeError, LayoutError, ShapeError
from ringlab.handles import Handled
from ringlab.layout import Layout, Run
from ringlab.schedules.cache import append_in_graph
from ringlab.serving.tables import BlockTables, token_counts
from ringlab.types import KeyValue, Value
from ringlab.upload import upload


@dataclass(frozen=True)
class PagedShard:
    """This rank's tokens of one sequence, copied out of their pages.

    k is (1, K, L, D) and v is (1, K, L, Dv). positions: the ascending positions of the tokens. length: the
    number of the sequence's tokens on all ranks.
    """

    k: Tensor
    v: Tensor
    positions: Int64[np.ndarray, " L"]
    length: int


class PagedCache(Handled):
    """K and V of several sequences in pages, for `decode_heads` and `prefill`; each token is on one rank.

    All ranks call the same methods in the same order; no method sends anything. Sequences are numbers, which
    `add` and `fork` return. Gradients do not flow through a cache.

    ring: the ranks. kv_heads, head_dim: the sizes of k and v. value_dim: the head dim of v, if it differs
    from that of k.
    pages: the number of pages. page: the tokens that each rank keeps in a page. interleave: the number of
    adjacent tokens on one rank, a divisor of `page`.
    Raises: WorldSizeError if `ring` is not a Ring; CacheError for impossible sizes of pages.

    >>> import torch
    >>> from ringlab import VirtualCluster
    >>> def program(ring):
    ...     cache = PagedCache(ring, kv_heads=2, head_dim=8, pages=4, page=2)
    ...     prompt = cache.add()
    ...     cache.append(torch.ones(1, 2, 7, 8), torch.ones(1, 2, 7, 8), [prompt], [7])
    ...     answer = cache.fork(prompt, 5)           # shares the pages of the first five tokens
    ...     return cache.positions(answer).tolist(), cache.free_pages
    >>> VirtualCluster(2).run(program).results
    [([0, 2, 4], 2), ([1, 3], 2)]
    """

    def __init__(
        self,
        ring: Ring,
        *,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        pages: int,
        page: int = 16,
        interleave: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        check_ring(ring)
        if min(pages, page, interleave) < 1 or page % interleave:
            raise CacheError(
                "pages, page and interleave of at least 1, and page divisible by interleave",
                f"pages={pages}, page={page}, interleave={interleave}",
            )
        self.ring, self.page, self.interleave = ring, page, interleave
        self.tables = BlockTables(pages, page * ring.world_size)
        self._k = torch.zeros((kv_heads, pages, page, head_dim), dtype=dtype, device=device)
        self._v = self._k.new_zeros((*self._k.shape[:-1], head_dim if value_dim is None else value_dim))

    def __repr__(self) -> str:
        lengths = self.tables.lengths
        return (
            f"PagedCache({len(lengths)} sequences of {sum(lengths.values())} tokens, rank {self.ring.rank})"
        )

    @property
    def sequences(self) -> list[int]:
        """Return the numbers of all sequences."""
        return sorted(self.tables.lengths)

    @property
    def free_pages(self) -> int:
        """Return the number of pages that are unused."""
        return self.tables.free_pages

    @property
    def kv_heads(self) -> int:
        """Return the number of key/value heads, K."""
        return self._k.shape[0]

    @property
    def head_dim(self) -> int:
        """Return the head dim of k, D."""
        return self._k.shape[-1]

    @property
    def value_dim(self) -> int:
        """Return the head dim of v, Dv."""
        return self._v.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of k and v."""
        return self._k.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of k and v."""
        return self._k.device

    def add(self) -> int:
        """Return the number of a new sequence without tokens."""
        return self.tables.add()

    def fork(self, sequence: int, length: int | None = None) -> int:
        """Return the number of a new sequence that shares the pages of the first `length` tokens.

        By default it shares all tokens. A shared page that is partly filled is copied when one of its
        sequences grows.
        Raises: CacheError for an unknown sequence, or for more tokens than it has.
        """
        return self.tables.fork(sequence, length)

    def free(self, sequence: int) -> None:
        """Forget a sequence and free its unshared pages. Raises: CacheError for an unknown sequence."""
        self.tables.free(sequence)

    def length(self, sequence: int) -> int:
        """Return the number of a sequence's tokens on all ranks. Raises: CacheError for an unknown sequence."""
        self.tables.check([sequence])
        return self.tables.lengths[sequence]

    def lengths(self, sequence: int) -> list[int]:
        """Return the number of a sequence's tokens on each rank. Raises: CacheError for an unknown sequence."""
        whole = self.length(sequence)
        return [self._held(whole, rank) for rank in range(self.ring.world_size)]

    def positions(self, sequence: int, rank: int | None = None) -> Int64[np.ndarray, " L"]:
        """Return the ascending positions of a rank's tokens in the sequence; `rank` is this rank by default.

        Raises: CacheError for an unknown sequence.
        """
        rank = self.ring.rank if rank is None else rank
        return self._positions(0, self._held(self.length(sequence), rank), rank)

    def next_positions(self, sequence: int, tokens: int | Layout) -> Int64[np.ndarray, " n"]:
        """Return the positions of a sequence's next tokens, for RoPE.

        If `tokens` is a number, these are the positions of all next tokens. If it is a layout, they are those
        of this rank.
        Raises: CacheError for an unknown sequence.
        """
        own = tokens.positions(self.ring.rank) if isinstance(tokens, Layout) else np.arange(tokens)
        return self.length(sequence) + own

    def next_layout(self, sequence: int, n: int) -> Layout:
        """Return the layout under which a sequence's next `n` tokens are on the ranks that will keep them.

        Raises: CacheError for an unknown sequence.
        """
        start = self.length(sequence)
        P, run = self.ring.world_size, self.interleave
        runs: list[list[Run]] = [[] for _ in range(P)]
        if run == 1:
            for token in range(min(n, P)):
                runs[(start + token) % P].append(Run(token, P, -(-(n - token) // P)))
        else:
            edges = [0, *range(run - start % run, n, run), n]
            for first, stop in pairwise(edges):
                if first < stop:
                    runs[(start + first) // run % P].append(Run(first, 1, stop - first))
        return Layout(n, P, f"interleaved-{run}", tuple(map(tuple, runs)))

    def append(
        self,
        k: Float[Tensor, "1 K N D"],
        v: Float[Tensor, "1 K N Dv"],
        sequences: Sequence[int],
        new: Sequence[int] | None = None,
    ) -> None:
        """Append the next tokens of several sequences; k and v are equal on all ranks.

        k and v contain the tokens of all sequences, in the order of `sequences`.
        new: the number of new tokens of each sequence, 0 or more; 1 by default.
        Raises: CacheError for unknown sequences or too few free pages; ShapeError if `new` is not one number
        for each sequence; ShapeError, DtypeError or DeviceError for tensors that do not fit. After an error
        the cache is unchanged.
        """
        if torch.compiler.is_dynamo_compiling():
            return append_in_graph(self, k, v, list(sequences), None if new is None else list(new))
        self.tables.check(sequences)
        new = token_counts(sequences, new)
        self._check_new(k, v, sum(new))
        at = 0
        starts = [self.length(sequence) for sequence in sequences]
        self._extend(sequences, new)
        for sequence, start, n in zip(sequences, starts, new, strict=True):
            slots, rank = self._slots(start, n), self.ring.rank
            mine = upload(self._positions(slots.start, slots.stop, rank) - start + at, k.device)
            self._write(sequence, slots, k[0].index_select(1, mine), v[0].index_select(1, mine))
            at += n
        return None

    def append_shards(self, layout: Layout, k: KeyValue, v: Value, sequence: int) -> None:
        """Append the next tokens of a sequence. Each rank passes its shard under `next_layout`.

        Raises: the errors of `append`; LayoutError for another layout.
        """
        self.check_shards(layout, k, v, sequence)
        slots = self._slots(self.length(sequence), layout.S)
        self._extend([sequence], [layout.S])
        self._write(sequence, slots, k[0], v[0])

    def check_shards(self, layout: Layout, k: KeyValue, v: Value, sequence: int) -> None:
        """Check that `append_shards` accepts these arguments. Raises: the errors of `append_shards`."""
        if not isinstance(layout, Layout) or layout.ranks != self.next_layout(sequence, layout.S).ranks:
            raise LayoutError(
                "layout= the layout that puts each token on the rank that keeps it",
                repr(layout),
                "cache.next_layout(sequence, n)",
            )
        self._check_new(k, v, layout.length(self.ring.rank))
        self.tables.check_room([sequence], [layout.S])

    def shard(self, sequence: int) -> PagedShard:
        """Return this rank's tokens of a sequence, copied out of their pages. Raises: CacheError.

        Kernels for paged caches would read the pages in place.
        """
        length, positions = self.length(sequence), self.positions(sequence)
        used = -(-len(positions) // self.page)
        pages = upload(np.array(self.tables.pages[sequence][:used], np.int64), self.device)
        k, v = (x.index_select(1, pages).flatten(1, 2)[None, :, : len(positions)] for x in (self._k, self._v))
        return PagedShard(k, v, positions, length)

    def _extend(self, sequences: Sequence[int], new: Sequence[int]) -> None:
        """Find pages for the new tokens, and copy shared pages that are about to be written to."""
        for source, copy in self.tables.extend(sequences, new):
            for pool in (self._k, self._v):
                pool[:, copy] = pool[:, source]

    @torch.no_grad()
    def _write(self, sequence: int, slots: range, k: Tensor, v: Tensor) -> None:
        """Write k and v (K, n, D) to slots. Slot s is place s % page of the sequence's page s // page."""
        where = np.arange(slots.start, slots.stop)
        table = np.array(self.tables.pages[sequence], np.int64)
        pages, places = (upload(x, k.device) for x in (table[where // self.page], where % self.page))
        self._k[:, pages, places], self._v[:, pages, places] = k, v

    def _slots(self, start: int, n: int) -> range:
        """Return this rank's slots of the sequence's `n` tokens from token `start` on."""
        return range(self._held(start, self.ring.rank), self._held(start + n, self.ring.rank))

    def _held(self, tokens: int, rank: int) -> int:
        """Return the number of tokens among a sequence's first `tokens` tokens that are on `rank`."""
        full, rest = divmod(tokens, self.ring.world_size * self.interleave)
        return full * self.interleave + min(max(rest - rank * self.interleave, 0), self.interleave)

    def _positions(self, start: int, stop: int, rank: int) -> Int64[np.ndarray, " L"]:
        """Return the positions of the tokens in these slots of a rank."""
        turn, place = np.divmod(np.arange(start, stop, dtype=np.int64), self.interleave)
        return (turn * self.ring.world_size + rank) * self.interleave + place

    def _check_new(self, k: Tensor, v: Tensor, n: int) -> None:
        """Raise an error of `append` unless k and v have n tokens and fit the pages."""
        for name, x, pool in (("k", k, self._k), ("v", v, self._v)):
            fit = (1, pool.shape[0], n, pool.shape[-1])
            if not isinstance(x, Tensor) or tuple(x.shape) != fit:
                got = str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
                raise ShapeError(f"{name} of the new tokens as {fit}", got)
            if x.dtype != pool.dtype:
                raise DtypeError(f"{name} in {pool.dtype}, the dtype of the cache", str(x.dtype))
            if x.device != pool.device:
                raise DeviceError(f"{name} on {pool.device}, the device of the cache", str(x.device))
