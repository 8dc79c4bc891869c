"""The transport in which ranks of one machine read each other's memory.

A message is cut into pieces. The sender puts the pieces into its own window, in two slots for this receiver,
and the receiver gets them from the slots. A slot is filled again only after the receiver has read it. A
block that is relayed unchanged around the ring is put only once, by its owner. Every rank gets it directly
from the owner's window, so no rank forwards it. The owner replaces the block only after all ranks have read
it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ringlab.comm.processes.background import Lane, as_bytes
from ringlab.comm.processes.carriers import Carrier
from ringlab.comm.processes.shared_memory import FREE, FULL, Window
from ringlab.comm.processes.wire_format import Expected, Message, announced_bytes
from ringlab.comm.protocol import Bytes, Tensors
from ringlab.errors import CommError, MismatchError

_SLOTS = 2
_PATIENCE = 1.0  # seconds to wait for other ranks to fetch the last block
OpenWindow = Callable[[int, int, dist.ProcessGroup, float], Window]


class Windows(Carrier):
    """Moves tensors through windows, which `open_window` opens. All ranks must make this carrier together.

    Each rank's windows take `2 * slot_bytes` for each receiver and, once a block has been relayed, the bytes
    of the largest block.
    """

    relays = True

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup,
        timeout: float,
        open_window: OpenWindow,
        slot_bytes: int = 16 << 20,
    ) -> None:
        self.rank, self.world_size = rank, dist.get_world_size(group)
        self.group, self.timeout, self.slot_bytes = group, timeout, slot_bytes
        self._open_window, self._windows = open_window, 0
        self._slots = self._open(self.world_size * _SLOTS * slot_bytes)
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._counts: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._block: Window | None = None
        self._unread: set[int] = set()  # the ranks whose current block this rank has not fetched yet
        self._others = [r for r in range(self.world_size) if r != rank]

    def start(self, message: Message | None, expected: Expected | None) -> None:
        if message is not None and not message.local:
            send = partial(self._send, message)
            message.moves.append(self._lane("to", message.peer).submit(send, message.tensors))
        if expected is not None and not expected.local:
            expected.met_elsewhere = True
            receive = partial(self._receive, expected)
            expected.moves.append(self._lane("from", expected.peer).submit(receive, expected.tensors))

    def relay(self, message: Message, expected: Expected, hops: int) -> None:
        expected.met_elsewhere = True
        fetch = partial(self._relay, message, expected, hops)
        move = self._lane("blocks", self.rank).submit(fetch, [*message.tensors, *expected.tensors])
        message.moves.append(move)
        expected.moves.append(move)

    def finish(self) -> None:
        if self._block is not None:
            move = self._lane("blocks", self.rank).submit(self._retire, [])
            with suppress(RuntimeError):  # a failed rank reports its failure on the board
                move.wait(_PATIENCE)
                if move.event is not None:
                    move.event.synchronize()

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()

    def _open(self, nbytes: int) -> Window:
        self._windows += 1
        return self._open_window(nbytes, self._windows, self.group, self.timeout)

    def _lane(self, way: str, peer: int) -> Lane:
        if (way, peer) not in self._lanes:
            self._lanes[way, peer] = Lane(f"{way} {peer}")
        return self._lanes[way, peer]

    def _slot(self, way: str, peer: int) -> tuple[int, bool]:
        """Return the next slot for messages to or from `peer`, and whether the slot has been used before."""
        count = self._counts[way, peer]
        self._counts[way, peer] += 1
        return count % _SLOTS, count >= _SLOTS

    def _start_of(self, receiver: int, slot: int) -> int:
        return (receiver * _SLOTS + slot) * self.slot_bytes

    def _send(self, message: Message) -> None:
        peer, window = message.peer, self._slots
        for piece in pieces(message.tensors, self.slot_bytes):
            slot, used = self._slot("to", peer)
            if used:
                window.wait(peer, FREE + slot)
            window.put(self.rank, self._start_of(peer, slot), piece)
            window.signal(peer, FULL + slot)
        for slot in range(_SLOTS):
            window.settle(peer, FULL + slot)

    def _receive(self, expected: Expected) -> None:
        peer, window, problem = expected.peer, self._slots, None
        wanted = list(pieces(expected.tensors, self.slot_bytes))
        try:
            expected.meet(self.timeout)
        except MismatchError as error:
            # Keep the error until all pieces are received, so that the slots are free for the next message.
            problem, wanted = error, [[]] * -(-announced_bytes(expected.header) // self.slot_bytes)
        for piece in wanted:
            slot, _ = self._slot("from", peer)
            window.wait(peer, FULL + slot)
            window.get(peer, self._start_of(self.rank, slot), piece)
            window.signal(peer, FREE + slot)
        if problem is not None:
            raise problem

    def _relay(self, message: Message, expected: Expected, hops: int) -> None:
        if hops == 0:
            self._publish(message.tensors)
        expected.meet(self.timeout)
        owner = (expected.peer + hops * (self.rank - message.peer)) % self.world_size
        if self._block is None or owner not in self._unread:
            raise CommError(
                f"a block that rank {owner} relayed with hops=0 and that rank {self.rank} has not fetched yet",
                f"{message.label} with hops={hops}",
                "relay a block by all ranks, with hops 0, 1, 2, ...",
            )
        self._block.wait(owner, FULL)
        self._block.get(owner, 0, [as_bytes(t) for t in expected.tensors])
        self._block.signal(owner, FREE)
        self._unread.remove(owner)

    def _publish(self, tensors: Sequence[Tensor]) -> None:
        """Make `tensors` the block that other ranks get from this rank."""
        self._retire()
        size = torch.tensor([max(1, sum(t.nbytes for t in tensors))])
        dist.all_reduce(size, dist.ReduceOp.MAX, group=self.group)
        if self._block is None or self._block.nbytes < int(size):
            self._block = self._open(int(size))
        self._block.put(self.rank, 0, [as_bytes(t) for t in tensors])
        for peer in self._others:
            self._block.signal(peer, FULL)
        self._unread = set(self._others)

    def _retire(self) -> None:
        """Wait until all ranks have read this rank's block.

        Release the blocks that this rank did not fetch.
        """
        if self._block is None:
            return
        for owner in sorted(self._unread):
            self._block.wait(owner, FULL)
            self._block.signal(owner, FREE)
        self._unread = set()
        for peer in self._others:
            self._block.wait(peer, FREE)


def pieces(tensors: Tensors, nbytes: int) -> Iterator[list[Bytes]]:
    """Yield the memory of contiguous `tensors` in pieces of `nbytes` bytes; the last piece may be shorter.

    Each piece is a list of parts, because it may contain parts of several tensors.
    """
    piece: list[Tensor] = []
    room = nbytes
    for tensor in tensors:
        rest = as_bytes(tensor)
        while rest.numel():
            part, rest = rest[:room], rest[room:]
            piece.append(part)
            room -= part.numel()
            if room == 0:
                yield piece
                piece, room = [], nbytes
    if piece:
        yield piece
