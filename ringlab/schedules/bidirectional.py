"""The ring in both directions: half of the blocks come from the previous rank, half from the next rank.

Each round brings two blocks, one in each direction, and is hidden behind the computation of two blocks.
There are half as many rounds as in a ring, with as many bytes and messages. dK and dV follow their blocks.
Each direction ends on the opposite side of the ring, and its sums return to the owner in one message from
there. If all sends of a rank share one port, nothing is gained.

TokenRing uses both directions in another way: K/V stay, q goes one way, and each of the P − 1 partial results
returns directly to its owner. Here, by contrast, results stay on the rank of their rows.
Source of the idea to use both directions: arXiv 2412.20501, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

from ringlab.blocks.protocol import Gradient
from ringlab.comm.ring import Ring
from ringlab.comm.way import OnWay
from ringlab.schedules.block_schedule import BlockSchedule
from ringlab.schedules.call import AttentionCall
from ringlab.schedules.ring import RingGradientReturn
from ringlab.schedules.route import circulate
from ringlab.types import BlockTensor

Offsets = tuple[int, ...]


class BidirectionalSchedule(BlockSchedule):
    """Needs four receive buffers instead of a ring's two, and half as many rounds."""

    name = "bidirectional"

    def arriving_blocks(
        self, call: AttentionCall, k: BlockTensor, v: BlockTensor
    ) -> Iterator[tuple[int, BlockTensor, BlockTensor]]:
        near, far = _both_ways(call)
        ways = (
            circulate(call, (0, *near), k, v, tag="kv"),
            circulate(_from_next(call), (0, *far), k, v, tag="kv"),
        )
        rounds = zip_longest(*ways)
        origin, (own_k, own_v) = next(rounds)[0]
        yield origin, own_k, own_v
        for blocks in rounds:
            for origin, (block_k, block_v) in filter(None, blocks):
                yield origin, block_k, block_v

    def gradient_return(self, call: AttentionCall) -> BothWaysReturn:
        return BothWaysReturn(call)


def _both_ways(call: AttentionCall) -> tuple[Offsets, Offsets]:
    """Return the offsets of visible blocks up to half the ring, and the offsets of the other visible blocks.

    The second tuple descends, because its blocks come from the other side of the ring.
    """
    P = call.ring.world_size
    near = tuple(distance for distance in call.offsets[1:] if 2 * distance <= P)
    return near, call.offsets[: len(near) : -1]


def _from_next(call: AttentionCall) -> AttentionCall:
    """Return `call` with a ring that has a way of its own, for the blocks that come from the next rank."""
    return replace(call, ring=Ring(OnWay(call.ring.comm, "from the next rank")))


class BothWaysReturn:
    """A `GradientReturn` with a `RingGradientReturn` for each direction, whose sums it adds."""

    def __init__(self, call: AttentionCall) -> None:
        self.ring = call.ring
        near, self.far = _both_ways(call)
        self.of_near = RingGradientReturn(call, (0, *near))
        self.of_far = RingGradientReturn(_from_next(call), self.far)

    def add_block(self, origin: int, k: BlockTensor, v: BlockTensor, gradients: list[Gradient]) -> None:
        """Add `gradients` to the sums that follow the block of `origin` in its direction."""
        distance = (self.ring.rank - origin) % self.ring.world_size
        way = self.of_far if distance in self.far else self.of_near
        way.add_block(origin, k, v, gradients)

    def own_gradients(self) -> tuple[BlockTensor, BlockTensor]:
        """Return (dk, dv) of this rank's own block, once both directions have returned their sums."""
        dk, dv = self.of_near.own_gradients()
        if self.far:
            of_far_k, of_far_v = self.of_far.own_gradients()
            dk, dv = dk + of_far_k, dv + of_far_v
        return dk, dv
