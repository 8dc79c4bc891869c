"""The contrast to the ring: every rank gathers all K/V first. As many bytes, P times the memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ringlab.blocks.protocol import Gradient
from ringlab.schedules.call import Call
from ringlab.schedules.tilewise import RowSum


class AllGatherSchedule:
    """Blocks are taken in the ring's order, so that the forward equals the ring's bit for bit."""

    name = "allgather"

    def blocks(self, call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        ring = call.ring
        shapes = [(*k.shape[:2], call.length(origin), k.shape[-1]) for origin in range(ring.world_size)]
        keys, values = ring.all_gather(k, shapes), ring.all_gather(v, shapes)
        for step in range(ring.world_size):
            origin = ring.origin(step)
            yield origin, keys[origin], values[origin]

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
        for distance in range(1, ring.world_size):
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
