"""The contrast to the ring: every rank gathers all K/V first. As many bytes, P times the memory.

Where a mask lets no row see what is so many ranks away, blocks do not go there, and no gradients come from there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ringlab.blocks.protocol import Gradient
from ringlab.schedules.call import Call
from ringlab.schedules.over_blocks import OverBlocks
from ringlab.schedules.tilewise import RowSum


class AllGatherSchedule(OverBlocks):
    """Blocks are taken in the ring's order, so that the forward equals the ring's bit for bit."""

    name = "allgather"

    def blocks(self, call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        ring = call.ring
        keys, values = (self._gather(call, x.contiguous()) for x in (k, v))
        for step, distance in enumerate(call.distances):
            yield ring.origin(distance), keys[step], values[step]

    def _gather(self, call: Call, x: Tensor) -> list[Tensor]:
        """Return this tensor of every rank whose block is visible, this rank's own first, then the nearest."""
        ring, works = call.ring, []
        for distance in call.distances[1:]:
            to, source = (ring.rank + distance) % ring.world_size, ring.origin(distance)
            into = x.new_empty((*x.shape[:2], call.length(source), x.shape[-1]))
            works.append(
                ring.comm.exchange(send=(x,), to=to, receive=(into,), source=source, tag="all_gather")
            )
        return [x, *(work.wait()[0] for work in works)]

    def homecoming(self, call: Call) -> _ReduceScatter:
        return _ReduceScatter(call)


class _ReduceScatter:
    """Keeps the gradients of all blocks, then sends each to its owner and sums what comes."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.parts: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, origin: int, k: Tensor, v: Tensor, gradients: list[Gradient]) -> None:
        dk, dv = RowSum(k), RowSum(v)
        for gradient in gradients:
            dk.add(gradient.keys, gradient.dk)
            dv.add(gradient.keys, gradient.dv)
        self.parts[origin] = dk.value(), dv.value()

    def finish(self) -> tuple[Tensor, Tensor]:
        ring = self.call.ring
        dk, dv = self.parts[ring.rank]
        pending = []
        for distance in self.call.distances[1:]:
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
