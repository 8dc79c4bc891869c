"""The ring: K/V blocks travel from neighbour to neighbour, and their gradients follow.

K/V make P − 1 hops. Each hop is posted before the computation on the current block. The sums dK/dV of a block
follow it: while a rank computes its contribution from the block, the sum of the contributions so far arrives.
The sums make P hops, and the last hop returns them to the block's owner. If a mask hides all blocks at some
distance, blocks skip the ranks that do not see them, and dK/dV return from the last rank in one message.
Source: arXiv 2310.01889, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringlab.blocks.protocol import Gradient
from ringlab.blocks.tilewise import RunningSum, add_gradients
from ringlab.comm.protocol import thread_safe
from ringlab.schedules.block_schedule import BlockSchedule
from ringlab.schedules.call import AttentionCall
from ringlab.schedules.protocol import GradientReturn
from ringlab.schedules.route import Couriers, circulate
from ringlab.types import BlockTensor


class RingSchedule(BlockSchedule):
    """Sends as many bytes as an all-gather, but has only two blocks in memory: one in use, one in flight."""

    name = "ring"

    def arriving_blocks(
        self, call: AttentionCall, k: BlockTensor, v: BlockTensor
    ) -> Iterator[tuple[int, BlockTensor, BlockTensor]]:
        for origin, (block_k, block_v) in circulate(call, call.offsets, k, v, tag="kv"):
            yield origin, block_k, block_v

    def gradient_return(self, call: AttentionCall) -> GradientReturn:
        return RingGradientReturn(call, call.offsets)


class RingGradientReturn:
    """A `GradientReturn` along a route: the sums of a block's gradients follow the block."""

    def __init__(self, call: AttentionCall, offsets: Sequence[int]) -> None:
        self.call, self.couriers = call, Couriers(call, offsets, "dkv")

    def add_block(self, origin: int, k: BlockTensor, v: BlockTensor, gradients: list[Gradient]) -> None:
        """Add `gradients` to the sums that follow the block of `origin`, and send them on."""
        label = f"add dkv {self.couriers.step}"
        arrived = self.couriers.arrived()
        self.couriers.send_on(*self.call.ring.compute(label, sum_gradients, k, v, gradients, arrived))

    def own_gradients(self) -> tuple[BlockTensor, BlockTensor]:
        """Return (dk, dv) of this rank's own block, once they have arrived."""
        dk, dv = self.couriers.own()
        return dk, dv


@thread_safe
def sum_gradients(
    k: BlockTensor, v: BlockTensor, gradients: list[Gradient], totals: tuple[BlockTensor, ...] | None
) -> tuple[BlockTensor, BlockTensor]:
    """Return (dk, dv) of a block in the state dtype: the sums of `gradients` and, if given, `totals`.

    `totals` are changed in place. Only the shape and dtype of k and v are read.
    """
    dk, dv = (RunningSum(k), RunningSum(v)) if totals is None else map(RunningSum, (k, v), totals)
    add_gradients((dk, dv), gradients)
    return dk.value(), dv.value()
