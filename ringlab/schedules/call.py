"""One call of attention on one rank, and how its rows attend to one K/V block, forward and backward.

`ring_attention` makes the `AttentionCall` and gives it to a schedule. The schedule brings the blocks; for each one it runs
`attend_to_block` or, in backward, `differentiate_block`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ringlab.blocks import record_short_tiles
from ringlab.blocks.protocol import BackwardRows, BackwardSteps, Block, ForwardSteps, Gradient, StepBlock
from ringlab.blocks.tilewise import TilewiseBackward, TilewiseForward
from ringlab.comm.ring import Ring
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.plan import Plan, plan
from ringlab.schedules.expansion import Expansion
from ringlab.scores import PLAIN_RULES, ScoreRules, TileRules
from ringlab.tile import Tile
from ringlab.types import BlockTensor, Query


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of a call of attention, which stay the same while K/V blocks travel.

    ring, layout, block, mask, scale and rules are those of `ring_attention`, with every default filled in.
    heads: (H, K) of the whole attention; if the schedule divides the heads, a rank computes only some of
    them.
    wants_lse: whether the caller asked for lse.
    validate: whether ranks compare their calls.
    sinks: for each query head a logit that takes weight but contributes no value, or None.
    name: the name of this call of attention, which is equal on all ranks. Ranks compare it in backward.
    expansion: makes the K and V of a block if other tensors travel in their place; None if K and V travel.
    """

    ring: Ring
    layout: Layout
    block: Block
    mask: Mask
    scale: float
    heads: tuple[int, int]
    wants_lse: bool = True
    rules: ScoreRules = field(default_factory=ScoreRules)
    validate: bool = False
    name: str = ""
    sinks: Tensor | None = field(default=None, compare=False)
    expansion: Expansion | None = None

    def tiles(self, origin: int, rank: int | None = None) -> tuple[Tile, ...]:
        """Return the tiles in which the rows of `rank` (by default this one) see the block of `origin`."""
        return self._plan.of_rank(self.ring.rank if rank is None else rank)[origin]

    def record_short_tiles(self) -> None:
        """Record in the trace that `blockwise` computes the tiles that are too short for the block, if any are."""
        tiles = (tile for origin in range(self.ring.world_size) for tile in self.tiles(origin))
        sizes = ((tile.q_stop - tile.q_start, tile.k_stop - tile.k_start) for tile in tiles)
        record_short_tiles(self.ring.comm, self.block, sizes)

    def tile_rules(self, origin: int, rank: int | None = None) -> TileRules:
        """Return the score rules for all rows of `rank` and all keys of the block of `origin`.

        `rank` is this rank by default.
        """
        if not self.rules.requirements:
            return PLAIN_RULES
        rank = self.ring.rank if rank is None else rank
        rows, keys = (self.layout.positions(owner) for owner in (rank, origin))
        return self.rules.of_tile(rows, keys)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the offsets in ranks at which some row sees a block: 0 … P − 1, or fewer under a mask."""
        return self._plan.offsets

    @cached_property
    def _plan(self) -> Plan:
        return plan(self.layout, self.mask, self.block.largest_causal)

    def begin_forward(self, q: Query, count: int) -> ForwardSteps:
        """Return the state of a forward of `q` over `count` blocks, before the first block.

        This is a `TilewiseForward`, unless the block backend has its own class, such as `TritonForward` for
        `TritonBlock`.
        """
        if isinstance(self.block, StepBlock):
            return self.block.begin_forward(q, count, scale=self.scale)
        return TilewiseForward(self.block, q, self.scale)

    def begin_backward(self, rows: BackwardRows, count: int) -> BackwardSteps:
        """Return the state of a backward of `rows` over `count` blocks, before the first block.

        This is a `TilewiseBackward`, unless the block backend has its own class, such as `TritonBackward` for
        `TritonBlock`. If another block backend computes the backward, record that.
        """
        if isinstance(self.block, StepBlock):
            steps = self.block.begin_backward(rows, count, scale=self.scale)
            if isinstance(steps, TilewiseBackward) and steps.block is not self.block:
                asked = f"the backward of block='{self.block.name}'"
                self.ring.comm.record_choice(asked, steps.block.name)
            return steps
        return TilewiseBackward(self.block, rows, self.scale)


def attend_to_block(
    call: AttentionCall,
    steps: ForwardSteps,
    origin: int,
    k: BlockTensor,
    v: BlockTensor,
    rank: int | None = None,
) -> None:
    """Make the rows of `rank` (by default this one) attend to the block of `origin`."""
    if call.expansion is not None:
        k, v = call.expansion.expand(k, v)
    steps.attend(call.tiles(origin, rank), k, v, call.tile_rules(origin, rank))


def differentiate_block(
    call: AttentionCall,
    steps: BackwardSteps,
    origin: int,
    k: BlockTensor,
    v: BlockTensor,
    rank: int | None = None,
) -> list[Gradient]:
    """Return the contribution of the rows of `rank` to the gradients of the block of `origin`.

    `rank` is this rank by default.
    """
    tiles, rules = call.tiles(origin, rank), call.tile_rules(origin, rank)
    if call.expansion is None:
        return steps.differentiate(tiles, k, v, rules)
    gradients = steps.differentiate(tiles, *call.expansion.expand(k, v), rules)
    return call.expansion.contract(k, v, gradients)
