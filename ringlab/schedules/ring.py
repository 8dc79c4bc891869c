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
        origin = ring.rank
        here: tuple[Tensor, ...] = k, v
        for step in range(ring.world_size - 1):
            coming = ring.origin(step + 1)
            into = slots.take(coming, k, v)
            work = ring.post(k, v, into=into, hops=step, tag=f"kv {step}")
            yield origin, k, v
            arrived = work.wait()
            if step > 0:  # before, it was this rank's own shard
                slots.recycle(origin, here)
            origin, here = coming, arrived
            k, v = here
        yield origin, k, v

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
        self.sums = ring.compute(f"add dkv {self.step}", sum_gradients, k, v, gradients, arrived)
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
        self.slots.recycle(self.call.ring.origin(self.step - 1), self.sums)
        return dk, dv


@side_by_side
def sum_gradients(
    k: Tensor, v: Tensor, gradients: list[Gradient], totals: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return (dk, dv) of a block in the state dtype: `gradients` added to `totals`, if some have arrived."""
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
        self.lengths, self.longest = call.layout.lengths, call.layout.longest
        self.free: list[tuple[int, tuple[Tensor, ...]]] = []

    def take(self, origin: int, *like: Tensor) -> tuple[Tensor, ...]:
        """Return buffers for the block of `origin`, of the batch, heads and head dim of `like`."""
        length = self.lengths[origin]
        if self.free and self.free[-1][0] == length:
            return self.free.pop()[1]  # as it was: most blocks are of one length
        shapes = [(*t.shape[:2], length, t.shape[-1]) for t in like]
        if not self.free and length == self.longest:
            return tuple(t.new_empty(shape) for t, shape in zip(like, shapes, strict=True))
        storages = self._large_enough(shapes, like)
        return tuple(
            t.new_empty(0).set_(storage, 0, shape)  # type: ignore[call-overload]
            for t, storage, shape in zip(like, storages, shapes, strict=True)
        )

    def _large_enough(
        self, shapes: list[tuple[int, ...]], like: tuple[Tensor, ...]
    ) -> list[torch.UntypedStorage]:
        """Storages for these shapes: those of a slot that is free, or new ones for the longest block."""
        sizes = [math.prod(shape) * t.element_size() for shape, t in zip(shapes, like, strict=True)]
        for number, (_, slot) in enumerate(self.free):
            storages = [tensor.untyped_storage() for tensor in slot]
            if all(storage.nbytes() >= size for storage, size in zip(storages, sizes, strict=True)):
                del self.free[number]
                return storages
        whole = [(*t.shape[:2], self.longest, t.shape[-1]) for t in like]
        return [t.new_empty(shape).untyped_storage() for t, shape in zip(like, whole, strict=True)]

    def recycle(self, origin: int, tensors: tuple[Tensor, ...]) -> None:
        """Take back the buffers of the block of `origin`, which is on its way, for blocks to come."""
        self.free.append((self.lengths[origin], tensors))
