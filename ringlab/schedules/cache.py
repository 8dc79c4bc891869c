"""The K/V cache of a sequence that is being generated, spread over the ranks; `decode` attends to it."""

from __future__ import annotations

from array import array
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ringlab.comm.ring import Ring, check_ring
from ringlab.errors import DeviceError, DtypeError, LayoutError, ShapeError
from ringlab.handles import Handled, object_of
from ringlab.layout import Layout
from ringlab.torch_modes import ORDER
from ringlab.types import KeyValue, Value
from ringlab.upload import upload

GROWTH = 1.5
"""The factor by which full memory grows. Each token is copied at most three times on average."""


@runtime_checkable
class CacheShard(Protocol):
    """This rank's tokens of a sequence, as `attend_to_cache` reads them; implemented by `ShardedCache`."""

    @property
    def k(self) -> KeyValue:
        """The keys, in the order of their positions."""
        ...

    @property
    def v(self) -> KeyValue:
        """The values, in the order of their positions."""
        ...

    @property
    def positions(self) -> Int64[np.ndarray, " L"]:
        """The global positions of this rank's tokens, ascending."""
        ...

    @property
    def length(self) -> int:
        """The number of tokens of the sequence on all ranks together."""
        ...


class ShardedCache(Handled):
    """K and V of all tokens so far, each token on one rank.

    All ranks append the same tokens in the same order, and each rank keeps its share. The next token goes to
    the rank with the fewest tokens, or to the first such rank if there are several. Every rank therefore
    knows where each token is, without a message. Gradients do not flow through a cache.

    ring: the ranks. batch, kv_heads, head_dim: the sizes of k and v, (B, K, n, D). value_dim: the head dim of
    v, if it differs from that of k. capacity: the number of tokens on this rank for which memory is allocated
    at once.
    Raises: WorldSizeError if `ring` is not a Ring.

    >>> import torch
    >>> from ringlab import ShardedCache, VirtualCluster
    >>> def program(ring):
    ...     cache = ShardedCache(ring, batch=1, kv_heads=2, head_dim=8)
    ...     cache.append(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8))
    ...     return cache.lengths
    >>> VirtualCluster(2).run(program).results
    [[3, 2], [3, 2]]
    """

    def __init__(
        self,
        ring: Ring,
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        capacity: int = 0,
    ) -> None:
        check_ring(ring)
        self.ring = ring
        self.lengths: list[int] = [0] * ring.world_size
        """The number of tokens on each rank."""
        rows = (batch, kv_heads, max(0, capacity))
        self.value_dim = head_dim if value_dim is None else value_dim
        """The head dim of v."""
        self._k = torch.empty((*rows, head_dim), dtype=dtype, device=device)
        self._v = self._k.new_empty((*rows, self.value_dim))
        self._positions = np.empty(max(0, capacity), np.int64)
        self._owners = array("i")

    @classmethod
    def of_shards(cls, ring: Ring, layout: Layout, k: KeyValue, v: Value, *, room: int = 0) -> ShardedCache:
        """Return a cache that contains a prefill, that is, the k and v that were passed to `ring_attention`.

        room: the number of further tokens on this rank for which memory is allocated at once.
        Raises: LayoutError, WorldSizeError or ShapeError for shards that do not fit the layout.
        """
        if not isinstance(layout, Layout):
            raise LayoutError("layout= a ringlab layout, such as zigzag(S, P)", repr(layout))
        if k.ndim != 4:
            raise ShapeError("k and v (B, K, L, D)", f"{tuple(k.shape)} and {tuple(v.shape)}")
        B, K, _, D = k.shape
        cache = cls(
            ring,
            batch=B,
            kv_heads=K,
            head_dim=D,
            value_dim=v.shape[-1],
            dtype=k.dtype,
            device=k.device,
            capacity=k.shape[2] + room,
        )
        cache.append_shards(layout, k, v)
        return cache

    def __repr__(self) -> str:
        return f"ShardedCache({self.length} tokens as {self.lengths}, rank {self.ring.rank})"

    @property
    def length(self) -> int:
        """Return the number of tokens of the sequence so far on all ranks together."""
        return sum(self.lengths)

    @property
    def local_length(self) -> int:
        """Return the number of tokens on this rank."""
        return self.lengths[self.ring.rank]

    @property
    def capacity(self) -> int:
        """Return the number of tokens for which this rank has allocated memory."""
        return self._k.shape[2]

    @property
    def k(self) -> KeyValue:
        """Return a view of this rank's keys in the order of their positions."""
        return self._k[..., : self.local_length, :]

    @property
    def v(self) -> Value:
        """Return a view of this rank's values in the order of their positions."""
        return self._v[..., : self.local_length, :]

    @property
    def positions(self) -> Int64[np.ndarray, " L"]:
        """Return a view of the global positions of this rank's tokens, ascending."""
        return self._positions[: self.local_length]

    def positions_of(self, rank: int) -> Int64[np.ndarray, " L"]:
        """Return the global positions of the tokens of `rank`, ascending."""
        return np.flatnonzero(np.array(self._owners, np.int32) == rank)

    def next_positions(self, tokens: int | Layout) -> Int64[np.ndarray, " n"]:
        """Return the positions of the next tokens, for RoPE.

        If `tokens` is a number, these are the positions of all next tokens. If it is a layout, they are those
        of this rank.
        """
        own = tokens.positions(self.ring.rank) if isinstance(tokens, Layout) else np.arange(tokens)
        return self.length + own

    def append(self, k: Float[Tensor, "B K n D"], v: Float[Tensor, "B K n Dv"]) -> None:
        """Append the next n tokens, which are the same on all ranks. Sends nothing.

        Raises: ShapeError, DtypeError or DeviceError for tensors that do not fit the cache.
        """
        if torch.compiler.is_dynamo_compiling():
            return append_in_graph(self, k, v)
        self._check_new(k, v)
        first, mine = self.length, []
        for token in range(k.shape[2]):
            owner = self._next_owner()
            if owner == self.ring.rank:
                mine.append(token)
            self.lengths[owner] += 1
            self._owners.append(owner)
        if mine:
            index = upload(np.array(mine), k.device)
            self._store(k.index_select(2, index), v.index_select(2, index), first + np.array(mine, np.int64))
        return None

    def append_shards(self, layout: Layout, k: KeyValue, v: Value) -> None:
        """Append the next tokens, each on the rank that has it under `layout`. Sends nothing.

        Raises: LayoutError, WorldSizeError, ShapeError, DtypeError or DeviceError for shards that do not fit.
        """
        self.check_shards(layout, k, v)
        positions = layout.positions(self.ring.rank)
        order = np.argsort(positions, kind="stable")
        if (order[1:] < order[:-1]).any():
            k, v = (x[..., upload(order, x.device), :] for x in (k, v))
        self._store(k, v, self.length + positions[order])
        owners = np.empty(layout.S, np.int32)
        for rank in range(layout.P):
            owners[layout.positions(rank)] = rank
        self._owners.frombytes(owners.tobytes())
        self.lengths[:] = [old + new for old, new in zip(self.lengths, layout.lengths, strict=True)]

    def check_shards(self, layout: Layout, k: KeyValue, v: Value) -> None:
        """Check that `append_shards` accepts these arguments. Raises: the errors of `append_shards`."""
        if not isinstance(layout, Layout):
            raise LayoutError("layout= a ringlab layout, such as zigzag(S, P)", repr(layout))
        layout.of_ranks(self.ring.world_size)
        length = layout.length(self.ring.rank)
        _check_tensors(k=k, v=v)
        if k.ndim != 4 or k.shape[:-1] != v.shape[:-1] or k.shape[2] != length:
            raise ShapeError(
                f"k (B, K, {length}, D) and v (B, K, {length}, Dv), the shards of rank {self.ring.rank} under {layout!r}",
                f"{tuple(k.shape)} and {tuple(v.shape)}",
            )
        self._check_new(k, v)

    def _check_new(self, k: Tensor, v: Tensor) -> None:
        """Raise an error of `append` if the new tokens do not fit the cache."""
        _check_tensors(k=k, v=v)
        for name, x, stored in (("k", k, self._k), ("v", v, self._v)):
            B, K, _, D = stored.shape
            if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (B, K, D) or x.shape[2] != k.shape[2]:
                raise ShapeError(f"{name} of the new tokens as ({B}, {K}, n, {D})", str(tuple(x.shape)))
            if x.dtype != self._k.dtype:
                raise DtypeError(f"{name} in {self._k.dtype}, the dtype of the cache", str(x.dtype))
            if x.device != self._k.device:
                raise DeviceError(f"{name} on {self._k.device}, the device of the cache", str(x.device))

    def _next_owner(self) -> int:
        """Return the rank that receives the next token."""
        return min(range(len(self.lengths)), key=self.lengths.__getitem__)

    @torch.no_grad()
    def _store(self, k: Tensor, v: Tensor, positions: np.ndarray) -> None:
        """Write the tokens after the stored ones."""
        start = self._filled
        stop = start + len(positions)
        if stop > self.capacity:
            self._grow(stop)
        self._k[..., start:stop, :], self._v[..., start:stop, :] = k, v
        self._positions[start:stop] = positions
        self._filled = stop

    _filled = 0

    def _grow(self, least: int) -> None:
        """Allocate memory for at least `least` tokens. The memory grows by a factor, so it grows rarely."""
        room = max(least, int(GROWTH * self.capacity) + 1)
        for name in ("_k", "_v"):
            old = getattr(self, name)
            new = old.new_empty((*old.shape[:2], room, old.shape[3]))
            new[..., : self._filled, :] = old[..., : self._filled, :]
            setattr(self, name, new)
        self._positions = np.concatenate(
            [self._positions[: self._filled], np.empty(room - self._filled, np.int64)]
        )


def _check_tensors(**named: Any) -> None:
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise ShapeError(f"{name} as a tensor (batch, heads, tokens, head dim)", type(x).__name__)


def append_in_graph(
    cache: Handled, k: Any, v: Any, sequences: list[int] | None = None, new: list[int] | None = None
) -> None:
    """Append to either kind of cache by an operator, which becomes a part of the graph of torch.compile."""
    torch.ops.ringlab.append(ORDER, k, v, cache.handle, sequences, new)


@torch.library.custom_op(
    "ringlab::append",
    mutates_args=("order",),
    tags=(torch.Tag.cudagraph_unsafe,),  # it plans on the CPU
    schema="(Tensor(a!) order, Tensor k, Tensor v, SymInt cache, SymInt[]? sequences, SymInt[]? new) -> ()",
)
def _append(
    order: Tensor, k: Tensor, v: Tensor, cache: int, sequences: list[int] | None, new: list[int] | None
) -> None:
    """Append tokens to the cache when the graph runs. order: see `ringlab.torch_modes.ORDER`."""
    object_of(cache).append(k.detach(), v.detach(), *(() if sequences is None else (sequences, new)))


@_append.register_fake
def _append_nothing(*arguments: Any) -> None:
    pass
