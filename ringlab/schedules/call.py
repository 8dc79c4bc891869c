"""One call of attention on one rank, and what every schedule does with a K/V block that is here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from torch import Tensor

from ringlab.blocks.protocol import BackwardSteps, Block, ForwardSteps, Gradient, StepBlock
from ringlab.comm.protocol import side_by_side
from ringlab.comm.ring import Ring
from ringlab.layout import Layout
from ringlab.plan import Row, Tile, plan
from ringlab.schedules.tilewise import TilewiseBackward, TilewiseForward

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """What stays the same while the blocks pass by."""

    ring: Ring
    layout: Layout
    block: Block
    causal: bool
    scale: float

    def length(self, origin: int) -> int:
        """Return the tokens of the block that belongs to rank `origin`."""
        return self.layout.length(origin)

    def compute(self, label: str, function: Callable[..., T], *args: Any) -> T:
        """Return `function(self, *args)`, beside other ranks' computations where the block allows it."""
        if self.block.thread_safe:
            return self.ring.comm.compute(label, side_by_side(partial(function, self)), *args)
        return self.ring.comm.compute(label, function, self, *args)

    def tiles(self, origin: int) -> tuple[Tile, ...]:
        """Return the tiles in which this rank's rows meet the block of rank `origin`."""
        return self._tiles[origin]

    @cached_property
    def _tiles(self) -> Row:
        return plan(self.layout, self.causal, self.block.largest_causal).row(self.ring.rank)

    def forward_steps(self, q: Tensor) -> ForwardSteps:
        """Return the forward of `q` over the blocks of all ranks: the block's own, or tile by tile."""
        if isinstance(self.block, StepBlock):
            return self.block.forward_steps(q, self.ring.world_size, scale=self.scale)
        return TilewiseForward(self.block, q, self.scale)

    def backward_steps(self, saved: Saved) -> BackwardSteps:
        """Return the backward of `saved` over the blocks of all ranks: the block's own, or tile by tile."""
        if isinstance(self.block, StepBlock):
            count, of_rows = self.ring.world_size, (saved.dout, saved.q, saved.lse, saved.delta)
            return self.block.backward_steps(*of_rows, count, scale=self.scale)
        return TilewiseBackward(
            self.block, saved.dout, saved.q, saved.out, saved.lse, saved.delta, self.scale
        )


@dataclass(frozen=True)
class Saved:
    """What backward needs of the forward and of the loss: all of this rank's rows."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    delta: Tensor


def attend(call: Call, steps: ForwardSteps, origin: int, k: Tensor, v: Tensor) -> None:
    """Let `steps` attend to the block of `origin`."""
    steps.take(call.tiles(origin), k, v)


def attend_backward(call: Call, steps: BackwardSteps, origin: int, k: Tensor, v: Tensor) -> list[Gradient]:
    """Return what this rank's rows add to the gradients of the block of `origin`."""
    return steps.take(call.tiles(origin), k, v)
