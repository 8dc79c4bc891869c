"""The ring: blocks travel from neighbour to neighbour, gradients travel with them.

K/V make P−1 hops, each posted before the block that is here is computed. dK/dV go the same way,
one hop behind, and make P: the last one brings them home.
Source: arXiv 2310.01889, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ringlab.blocks.protocol import Gradient
from ringlab.comm.protocol import Work, side_by_side
from ringlab.schedules.call import Call
from ringlab.schedules.tilewise import RowSum


class RingSchedule:
    """One block in use and one in flight; as many bytes as an all-gather, never the whole sequence."""

    name = "ring"

    def blocks(self, call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        ring, slots = call.ring, _Slots(call)
        for step in range(ring.world_size - 1):
            into = slots.take(ring.origin(step + 1), k, v)
            work = ring.post(k, v, into=into, hops=step, tag=f"kv {step}")
            yield ring.origin(step), k, v
            sent, (k, v) = (k, v), work.wait()
            if step > 0:  # before, it was this rank's own shard
                slots.recycle(*sent)
        yield ring.origin(ring.world_size - 1), k, v

    def homecoming(self, call: Call) -> _Couriers:
        return _Couriers(call)


class _Couriers:
    """The gradients of a block, handed on together with it."""

    def __init__(self, call: Call) -> None:
        self.call, self.step = call, 0
        self.slots = _Slots(call)
        self.work: Work | None = None
        self.sums: tuple[Tensor, Tensor] | None = None

    def add(self, origin: int, k: Tensor, v: Tensor, gradients: list[Gradient]) -> None:
        ring = self.call.ring
        arrived = self._arrived()
        self.sums = ring.compute(f"add dkv {self.step}", _sum, k, v, gradients, arrived)
        if ring.world_size > 1:
            into = self.slots.take(ring.origin(self.step + 1), *self.sums)
            self.work = ring.post(*self.sums, into=into, give=True, tag=f"dkv {self.step}")
        self.step += 1

    def finish(self) -> tuple[Tensor, Tensor]:
        sums = self._arrived() or self.sums
        assert sums is not None
        return sums

    def _arrived(self) -> tuple[Tensor, Tensor] | None:
        """The sums that come with the block that is here; None on the first step."""
        if self.work is None or self.sums is None:
            return None
        dk, dv = self.work.wait()
        self.slots.recycle(*self.sums)
        return dk, dv


@side_by_side
def _sum(
    k: Tensor, v: Tensor, gradients: list[Gradient], totals: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Add `gradients` to what arrived, or to nothing on the first step."""
    dk, dv = RowSum(k), RowSum(v)
    if totals is not None:
        dk.total, dv.total = totals
    for gradient in gradients:
        dk.add(gradient.keys, gradient.dk)
        dv.add(gradient.keys, gradient.dv)
    return dk.value(), dv.value()


class _Slots:
    """Receive buffers, each large enough for the longest block, used again once they were sent on."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.longest = max(call.length(origin) for origin in range(call.ring.world_size))
        self.free: list[list[torch.UntypedStorage]] = []

    def take(self, origin: int, *like: Tensor) -> list[Tensor]:
        """Return buffers for the block of `origin`, of the batch, heads and head dim of `like`."""
        shapes = [(*t.shape[:2], self.call.length(origin), t.shape[-1]) for t in like]
        sizes = [math.prod(shape) * t.element_size() for shape, t in zip(shapes, like, strict=True)]
        for slot in self.free:
            if all(storage.nbytes() >= size for storage, size in zip(slot, sizes, strict=True)):
                self.free.remove(slot)
                break
        else:
            whole = [(*t.shape[:2], self.longest, t.shape[-1]) for t in like]
            slot = [t.new_empty(shape).untyped_storage() for t, shape in zip(like, whole, strict=True)]
        return [
            t.new_empty(0).set_(storage, 0, shape)  # type: ignore[call-overload]
            for t, storage, shape in zip(like, slot, shapes, strict=True)
        ]

    def recycle(self, *tensors: Tensor) -> None:
        """Take back what was given to the next rank, for blocks to come."""
        self.free.append([tensor.untyped_storage() for tensor in tensors])
