"""One call of attention on one rank, and what every schedule does with a K/V block that is here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

from torch import Tensor

from ringlab.blocks.protocol import BackwardSteps, Block, ForwardSteps, Gradient, StepBlock
from ringlab.comm.protocol import side_by_side
from ringlab.comm.ring import Ring
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.plan import Plan, plan
from ringlab.schedules.tilewise import TilewiseBackward, TilewiseForward
from ringlab.scores import Scores, TileScores
from ringlab.tile import Tile

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """What stays the same while the blocks pass by."""

    ring: Ring
    layout: Layout
    block: Block
    mask: Mask
    scale: float
    heads: tuple[int, int]
    """(H, K) of the whole attention; a schedule that shares heads out computes some of them on each rank."""
    lse: bool = True
    """Whether lse is wanted too."""
    scores: Scores = field(default_factory=Scores)
    name: str = ""
    """Which call of attention it is, where ranks compare in backward whether they are in the same one."""

    def length(self, origin: int) -> int:
        """Return the tokens of the block that belongs to rank `origin`."""
        return self.layout.length(origin)

    def compute(self, label: str, function: Callable[..., T], *args: Any) -> T:
        """Return `function(self, *args)`, beside other ranks' computations where the block allows it."""
        if self.block.thread_safe:
            return self.ring.comm.compute(label, side_by_side(partial(function, self)), *args)
        return self.ring.comm.compute(label, function, self, *args)

    def tiles(self, origin: int, rank: int | None = None) -> tuple[Tile, ...]:
        """Return the tiles in which this rank's rows, or those of another, meet the block of rank `origin`."""
        return self._plan.row(self.ring.rank if rank is None else rank)[origin]

    @property
    def distances(self) -> tuple[int, ...]:
        """Return how far from home K/V blocks must come, ascending from 0: all of 0 … P − 1 where no window cuts."""
        return self._plan.distances

    @cached_property
    def _plan(self) -> Plan:
        return plan(self.layout, self.mask, self.block.largest_causal)

    @property
    def blocks(self) -> int:
        """Return how many blocks a rank takes, its own among them."""
        return len(self.distances)

    @property
    def _by_steps(self) -> bool:
        """Whether a block may compute a ring step at once: it knows no mirrored tiles, which windows make."""
        return self.mask.window is None

    def how(self, origin: int) -> TileScores | None:
        """Return what becomes of scores of this rank's rows and the block of `origin`; None for no more than usual."""
        if not self.scores.wishes:
            return None
        rows, keys = (self.layout.positions(rank) for rank in (self.ring.rank, origin))
        return self.scores.of_tile(rows, keys)

    def forward_steps(self, q: Tensor, count: int) -> ForwardSteps:
        """Return the forward of `q` over `count` blocks: the block's own, or tile by tile."""
        if isinstance(self.block, StepBlock) and self._by_steps:
            return self.block.forward_steps(q, count, scale=self.scale)
        return TilewiseForward(self.block, q, self.scale)

    def backward_steps(self, saved: Saved, count: int) -> BackwardSteps:
        """Return the backward of `saved` over `count` blocks: the block's own, or tile by tile."""
        if isinstance(self.block, StepBlock) and self._by_steps:
            of_rows = saved.dout, saved.q, saved.lse, saved.delta
            return self.block.backward_steps(*of_rows, count, scale=self.scale)
        of_all = saved.dout, saved.q, saved.out, saved.lse, saved.delta
        return TilewiseBackward(self.block, *of_all, self.scale)


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
    steps.take(call.tiles(origin), k, v, *_more(call, origin))


def attend_backward(call: Call, steps: BackwardSteps, origin: int, k: Tensor, v: Tensor) -> list[Gradient]:
    """Return what this rank's rows add to the gradients of the block of `origin`."""
    return steps.take(call.tiles(origin), k, v, *_more(call, origin))


def _more(call: Call, origin: int) -> tuple[TileScores, ...]:
    """What steps are told besides: nothing where nothing is asked for, as blocks may know of nothing."""
    how = call.how(origin)
    return () if how is None else (how,)
