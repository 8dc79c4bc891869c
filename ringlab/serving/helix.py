"""Helix: attention on a grid of tokens × heads, between layers that are tensor-parallel over the whole grid.

The grid has N = token_ranks · head_ranks ranks. If attention had more tensor-parallel ranks than key/value
heads, several ranks would keep the same K/V. The heads are therefore shared among only `head_ranks` rows of
ranks, and the ranks of a row share the tokens of the cache. Each rank computes the queries of all heads of
its row. An all-to-all of partials then leaves each rank with H/N heads. The output projection and the
feed-forward layer need this, because they are tensor-parallel over all N ranks.
Source: arXiv 2507.07120.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup, members
from ringlab.errors import ShapeError, WorldSizeError
from ringlab.rank_agreement import agree
from ringlab.serving.checks import Cache, comm_of
from ringlab.serving.decode import decode_heads
from ringlab.types import Query


class HelixGrid:
    """This rank's place in the grid; rank r is in row r // token_ranks, whose ranks have the same heads.

    ring: all N ranks. token_ranks: how many ranks share the tokens of the cache. head_ranks: how many rows
    share the heads.
    Raises: WorldSizeError unless ring has token_ranks · head_ranks ranks.

    >>> import torch
    >>> from ringlab import ShardedCache, VirtualCluster
    >>> from ringlab.serving import HelixGrid
    >>> def program(ring):
    ...     grid = HelixGrid(ring, token_ranks=2, head_ranks=2)
    ...     cache = ShardedCache(grid.tokens, batch=1, kv_heads=1, head_dim=8)    # K = 2: one head for each row
    ...     cache.append(torch.ones(1, 1, 5, 8), torch.ones(1, 1, 5, 8))
    ...     out = grid.attend(torch.ones(1, 8, 1, 8)[:, grid.attended(8)], cache)
    ...     return grid.attended(8), grid.owned(8), tuple(out.shape)
    >>> VirtualCluster(4).run(program).results[3]
    (slice(4, 8, None), slice(6, 8, None), (1, 2, 1, 8))
    """

    def __init__(self, ring: Ring, *, token_ranks: int, head_ranks: int) -> None:
        if min(token_ranks, head_ranks) < 1 or token_ranks * head_ranks != ring.world_size:
            raise WorldSizeError(
                f"token_ranks · head_ranks = {ring.world_size} ranks", f"{token_ranks} · {head_ranks}"
            )
        self.ring, self.token_ranks, self.head_ranks = ring, token_ranks, head_ranks
        self.row = ring.rank // token_ranks
        first = self.row * token_ranks
        self.tokens = Ring(SubGroup(ring.comm, range(first, first + token_ranks)))
        """The ranks of this row, which is the ring of the caches that they share."""

    def attended(self, heads: int) -> slice:
        """Return the slice of the heads with which this rank's row attends.

        heads: the number of all query heads, or of all key/value heads.
        Raises: ShapeError unless `heads` is divisible by `head_ranks`.
        """
        return self._share(heads, self.row, self.head_ranks)

    def owned(self, heads: int) -> slice:
        """Return the slice of all `heads` query heads that this rank has after attention.

        Raises: ShapeError unless the ranks can share the heads.
        """
        return self._share(heads, self.ring.rank, self.ring.world_size)

    def attend(
        self, q: Query, cache: Cache, *args: Any, heads: int | None = None, **how: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return attention of this rank's `owned` heads, given the queries of all its `attended` heads.

        heads: the number of query heads of the model. q must have this row's share of them.
        cache: the cache of this rank's `attended` key/value heads, on the ring `tokens`.
        args, how: as in `decode_heads`, so `sinks` has a logit for each of the `attended` heads. All ranks of
        the grid compare their calls, and all raise an error if one call is wrong.
        Raises: WorldSizeError if `cache` is on another ring or is not a cache; the errors of `decode_heads`.
        """
        comm = comm_of(cache)
        if comm is None or members(comm) != members(self.tokens.comm):
            refusal = WorldSizeError(
                f"a cache on grid.tokens, the {self.token_ranks} ranks of this row",
                repr(cache) if comm is None else f"{cache!r} on ranks {list(members(comm)[1])}",
                "make the cache with grid.tokens as its ring",
            )
            if how.get("validate", True):
                agree(self.ring.comm, "", refusal)
            raise refusal
        of_row = None if heads is None else heads // self.head_ranks
        return decode_heads(q, cache, *args, queries="all", heads=of_row, ring=self.ring, **how)

    def _share(self, heads: int, place: int, ranks: int) -> slice:
        if heads % ranks:
            raise ShapeError(f"heads that {ranks} ranks can share", f"{heads}")
        return slice(place * heads // ranks, (place + 1) * heads // ranks)
