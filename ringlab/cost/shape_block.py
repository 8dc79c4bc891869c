"""A block that computes nothing: it takes the tensors that a kernel would take, and charges its time."""

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

Tiles = tuple[Tile, ...]


class Prices:
    """Seconds of tiles, looked up by identity: plans hand out the same tuples again and again."""

    def __init__(self, block_time: BlockTime, sizes: Attention) -> None:
        self.block_time, self.sizes = block_time, sizes
        self._books: dict[tuple[int, int, bool], Book] = {}

    def book(self, q: Tensor, backward: bool) -> Book:
        """Return the prices for blocks that are given q: a Ulysses rank has fewer heads of more rows."""
        heads, rows = q.shape[1:3]
        return self._books.setdefault((heads, rows, backward), Book(self, heads, rows, backward))


class Book:
    """What tiles cost a rank of `rows` rows of `heads` query heads, in seconds."""

    def __init__(self, prices: Prices, heads: int, rows: int, backward: bool) -> None:
        self.prices, self.rows, self.backward = prices, rows, backward
        self.sizes = replace(prices.sizes, H=heads, K=1)  # K takes no part in what a block computes
        self.known: dict[int, float] = {}
        self._kept: list[Tiles] = []
        self._single: dict[Tile, Tiles] = {}

    def seconds(self, tiles: Tiles) -> float:
        """Return the seconds that `tiles` take."""
        found = self.known.get(id(tiles))
        if found is None:
            found = self.prices.block_time.seconds(tiles, self.sizes, self.rows, self.backward)
            self.known[id(tiles)] = found
            self._kept.append(tiles)  # so that its id stays its own
        return found

    def of_tile(self, tile: Tile) -> float:
        """Return the seconds that a launch for `tile` alone takes."""
        return self.seconds(self._single.setdefault(tile, (tile,)))


class ShapeBlock(StepBlock):
    """A `StepBlock` of shapes: what a fused kernel holds between steps, as the Triton block does.

    spend: called with the seconds of every step's tiles.
    """

    name = "shapes"
    largest_causal: int | None = None
    thread_safe = False
    supported_rules: frozenset[str] = frozenset()

    def __init__(self, prices: Prices, spend: Callable[[float], None]) -> None:
        self.prices, self.spend = prices, spend

    def supports(self, q: Tensor) -> str | None:
        """Return None on the device "meta", else why not."""
        return None if q.device.type == "meta" else "computes shapes only, of tensors on the device 'meta'"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> Partial:
        """Return the shapes of one tile's partial, and charge its seconds: windows are computed tile by tile."""
        self._charge(q, k, causal, backward=False)
        return Partial(torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device))

    def backward(
        self,
        rows: BackwardRows,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the shapes of one tile's dq, dk and dv, and charge its seconds."""
        self._charge(rows.q, k, causal, backward=True)
        dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (rows.q, k, v))
        return dq, dk, dv

    def _charge(self, q: Tensor, k: Tensor, causal: bool, *, backward: bool) -> None:
        self.spend(self.prices.book(q, backward).of_tile(Tile(0, q.shape[2], 0, k.shape[2], causal)))

    def begin_forward(self, q: Tensor, count: int, *, scale: float) -> ShapeForward:
        """Return the forward of `q` over `count` blocks."""
        return ShapeForward(self, q, count)

    def begin_backward(self, rows: BackwardRows, count: int, *, scale: float) -> ShapeBackward:
        """Return the backward of `rows` over `count` blocks."""
        return ShapeBackward(self, rows.q, count)


class ShapeForward:
    """Between steps a float32 accumulator and two row states; at the end out and lse."""

    def __init__(self, block: ShapeBlock, q: Tensor, count: int) -> None:
        self.q, self.left = q, count
        self.seconds, self.spend = block.prices.book(q, False).seconds, block.spend
        self.state: tuple[Tensor, ...] = ()
        self.out = self.lse = q

    def attend(self, tiles: Tiles, k: Tensor, v: Tensor, rules: TileRules = PLAIN_RULES) -> None:
        """Charge the seconds of `tiles`."""
        self.left -= 1
        if not self.left:
            self.out = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)
            self.lse = torch.empty(self.q.shape[:-1], dtype=torch.float32, device=self.q.device)
            self.state = ()
        elif not self.state:
            acc = torch.empty(self.q.shape, dtype=torch.float32, device=self.q.device)
            self.state = acc, acc.new_empty(self.q.shape[:-1]), acc.new_empty(self.q.shape[:-1])
        self.spend(self.seconds(tiles))

    def partial(self) -> Partial:
        """Return the shapes of out and lse."""
        return Partial(self.out, self.lse)


class ShapeBackward:
    """Between steps dQ in float32; at each step dK and dV of the block that is here, in float32."""

    def __init__(self, block: ShapeBlock, q: Tensor, count: int) -> None:
        self.q, self.left = q, count
        self.seconds, self.spend = block.prices.book(q, True).seconds, block.spend
        self.total = self.dq = q

    def differentiate(
        self, tiles: Tiles, k: Tensor, v: Tensor, rules: TileRules = PLAIN_RULES
    ) -> list[Gradient]:
        """Charge the seconds of `tiles`; return the shapes of the block's gradients, or nothing."""
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
        """Return the shape of dq."""
        return self.dq
