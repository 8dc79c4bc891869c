"""The ring: K/V blocks travel from neighbour to neighbour, and their gradients follow.

K/V make P − 1 hops; each hop is posted before the block that is here is computed. The sums dK/dV of a block follow it:
while a rank computes its contribution from the block, the sum of the contributions so far arrives. The sums make P hops:
the last one takes them home. Under a mask that hides whole distances, blocks skip the ranks that see nothing of them,
and dK/dV return from the last rank in one message.
Source: arXiv 2310.01889, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import Tensor

from ringlab.blocks.protocol import Gradient
from ringlab.comm.protocol import Work, side_by_side
from ringlab.schedules.block_schedule import BlockBuffers, BlockSchedule
from ringlab.schedules.call import Call
from ringlab.schedules.tilewise import RunningSum
from ringlab.types import KeyValue, Value


class RingSchedule(BlockSchedule):
    """One block in use and one in flight: as many bytes as an all-gather, but never the whole sequence at once."""

    name = "ring"

    def arriving_blocks(self, call: Call, k: KeyValue, v: Value) -> Iterator[tuple[int, KeyValue, Value]]:
        ring, buffers = call.ring, BlockBuffers(call)
        origin = ring.rank
        here: tuple[Tensor, ...] = k, v
        skips_none = call.distances[-1] == len(call.distances) - 1
        for step, (travelled, distance) in enumerate(pairwise(call.distances)):
            next_origin = ring.origin(distance)
            into = buffers.reserve(next_origin, k, v)
            # From neighbour to neighbour, a transport may fetch the block from its owner. Past ranks that see nothing
            # of it, it goes by a message; every rank keeps its own block (step 0) and gives up those of others.
            route: dict[str, Any] = (
                {"hops": step} if skips_none else {"give": step > 0, "stride": distance - travelled}
            )
            work = ring.post(k, v, into=into, tag=f"kv {step}", **route)
            yield origin, k, v
            arrived = work.wait()
            if step > 0:  # at step 0 the block is this rank's own shard
                buffers.recycle(origin, here)
            origin, here = next_origin, arrived
            k, v = here
        yield origin, k, v

    def gradient_return(self, call: Call) -> RingGradientReturn:
        return RingGradientReturn(call)


class RingGradientReturn:
    """`GradientReturn` around the ring: the sums of a block's gradients follow the block."""

    def __init__(self, call: Call) -> None:
        self.call, self.step = call, 0
        self.buffers = BlockBuffers(call)
        self.work: Work | None = None
        self.sums: tuple[Tensor, Tensor] | None = None

    def add_block(self, origin: int, k: KeyValue, v: Value, gradients: list[Gradient]) -> None:
        """Add `gradients` to the sums that follow the block of `origin`, and send them on."""
        ring = self.call.ring
        arrived = self._arrived()
        self.sums = ring.compute(f"add dkv {self.step}", sum_gradients, k, v, gradients, arrived)
        distances = self.call.distances
        if self.step + 1 < len(distances):
            travelled, distance = distances[self.step : self.step + 2]
            into = self.buffers.reserve(ring.origin(distance), *self.sums)
            self.work = ring.post(
                *self.sums, into=into, give=True, stride=distance - travelled, tag=f"dkv {self.step}"
            )
        elif self.step > 0:
            self.work = self._send_home(origin, self.sums)
        self.step += 1

    def own_gradients(self) -> tuple[KeyValue, Value]:
        """Return (dk, dv) of this rank's own block, once they have arrived."""
        sums = self._arrived() or self.sums
        assert sums is not None
        return sums

    def _send_home(self, origin: int, sums: tuple[Tensor, Tensor]) -> Work:
        """Send complete sums to their owner, which is the next rank if the block went all the way around."""
        ring = self.call.ring
        furthest = (ring.rank + self.call.distances[-1]) % ring.world_size
        into = self.buffers.reserve(ring.rank, *sums)
        send = tuple(x.contiguous() for x in sums)
        return ring.comm.hand_over(
            send=send, to=origin, receive=into, source=furthest, tag=f"dkv {self.step}"
        )

    def _arrived(self) -> tuple[Tensor, Tensor] | None:
        """Return the sums that follow the block that is here, once they have arrived; None on the first step."""
        if self.work is None or self.sums is None:
            return None
        dk, dv = self.work.wait()
        self.buffers.recycle(self.call.ring.origin(self.call.distances[self.step - 1]), self.sums)
        return dk, dv


@side_by_side
def sum_gradients(
    k: KeyValue, v: Value, gradients: list[Gradient], totals: tuple[KeyValue, Value] | None
) -> tuple[KeyValue, Value]:
    """Return (dk, dv) of a block in the state dtype: `gradients` added to `totals`, if some have arrived."""
    dk, dv = RunningSum(k), RunningSum(v)
    if totals is not None:
        dk.total, dv.total = totals
    for gradient in gradients:
        dk.add(gradient.keys, gradient.dk)
        dv.add(gradient.keys, gradient.dv)
    return dk.value(), dv.value()
