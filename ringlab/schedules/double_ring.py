"""The double ring: K/V blocks go around inside their node first, then to the next node and around there.

While a block goes around inside a node, the blocks with which the turn began are already under way to the
next node, each over its rank's own link. The slow hop can therefore hide behind a whole turn, and the
busiest link carries 1/n of the ring's traffic if a node has n ranks. Gradients are summed around each node.
The sums of earlier nodes follow one turn behind. From the last node, the complete sums return to the owner
in one message. There are as many hops as in the ring: P − 1 of K/V, P of dK/dV.
Source: arXiv 2406.18485, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ringlab.blocks.protocol import Gradient
from ringlab.comm.protocol import Work, thread_safe
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.comm.way import OnWay
from ringlab.errors import WorldSizeError
from ringlab.schedules.block_schedule import BlockBuffers, BlockSchedule
from ringlab.schedules.call import AttentionCall
from ringlab.schedules.ring import sum_gradients
from ringlab.types import BlockTensor

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DoubleRingSchedule(BlockSchedule):
    """Nodes of `node` adjacent ranks; the number of nodes follows from the number of ranks.

    Raises: WorldSizeError for a node size that is not an integer ≥ 1.
    """

    node: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.node, int) or self.node < 1:
            raise WorldSizeError("node= the number of ranks in a node of a double ring, ≥ 1", repr(self.node))

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return the name with the size of a node."""
        return f"double-ring(node={self.node})"

    def check(self, heads: int, kv_heads: int, world_size: int) -> None:
        """Check that the ranks fill whole nodes. Raises: WorldSizeError."""
        if world_size % self.node:
            raise WorldSizeError(
                f"whole nodes of {self.node} ranks for schedule '{self.name}'",
                f"{world_size} ranks",
                f"a node= that divides {world_size}, or schedule='ring'",
            )

    def block_count(self, call: AttentionCall) -> int:
        """Return how many blocks arrive: all blocks of each node that the mask can reach."""
        return self._rings(call).turns * self.node

    def arriving_blocks(
        self, call: AttentionCall, k: BlockTensor, v: BlockTensor
    ) -> Iterator[tuple[int, BlockTensor, BlockTensor]]:
        rings, buffers = self._rings(call), BlockBuffers(call)
        for turn in range(rings.turns):
            first, onward = (k, v), None
            if turn + 1 < rings.turns:
                into = buffers.reserve(rings.origin(turn + 1, 0), k, v)
                onward = rings.outer.post(k, v, into=into, tag=f"kv to node {turn}")
            for step in range(self.node - 1):
                into = buffers.reserve(rings.origin(turn, step + 1), k, v)
                work = rings.inner.post(k, v, into=into, hops=step, tag=f"kv {turn}.{step}")
                yield rings.origin(turn, step), k, v
                arrived = work.wait()
                if step > 0:  # at step 0 the block is still under way to the next node
                    buffers.recycle(rings.origin(turn, step), (k, v))
                k, v = arrived
            yield rings.origin(turn, self.node - 1), k, v
            if onward is not None:
                arrived = onward.wait()
                if self.node > 1:
                    buffers.recycle(rings.origin(turn, self.node - 1), (k, v))
                if turn > 0:  # in turn 0 these tensors are this rank's own shard
                    buffers.recycle(rings.origin(turn, 0), first)
                k, v = arrived

    def gradient_return(self, call: AttentionCall) -> DoubleRingGradientReturn:
        return DoubleRingGradientReturn(call, self._rings(call))

    def _rings(self, call: AttentionCall) -> _NodeRings:
        return _NodeRings(call, self.node)


class _NodeRings:
    """The ring inside a rank's node, the ring between nodes, and the origin of the block at each step."""

    def __init__(self, call: AttentionCall, node: int) -> None:
        comm = call.ring.comm
        self.size, self.nodes = node, comm.world_size // node
        self.node, self.place = divmod(comm.rank, node)
        self.inner = Ring(SubGroup(comm, range(self.node * node, (self.node + 1) * node)))
        # the slow hops have a way of their own, so that fast hops need not wait for them
        self.outer = Ring(OnWay(SubGroup(comm, range(self.place, comm.world_size, node)), "between nodes"))
        self.turns = self._nodes_in_reach(call)

    def origin(self, turn: int, step: int) -> int:
        """Return the rank whose block is on this rank in turn `turn` after `step` hops inside the node."""
        return self.rank(self.node - turn, self.place - step)

    def rank(self, node: int, place: int) -> int:
        """Return the rank at `place` in `node`; both numbers wrap around."""
        return node % self.nodes * self.size + place % self.size

    def _nodes_in_reach(self, call: AttentionCall) -> int:
        """Return how many nodes a block must visit, its own included, to reach all nodes that see it."""
        if len(call.offsets) == call.ring.world_size:
            return self.nodes
        P = call.ring.world_size
        apart = (
            (rank // self.size - origin // self.size) % self.nodes
            for rank in range(P)
            for origin in range(P)
            if call.tiles(origin, rank)
        )
        return 1 + max(apart, default=0)


class DoubleRingGradientReturn:
    """The `GradientReturn` of the double ring.

    Gradients are summed around a node together with their blocks. At the last step of a turn, the sums of
    earlier nodes are added.
    """

    def __init__(self, call: AttentionCall, rings: _NodeRings) -> None:
        self.call, self.rings, self.blocks_seen = call, rings, 0
        self.buffers = BlockBuffers(call)
        self.inside: tuple[Work, Pair | None, int] | None = None
        """The message that brings the next block's sums, the tensors that were sent in exchange, and their
        origin."""
        self.behind: Work | None = None
        """The previous node's sums for the block that is on this rank at the last step of a turn."""
        self.home: Pair | None = None

    def add_block(self, origin: int, k: BlockTensor, v: BlockTensor, gradients: list[Gradient]) -> None:
        """Add `gradients` to the sums that arrive with the block of `origin`, and send them on."""
        ring, rings = self.call.ring, self.rings
        turn, step = divmod(self.blocks_seen, rings.size)
        label = f"add dkv {self.blocks_seen}"
        sums = ring.compute(label, sum_gradients, k, v, gradients, self._arrived())
        self.blocks_seen += 1
        if step + 1 < rings.size:
            into = self.buffers.reserve(rings.origin(turn, step + 1), *sums)
            # At step 0 the sums may belong to a block backend, so they are not handed over, and their memory
            # is not reused.
            work = rings.inner.post(*sums, into=into, release_after_send=step > 0, tag=f"dkv {turn}.{step}")
            self.inside = work, sums if step > 0 else None, origin
            return
        if self.behind is not None:
            dk, dv = self.behind.wait()
            ring.compute(f"add dkv of nodes {turn}", _add_in_place, (dk, dv), sums)
            if step > 0:
                self.buffers.recycle(origin, sums)
            sums = dk, dv
        if turn + 1 < rings.turns:
            into = self.buffers.reserve(rings.origin(turn + 1, step), *sums)
            self.behind = rings.outer.post(*sums, into=into, tag=f"dkv to node {turn}")
        else:
            self.home = self._send_home(origin, sums)

    def own_gradients(self) -> Pair:
        """Return (dk, dv) of this rank's own block, which arrived with the last block."""
        assert self.home is not None
        return self.home

    def _arrived(self) -> Pair | None:
        """Return the sums that arrive with the current block, or None at the first step of a turn."""
        if self.inside is None:
            return None
        (work, sent, origin), self.inside = self.inside, None
        dk, dv = work.wait()
        if sent is not None:
            self.buffers.recycle(origin, sent)
        return dk, dv

    def _send_home(self, origin: int, sums: Pair) -> Pair:
        """Send complete sums to their owner, and return this rank's own complete sums."""
        comm, rings = self.call.ring.comm, self.rings
        if origin == comm.rank:
            return sums
        furthest = rings.rank(rings.node + rings.turns - 1, rings.place - 1)
        into = self.buffers.reserve(comm.rank, *sums)
        send = tuple(x.contiguous() for x in sums)
        dk, dv = comm.hand_over(send=send, to=origin, receive=into, source=furthest, tag="dkv home").wait()
        return dk, dv


@thread_safe
def _add_in_place(sums: Pair, more: Pair) -> None:
    """Add `more` to `sums`."""
    for total, part in zip(sums, more, strict=True):
        total += part
