"""Carriers, which move the tensors of an exchange over torch.distributed once their headers are posted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringlab.comm.processes.background import Lane, as_bytes, copy
from ringlab.comm.processes.wire_format import Expected, Label, Message, Move, announced_bytes, p2p
from ringlab.comm.way import Key, current_way
from ringlab.errors import CommError, MismatchError


class Carrier(ABC):
    """Moves tensors between this rank and its peers.

    relays: whether the carrier can fetch blocks from their owners.
    """

    relays = False

    def check(self, label: Label) -> None:  # noqa: B027 (most carriers take every exchange)
        """Check, before anything is posted, that the exchange can be carried.

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
        """After a program without error, wait briefly until no other rank needs this rank's memory."""

    def close(self) -> None:  # noqa: B027
        """End the threads that run in the background, and close the groups that the carrier opened."""


def high_priority(limit: timedelta | None = None) -> Any:
    """Return the options of an NCCL group whose kernels run on streams of high priority.

    With normal priority, NCCL's kernel might not start until all thread blocks of the running computation
    have begun, because they leave no registers for it. limit: the time that an operation may take.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if limit is not None:
        options._timeout = limit  # torch would warn if this differed from the timeout of the group
    return options


@dataclass
class _Line:
    """A communicator that carries exchanges, and the stream on which they are ordered.

    places: the number of each rank in `group`, if it differs from the number in the transport.
    """

    group: dist.ProcessGroup | None
    stream: torch.cuda.Stream | None = None
    places: Mapping[int, int] | None = None


class PointToPoint(Carrier):
    """Sends and receives of torch.distributed: gloo for tensors on the CPU, NCCL for those on a GPU.

    On a GPU, exchanges run on a separate stream. An exchange begins when the computations launched before it
    have finished, and runs at the same time as those launched after it. Only computations launched after
    `wait` wait for it.

    On a GPU, the exchanges of a way have a communicator and a stream of their own, because one communicator
    runs its exchanges one after the other. The ranks of the way open this communicator together, at their
    first exchange on it. limit: the time that a message on it may take.
    """

    def __init__(self, group: dist.ProcessGroup | None, limit: timedelta | None = None) -> None:
        self.group, self.limit = group, limit
        self._lines: dict[Key | None, _Line] = {None: _Line(group)}

    def start(self, message: Message | None, expected: Expected | None) -> None:
        ops: list[dist.P2POp] = []
        owners: list[Message | Expected] = []
        halves = [half for half in (expected, message) if half is not None and not half.local]
        device = next((t.device for half in halves for t in half.tensors if t.is_cuda), None)
        line = self._lines[None] if device is None else self._line(current_way(), device)
        for half, function in ((expected, dist.irecv), (message, dist.isend)):
            if half is not None and not half.local:
                made = self._ops(function, half, line)
                ops += made
                owners += [half] * len(made)
        if not ops:
            return
        if device is not None:
            move = self._on_stream(ops, line)
            for owner in {id(owner): owner for owner in owners}.values():
                owner.moves.append(move)
        else:
            for owner, work in zip(owners, dist.batch_isend_irecv(ops), strict=True):
                owner.moves.append(_OnHost(work))

    def close(self) -> None:
        for line in self._lines.values():
            if line.places is not None and line.group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(line.group)

    def _line(self, way: Key | None, device: torch.device) -> _Line:
        if way not in self._lines:
            assert way is not None
            self._lines[way] = self._open(*way, device)
        return self._lines[way]

    def _open(self, name: str, ranks: Sequence[int], device: torch.device) -> _Line:
        whole = dist.group.WORLD if self.group is None else self.group
        assert whole is not None
        numbers = [dist.get_global_rank(whole, rank) for rank in ranks]
        bound = dist.distributed_c10d._get_default_group().bound_device_id is not None
        if bound and len(ranks) < dist.get_world_size():
            # torch would split the communicator of all processes, and all of them would have to take part.
            return self._lines[None]
        group = dist.new_group(
            sorted(numbers),
            timeout=self.limit,
            backend="nccl",
            pg_options=high_priority(self.limit),
            use_local_synchronization=True,
            group_desc=f"ringlab: {name}",
        )
        # NCCL requires that all ranks take part in the first operation of a group.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        places = {rank: sorted(numbers).index(number) for rank, number in zip(ranks, numbers, strict=True)}
        return _Line(group, places=places)

    def _ops(self, function: Callable[..., Any], half: Message | Expected, line: _Line) -> list[dist.P2POp]:
        peer = half.peer if line.places is None else line.places[half.peer]
        return [
            p2p(line.group, function, tensor, peer, half.signature.number(half.number, place))
            for place, tensor in enumerate(half.tensors)
            # Empty tensors are left out: gloo cannot send them, and the header has announced them.
            if tensor.numel()
        ]

    def _on_stream(self, ops: list[dist.P2POp], line: _Line) -> _OnStream:
        device = ops[0].tensor.device
        if line.stream is None:
            line.stream = torch.cuda.Stream(device, priority=-1)
        stream = line.stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for work in dist.batch_isend_irecv(ops):
                work.wait()  # makes the current stream wait, but not the host
        for op in ops:  # memory freed meanwhile must not be reused before this stream has finished with it
            op.tensor.record_stream(stream)
        return _OnStream(stream.record_event())


class _OnHost(Move):
    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def wait(self, timeout: float) -> None:
        self.work.wait(timedelta(seconds=timeout))


class _OnStream(Move):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self, timeout: float) -> None:
        """Do nothing: the host has nothing to wait for, and NCCL's own watchdog checks the timeout."""


class AllToAll(Carrier):
    """One collective per exchange, in which each rank sends to one rank and receives from one.

    It is for processes that share one GPU. gloo's all-to-all supports CUDA tensors, through pinned memory,
    but gloo's sends and receives do not. All ranks must take part, and all must shift around the ring by the
    same distance.
    """

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None, timeout: float) -> None:
        self.rank, self.world_size, self.group, self.timeout = rank, world_size, group, timeout
        self._lane = Lane("all-to-all")

    def check(self, label: Label) -> None:
        """Check that the exchange can be part of a shift by one distance. Raises: CommError if it cannot."""
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
            # Other ranks wait in the collective, so this rank takes part in it before it raises the error.
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
