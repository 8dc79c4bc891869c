"""All-gather, the contrast to the ring: every rank first fetches all K/V.

It sends as many bytes as the ring, and takes P times the memory.

If a mask hides all blocks at some distance, ranks fetch only the blocks that their rows may see, and
gradients go only to the owners of these blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ringlab.blocks.protocol import Gradient
from ringlab.blocks.tilewise import RunningSum, add_gradients
from ringlab.schedules.block_schedule import BlockSchedule
from ringlab.schedules.call import AttentionCall
from ringlab.types import BlockTensor


class AllGatherSchedule(BlockSchedule):
    """Computes blocks in the ring's order, so that the results of forward equal the ring's bit for bit."""

    name = "allgather"

    def arriving_blocks(
        self, call: AttentionCall, k: BlockTensor, v: BlockTensor
    ) -> Iterator[tuple[int, BlockTensor, BlockTensor]]:
        ring = call.ring
        keys, values = (self._gather(call, x.contiguous()) for x in (k, v))
        for step, distance in enumerate(call.offsets):
            yield ring.origin(distance), keys[step], values[step]

    def _gather(self, call: AttentionCall, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks whose block is visible, in the order of distance, so this rank's own comes first."""
        ring, works = call.ring, []
        for distance in call.offsets[1:]:
            to, source = (ring.rank + distance) % ring.world_size, ring.origin(distance)
            into = x.new_empty((*x.shape[:2], call.layout.length(source), x.shape[-1]))
            works.append(
                ring.comm.exchange(send=(x,), to=to, receive=(into,), source=source, tag="all_gather")
            )
        return [x, *(work.wait()[0] for work in works)]

    def gradient_return(self, call: AttentionCall) -> ReduceScatterReturn:
        return ReduceScatterReturn(call)


class ReduceScatterReturn:
    """A `GradientReturn` that sends nothing until the last block is done.

    Then it sends the gradients of each block to the block's owner, and sums the gradients that arrive.
    """

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.parts: dict[int, tuple[Tensor, Tensor]] = {}

    def add_block(self, origin: int, k: BlockTensor, v: BlockTensor, gradients: list[Gradient]) -> None:
        """Store the sum of `gradients` for the block of `origin`."""
        dk, dv = RunningSum(k), RunningSum(v)
        add_gradients((dk, dv), gradients)
        self.parts[origin] = dk.value(), dv.value()

    def own_gradients(self) -> tuple[BlockTensor, BlockTensor]:
        """Return (dk, dv) of this rank's own block, summed over all ranks."""
        ring = self.call.ring
        dk, dv = self.parts[ring.rank]
        pending = []
        for distance in self.call.offsets[1:]:
            to, source = (ring.rank - distance) % ring.world_size, (ring.rank + distance) % ring.world_size
            buffers = torch.empty_like(dk), torch.empty_like(dv)
            sends = tuple(part.contiguous() for part in self.parts[to])
            pending.append(
                ring.comm.exchange(send=sends, to=to, receive=buffers, source=source, tag=f"dkv {distance}")
            )
        for work in pending:
            part_dk, part_dv = work.wait()
            dk, dv = dk + part_dk, dv + part_dv
        return dk, dv
