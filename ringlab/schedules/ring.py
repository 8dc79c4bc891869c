"""The ring: blocks travel from neighbour to neighbour, gradients travel with them.

K/V make P−1 hops, each posted before the block that is here is computed. dK/dV go the same way,
one hop behind, and make P: the last one brings them home. Where a mask lets no row see what is so many
ranks away, blocks pass over it: they go to the next distance at which somebody sees them, and dK/dV return
from the last one in one message.
Source: arXiv 2310.01889, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import Tensor

from ringlab.blocks.protocol import Gradient
from ringlab.comm.protocol import Work, side_by_side
from ringlab.schedules.call import Call
from ringlab.schedules.over_blocks import OverBlocks
from ringlab.schedules.slots import Slots
from ringlab.schedules.tilewise import RowSum


class RingSchedule(OverBlocks):
    """One block in use and one in flight; as many bytes as an all-gather, never the whole sequence."""

    name = "ring"

    def blocks(self, call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        ring, slots = call.ring, Slots(call)
        origin = ring.rank
        here: tuple[Tensor, ...] = k, v
        neighbours = call.distances[-1] == len(call.distances) - 1
        for step, (gone, distance) in enumerate(pairwise(call.distances)):
            coming = ring.origin(distance)
            into = slots.take(coming, k, v)
            how: dict[str, Any] = (
                {"hops": step} if neighbours else {"give": step > 0, "stride": distance - gone}
            )
            work = ring.post(k, v, into=into, tag=f"kv {step}", **how)
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
        self.slots = Slots(call)
        self.work: Work | None = None
        self.sums: tuple[Tensor, Tensor] | None = None

    def add(self, origin: int, k: Tensor, v: Tensor, gradients: list[Gradient]) -> None:
        ring = self.call.ring
        arrived = self._arrived()
        self.sums = ring.compute(f"add dkv {self.step}", sum_gradients, k, v, gradients, arrived)
        distances = self.call.distances
        if self.step + 1 < len(distances):
            gone, distance = distances[self.step : self.step + 2]
            into = self.slots.take(ring.origin(distance), *self.sums)
            self.work = ring.post(
                *self.sums, into=into, give=True, stride=distance - gone, tag=f"dkv {self.step}"
            )
        elif self.step > 0:
            self.work = self._send_home(origin, self.sums)
        self.step += 1

    def finish(self) -> tuple[Tensor, Tensor]:
        sums = self._arrived() or self.sums
        assert sums is not None
        return sums

    def _send_home(self, origin: int, sums: tuple[Tensor, Tensor]) -> Work:
        """Send what has passed all rows that see it to its owner: the next rank after a whole round."""
        ring = self.call.ring
        furthest = (ring.rank + self.call.distances[-1]) % ring.world_size
        into = self.slots.take(ring.rank, *sums)
        send = tuple(x.contiguous() for x in sums)
        return ring.comm.hand_over(
            send=send, to=origin, receive=into, source=furthest, tag=f"dkv {self.step}"
        )

    def _arrived(self) -> tuple[Tensor, Tensor] | None:
        """The sums that come with the block that is here; None on the first step."""
        if self.work is None or self.sums is None:
            return None
        dk, dv = self.work.wait()
        self.slots.recycle(self.call.ring.origin(self.call.distances[self.step - 1]), self.sums)
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
