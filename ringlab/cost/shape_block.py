"""A block that computes nothing: it allocates the tensors of a kernel and charges its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ringlab.blocks.protocol import BackwardRows, Gradient, StepBlock
from ringlab.cost.block_time import BlockTime
from ringlab.cost.sizes import Attention
from ringlab.merge import Partial
from ringlab.plan import Tile
from ringlab.scores import PLAIN_RULES, TileRules
from ringlab.types import KeyValue, Query, Value

Tiles = tuple[Tile, ...]


def torch_dtype(name: str) -> torch.dtype:
    """Return a dtype of torch with as many bytes as the dtype of this name."""
    dtype: torch.dtype = getattr(torch, {"float8": "float8_e4m3fn", "tf32": "float32"}.get(name, name))
    return dtype


class Prices:
    """Seconds of tiles, looked up by the identity of their tuple, since plans return the same tuples again and again."""

    def __init__(self, block_time: BlockTime, sizes: Attention) -> None:
        self.block_time, self.sizes = block_time, sizes
        self._books: dict[tuple[int, int, bool], Book] = {}

    def book(self, q: Query, backward: bool) -> Book:
        """Return the prices of blocks with the queries q, whose heads and rows differ on Ulysses ranks."""
        heads, rows = q.shape[1:3]
        return self._books.setdefault((heads, rows, backward), Book(self, heads, rows, backward))


class Book:
    """The cost of tiles in seconds, for a rank with `rows` rows and `heads` query heads."""

    def __init__(self, prices: Prices, heads: int, rows: int, backward: bool) -> None:
        self.prices, self.rows, self.backward = prices, rows, backward
        self.sizes = replace(prices.sizes, H=heads, K=1)  # a block's time does not depend on K
        self.known: dict[int, float] = {}
        self._kept: list[Tiles] = []
        self._single: dict[Tile, Tiles] = {}

    def seconds(self, tiles: Tiles) -> float:
        """Return the seconds that `tiles` take."""
        found = self.known.get(id(tiles))
        if found is None:
            found = self.prices.block_time.seconds(tiles, self.sizes, self.rows, self.backward)
            self.known[id(tiles)] = found
            self._kept.append(tiles)  # keeps its id from being used again
        return found

    def of_tile(self, tile: Tile) -> float:
        """Return the seconds that a launch for `tile` alone takes."""
        return self.seconds(self._single.setdefault(tile, (tile,)))


class ShapeBlock(StepBlock):
    """A `StepBlock` of shapes that holds the same tensors between steps as a fused kernel, such as the Triton block.

    spend: a function that is called with the seconds of every step's tiles.
    """

    name = "shapes"
    largest_causal: int | None = None
    thread_safe = False
    supported_rules: frozenset[str] = frozenset()

    def __init__(self, prices: Prices, spend: Callable[[float], None]) -> None:
        self.prices, self.spend = prices, spend

    def supports(self, q: Query) -> str | None:
        """Return None for tensors on the device "meta", otherwise the reason for refusing them."""
        return None if q.device.type == "meta" else "computes shapes only, of tensors on the device 'meta'"

    def forward(
        self,
        q: Query,
        k: KeyValue,
        v: Value,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> Partial:
        """Return one tile's partial without data, and charge the tile's seconds."""
        self._charge(q, k, causal, backward=False)
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        return Partial(out, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device))

    def backward(
        self,
        rows: BackwardRows,
        k: KeyValue,
        v: Value,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return one tile's dq, dk and dv without data, and charge the tile's seconds."""
        self._charge(rows.q, k, causal, backward=True)
        dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (rows.q, k, v))
        return dq, dk, dv

    def _charge(self, q: Tensor, k: Tensor, causal: bool, *, backward: bool) -> None:
        self.spend(self.prices.book(q, backward).of_tile(Tile(0, q.shape[2], 0, k.shape[2], causal)))

    def begin_forward(self, q: Query, count: int, *, scale: float) -> ShapeForward:
        """Return the forward of `q` over `count` blocks."""
        return ShapeForward(self, q, count)

    def begin_backward(self, rows: BackwardRows, count: int, *, scale: float) -> ShapeBackward:
        """Return the backward of `rows` over `count` blocks."""
        return ShapeBackward(self, rows.q, count)


class ShapeForward:
    """The forward over all blocks: a float32 accumulator and two row states between steps, out and lse at the end."""

    def __init__(self, block: ShapeBlock, q: Tensor, count: int) -> None:
        self.q, self.left = q, count
        self.seconds, self.spend = block.prices.book(q, False).seconds, block.spend
        self.state: tuple[Tensor, ...] = ()
        self.out = self.lse = q

    def attend(self, tiles: Tiles, k: KeyValue, v: Value, rules: TileRules = PLAIN_RULES) -> None:
        """Charge the seconds of `tiles`."""
        self.left -= 1
        shape = (*self.q.shape[:-1], v.shape[-1])
        if not self.left:
            self.out = torch.empty(shape, dtype=self.q.dtype, device=self.q.device)
            self.lse = torch.empty(self.q.shape[:-1], dtype=torch.float32, device=self.q.device)
            self.state = ()
        elif not self.state:
            acc = torch.empty(shape, dtype=torch.float32, device=self.q.device)
            self.state = acc, acc.new_empty(self.q.shape[:-1]), acc.new_empty(self.q.shape[:-1])
        self.spend(self.seconds(tiles))

    def partial(self) -> Partial:
        """Return out and lse as tensors that have shapes and no data."""
        return Partial(self.out, self.lse)


class ShapeBackward:
    """The backward over all blocks: dQ in float32 between steps, and the current block's dK and dV at each step."""

    def __init__(self, block: ShapeBlock, q: Tensor, count: int) -> None:
        self.q, self.left = q, count
        self.seconds, self.spend = block.prices.book(q, True).seconds, block.spend
        self.total = self.dq = q

    def differentiate(
        self, tiles: Tiles, k: KeyValue, v: Value, rules: TileRules = PLAIN_RULES
    ) -> list[Gradient]:
        """Charge the seconds of `tiles`; return the block's gradients without data, or [] without tiles."""
        self.left -= 1
        if self.left and self.total is self.q:
            self.total = torch.empty(self.q.shape, dtype=torch.float32, device=self.q.device)
        if not self.left:
            self.dq, self.total = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device), self.q
        self.spend(self.seconds(tiles))
        if not tiles:
            return []
        dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
        return [Gradient(slice(0, k.shape[2]), dk, dv)]

    def query_gradient(self) -> Tensor:
        """Return dq without data."""
        return self.dq
