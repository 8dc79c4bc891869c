"""Carriers, which move the tensors of an exchange over torch.distributed once their headers are posted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringlab.comm.processes.background import Lane, as_bytes, copy
from ringlab.comm.processes.wire_format import Expected, Label, Message, Move, announced_bytes, p2p
from ringlab.errors import CommError, MismatchError


class Carrier(ABC):
    """Moves tensors between this rank and its peers.

    relays: whether the carrier can fetch blocks from their owners.
    """

    relays = False

    def check(self, label: Label) -> None:  # noqa: B027 (most carriers take every exchange)
        """Return if the exchange, of which nothing is posted yet, can be carried.

        Raises: CommError if it cannot.
        """

    @abstractmethod
    def start(self, message: Message | None, expected: Expected | None) -> None:
        """Start moving tensors to and from other ranks, and append the moves to the exchange's two halves."""

    def relay(self, message: Message, expected: Expected, hops: int) -> None:
        """Do the same as `start` for a block that has made `hops` hops.

        Only carriers with `relays` support it.
        """
        raise NotImplementedError

    def finish(self) -> None:  # noqa: B027
        """Wait briefly, after a program without error, until no other rank needs this rank's memory."""

    def close(self) -> None:  # noqa: B027
        """End the threads that run in the background."""


class PointToPoint(Carrier):
    """Sends and receives of torch.distributed: gloo for tensors on the CPU, NCCL for those on a GPU.

    On a GPU, exchanges run on a separate stream. An exchange begins when the computations launched before it
    have finished, and runs at the same time as those launched after it. Only computations launched after
    `wait` wait for it.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._stream: torch.cuda.Stream | None = None

    def start(self, message: Message | None, expected: Expected | None) -> None:
        ops: list[dist.P2POp] = []
        owners: list[Message | Expected] = []
        for half, function in ((expected, dist.irecv), (message, dist.isend)):
            if half is not None and not half.local:
                made = self._ops(function, half)
                ops += made
                owners += [half] * len(made)
        if not ops:
            return
        if ops[0].tensor.is_cuda:
            move = self._on_stream(ops)
            for owner in {id(owner): owner for owner in owners}.values():
                owner.moves.append(move)
        else:
            for owner, work in zip(owners, dist.batch_isend_irecv(ops), strict=True):
                owner.moves.append(_OnHost(work))

    def _ops(self, function: Callable[..., Any], half: Message | Expected) -> list[dist.P2POp]:
        return [
            p2p(self.group, function, tensor, half.peer, half.signature.number(half.number, place))
            for place, tensor in enumerate(half.tensors)
            # Empty tensors are left out: gloo cannot send them, and the header has announced them.
            if tensor.numel()
        ]

    def _on_stream(self, ops: list[dist.P2POp]) -> _OnStream:
        device = ops[0].tensor.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for work in dist.batch_isend_irecv(ops):
                work.wait()  # makes the current stream wait, but not the host
        for op in ops:  # memory freed meanwhile must not be reused before this stream has finished with it
            op.tensor.record_stream(self._stream)
        return _OnStream(self._stream.record_event())


class _OnHost(Move):
    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def wait(self, timeout: float) -> None:
        self.work.wait(timedelta(seconds=timeout))


class _OnStream(Move):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self, timeout: float) -> None:
        """Return at once, because the host has nothing to do, and NCCL's own watchdog checks the timeout."""


class AllToAll(Carrier):
    """One collective per exchange, in which each rank sends to one rank and receives from one.

    It is for processes that share one GPU, because gloo's all-to-all supports CUDA tensors, through pinned
    memory, but gloo's sends and receives do not. All ranks must take part, and all must shift around the ring
    by the same distance.
    """

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None, timeout: float) -> None:
        self.rank, self.world_size, self.group, self.timeout = rank, world_size, group, timeout
        self._lane = Lane("all-to-all")

    def check(self, label: Label) -> None:
        """Return if the exchange is part of a shift by one distance on all ranks. Raises: CommError if it is not."""
        to, source = label.to, label.source
        if {to, source} <= {self.rank, None}:
            return
        if to is None or source is None or (to + source - 2 * self.rank) % self.world_size:
            raise CommError(
                "an exchange in which all ranks shift by the same distance, as transport 'shared-gpu' does",
                f"{label}",
                "use transport='gloo' with tensors on the CPU, or transport='nccl' with a GPU for each rank",
            )

    def start(self, message: Message | None, expected: Expected | None) -> None:
        """Begin the collective in the background.

        Raises: MismatchError in the move's `wait` if the message is not the expected one.
        """
        if message is None or expected is None or message.local:
            return
        expected.met_elsewhere = True
        move = self._lane.submit(
            lambda: self._shift(message, expected), [*message.tensors, *expected.tensors]
        )
        message.moves.append(move)
        expected.moves.append(move)

    def _shift(self, message: Message, expected: Expected) -> None:
        try:
            expected.meet(self.timeout)
            problem = None
        except MismatchError as error:
            # Other ranks wait in the collective, so this rank takes part before it raises the error.
            problem = error
        like = message.tensors[0] if message.tensors else torch.empty(0)
        sent = torch.cat([as_bytes(t) for t in message.tensors]) if message.tensors else _no_bytes(like)
        received = _no_bytes(like).new_empty(announced_bytes(expected.header))
        out, into = [0] * self.world_size, [0] * self.world_size
        out[message.peer], into[expected.peer] = sent.numel(), received.numel()
        work = dist.all_to_all_single(received, sent, into, out, group=self.group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=self.timeout))
        if problem is not None:
            raise problem
        parts = received.split([t.nbytes for t in expected.tensors])
        for tensor, part in zip(expected.tensors, parts, strict=True):
            copy(part, as_bytes(tensor))

    def close(self) -> None:
        self._lane.close()


def _no_bytes(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=like.device)
