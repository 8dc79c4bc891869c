"""Tensors that travel from rank to rank, and sums that follow them and then return to their owner.

A route is given by its `offsets`: at stop i, the tensors are offsets[i] ranks past their owner, modulo P. The
first offset is always 0. The route (0, 1, 2) goes two ranks ahead, (0, P − 1, P − 2) goes two ranks back, and
(0, 3, 6) goes in steps of three ranks. All ranks take the same route at once, so at stop i each rank holds
the tensors of the rank that is offsets[i] behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from jaxtyping import Shaped
from torch import Tensor

from ringlab.comm.protocol import Work
from ringlab.schedules.block_schedule import BlockBuffers
from ringlab.schedules.call import AttentionCall

Tensors = tuple[Tensor, ...]


def circulate(
    call: AttentionCall, offsets: Sequence[int], *own: Shaped[Tensor, "B _ _ _"], tag: str
) -> Iterator[tuple[int, Tensors]]:
    """Yield (owner, tensors) at each stop: `own` first, then the arriving tensors.

    The next hop is posted before the tensors of a stop are yielded.
    """
    ring, buffers = call.ring, BlockBuffers(call)
    owner, here = ring.rank, own
    from_neighbour = tuple(offsets) == tuple(range(len(offsets)))
    for step, (offset, following) in enumerate(pairwise(offsets)):
        next_owner = ring.origin(following)
        into = buffers.reserve(next_owner, *own)
        # If every hop is to a neighbour, a transport may fetch blocks from their owners instead. If blocks
        # skip ranks that do not see them, they travel as messages. Every rank then keeps its own block (step
        # 0) and gives up the blocks of other ranks.
        route: dict[str, Any] = (
            {"hops": step}
            if from_neighbour
            else {"release_after_send": step > 0, "stride": following - offset}
        )
        work = ring.post(*here, into=into, tag=f"{tag} {step}", **route)
        yield owner, here
        arrived = work.wait()
        if step > 0:  # at step 0 these tensors are this rank's own shard
            buffers.recycle(owner, here)
        owner, here = next_owner, arrived
    yield owner, here


class Couriers:
    """A courier is a sum that follows a K/V block one step behind, grows at every stop, and then returns.

    This object receives and sends the couriers that stop at one rank. At each stop, call `arrived`, and then
    `send_on` with the grown sum. After the last stop, `own` returns the sum of this rank's own block.
    Tensors sent from the first stop may be a block backend's own result, to which other code may still
    refer. The memory of these tensors is therefore neither handed over nor reused.
    """

    def __init__(self, call: AttentionCall, offsets: Sequence[int], tag: str) -> None:
        self.call, self.offsets, self.tag = call, tuple(offsets), tag
        self.step = 0
        self.buffers = BlockBuffers(call)
        self.work: Work | None = None
        self.sent: Tensors | None = None

    def arrived(self) -> Tensors | None:
        """Wait for the courier of the current block, and return it; return None at the first stop."""
        if self.work is None:
            return None
        tensors = self.work.wait()
        if self.sent is not None:
            self.buffers.recycle(self.call.ring.origin(self.offsets[self.step - 1]), self.sent)
        return tensors

    def send_on(self, *tensors: Shaped[Tensor, "B _ _ _"]) -> None:
        """Send `tensors` after their block, or to their owner after the last stop."""
        ring, offsets, step = self.call.ring, self.offsets, self.step
        self.sent, self.step = tensors, step + 1
        if step + 1 < len(offsets):
            into = self.buffers.reserve(ring.origin(offsets[step + 1]), *tensors)
            stride = offsets[step + 1] - offsets[step]
            self.work = ring.post(
                *tensors, into=into, release_after_send=step > 0, stride=stride, tag=f"{self.tag} {step}"
            )
            if step == 0:
                self.sent = None  # the tensors may belong to a block backend, so their memory is not reused
        elif offsets[step] % ring.world_size:  # otherwise this rank is the owner, and keeps the tensors
            self.work = self._send_home(tensors, release_after_send=step > 0)

    def own(self) -> Tensors:
        """Wait for the complete courier of this rank's own block, and return it."""
        # if no other rank sees the block, the sums were never sent, and are still in `sent`
        tensors = self.arrived() or self.sent
        assert tensors is not None
        return tensors

    def _send_home(self, tensors: Tensors, release_after_send: bool) -> Work:
        """Send the complete courier to its owner, and receive this rank's own courier.

        This rank's courier comes from the rank that is offsets[-1] ahead. If the block went all the way
        around, its owner is the next rank.
        """
        ring, last = self.call.ring, self.offsets[-1]
        into = self.buffers.reserve(ring.rank, *tensors)
        post = ring.comm.hand_over if release_after_send else ring.comm.exchange
        return post(
            send=tuple(x.contiguous() for x in tensors),
            to=ring.origin(last),
            receive=into,
            source=ring.origin(-last),
            tag=f"{self.tag} {self.step - 1}",
        )
