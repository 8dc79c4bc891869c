"""The double ring: blocks go around inside their node first, then on to the next node, and around there.

While a block makes its turn inside a node, the node's own blocks are under way to the next one, each rank's over
a link of its own: a turn's time to hide the slow hop, and 1/n of a ring's traffic on the busiest link. Gradients
are summed around each node, and the sums of earlier nodes come behind, a whole turn of time for them too; from the
last node they go home in one message. As many hops as the ring: P − 1 of K/V, P of dK/dV.
Source: arXiv 2406.18485, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ringlab.blocks.protocol import Gradient
from ringlab.comm.protocol import Work, side_by_side
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.errors import WorldSizeError
from ringlab.schedules.call import Call
from ringlab.schedules.over_blocks import OverBlocks
from ringlab.schedules.ring import sum_gradients
from ringlab.schedules.slots import Slots

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DoubleRingSchedule(OverBlocks):
    """Nodes of `node` ranks side by side; their number follows from the number of ranks."""

    node: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.node, int) or self.node < 1:
            raise WorldSizeError("node= the ranks of a node, ≥ 1, of a double ring", repr(self.node))

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return the name with the size of a node."""
        return f"double-ring(node={self.node})"

    def check(self, heads: int, kv_heads: int, world_size: int) -> None:
        """Return if the ranks fill whole nodes. Raises: WorldSizeError."""
        if world_size % self.node:
            raise WorldSizeError(
                f"whole nodes of {self.node} ranks for schedule '{self.name}'",
                f"{world_size} ranks",
                f"a node= that divides {world_size}, or schedule='ring'",
            )

    def count(self, call: Call) -> int:
        """Return how many blocks come: whole turns, as many as nodes are in reach of the mask."""
        return self._circles(call).turns * self.node

    def blocks(self, call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        circles, slots = self._circles(call), Slots(call)
        for turn in range(circles.turns):
            first, onward = (k, v), None
            if turn + 1 < circles.turns:
                into = slots.take(circles.origin(turn + 1, 0), k, v)
                onward = circles.outer.post(k, v, into=into, tag=f"kv to node {turn}")
            for step in range(self.node - 1):
                into = slots.take(circles.origin(turn, step + 1), k, v)
                work = circles.inner.post(k, v, into=into, hops=step, tag=f"kv {turn}.{step}")
                yield circles.origin(turn, step), k, v
                arrived = work.wait()
                if step > 0:  # before, it was the block that is under way to the next node
                    slots.recycle(circles.origin(turn, step), (k, v))
                k, v = arrived
            yield circles.origin(turn, self.node - 1), k, v
            if onward is not None:
                arrived = onward.wait()
                if self.node > 1:
                    slots.recycle(circles.origin(turn, self.node - 1), (k, v))
                if turn > 0:  # the first is this rank's own shard
                    slots.recycle(circles.origin(turn, 0), first)
                k, v = arrived

    def homecoming(self, call: Call) -> _Couriers:
        return _Couriers(call, self._circles(call))

    def _circles(self, call: Call) -> _Circles:
        return _Circles(call, self.node)


class _Circles:
    """A rank's place in its node and among the nodes, and which block is here when."""

    def __init__(self, call: Call, node: int) -> None:
        comm = call.ring.comm
        self.size, self.nodes = node, comm.world_size // node
        self.here, self.place = divmod(comm.rank, node)
        self.inner = Ring(SubGroup(comm, range(self.here * node, (self.here + 1) * node)))
        self.outer = Ring(SubGroup(comm, range(self.place, comm.world_size, node)))
        self.turns = self._in_reach(call)

    def origin(self, turn: int, step: int) -> int:
        """Return the rank whose block is here after `turn` nodes and `step` hops inside this one."""
        return self.rank(self.here - turn, self.place - step)

    def rank(self, node: int, place: int) -> int:
        """Return the rank at a place of a node, both counted around."""
        return node % self.nodes * self.size + place % self.size

    def _in_reach(self, call: Call) -> int:
        """Nodes that blocks must pass until nobody is left whose rows see them."""
        if call.blocks == call.ring.world_size:
            return self.nodes
        P = call.ring.world_size
        apart = (
            (rank // self.size - origin // self.size) % self.nodes
            for rank in range(P)
            for origin in range(P)
            if call.tiles(origin, rank)
        )
        return 1 + max(apart, default=0)


class _Couriers:
    """Gradients: summed around a node with their blocks, and what earlier nodes summed added at its last step."""

    def __init__(self, call: Call, circles: _Circles) -> None:
        self.call, self.circles, self.number = call, circles, 0
        self.slots = Slots(call)
        self.inside: tuple[Work, Pair, int] | None = None
        """The courier that comes with the next block, what was sent for it, and whose that was."""
        self.behind: Work | None = None
        """What the node before has summed, of the block that is here at a turn's last step."""
        self.home: Pair | None = None

    def add(self, origin: int, k: Tensor, v: Tensor, gradients: list[Gradient]) -> None:
        ring, circles = self.call.ring, self.circles
        turn, step = divmod(self.number, circles.size)
        sums = ring.compute(f"add dkv {self.number}", sum_gradients, k, v, gradients, self._arrived())
        self.number += 1
        if step + 1 < circles.size:
            into = self.slots.take(circles.origin(turn, step + 1), *sums)
            work = circles.inner.post(*sums, into=into, give=True, tag=f"dkv {turn}.{step}")
            self.inside = work, sums, origin
            return
        if self.behind is not None:
            earlier = self.behind.wait()
            ring.compute(f"add dkv of nodes {turn}", _add, sums, earlier)
            self.slots.recycle(origin, earlier)
        if turn + 1 < circles.turns:
            into = self.slots.take(circles.origin(turn + 1, step), *sums)
            self.behind = circles.outer.post(*sums, into=into, tag=f"dkv to node {turn}")
        else:
            self.home = self._sent_home(origin, sums)

    def finish(self) -> Pair:
        assert self.home is not None
        return self.home

    def _arrived(self) -> Pair | None:
        """The sums that come with the block that is here; None at the first step of a turn."""
        if self.inside is None:
            return None
        (work, sent, origin), self.inside = self.inside, None
        dk, dv = work.wait()
        self.slots.recycle(origin, sent)
        return dk, dv

    def _sent_home(self, origin: int, sums: Pair) -> Pair:
        """Send what has met all rows that see it to its owner."""
        comm, circles = self.call.ring.comm, self.circles
        if origin == comm.rank:
            return sums
        furthest = circles.rank(circles.here + circles.turns - 1, circles.place - 1)
        into = self.slots.take(comm.rank, *sums)
        send = tuple(x.contiguous() for x in sums)
        dk, dv = comm.hand_over(send=send, to=origin, receive=into, source=furthest, tag="dkv home").wait()
        return dk, dv


@side_by_side
def _add(sums: Pair, more: tuple[Tensor, ...]) -> None:
    """Add `more` to `sums`, in place."""
    for total, part in zip(sums, more, strict=True):
        total += part
