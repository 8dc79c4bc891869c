"""The two halves of an exchange over torch.distributed: the message sent and the message expected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ringlab.comm.wire import Signature, difference, empty_header, header_number
from ringlab.errors import DeadlockError, MismatchError, WorldSizeError

_BOTH = "post the send and the receive in one exchange"


@dataclass(frozen=True)
class Label:
    """What an exchange is called in errors."""

    rank: int
    number: int
    tag: str
    to: int | None
    source: int | None

    def __str__(self) -> str:
        ends = [f"to rank {self.to}"] if self.to is not None else []
        ends += [f"from rank {self.source}"] if self.source is not None else []
        return f"exchange {self.number} {self.tag!r} of rank {self.rank} ({', '.join(ends) or 'empty'})"

    def waits(self, peer: int | None) -> str:
        """Return the sentence that says whom this rank waits for."""
        verb = "send" if peer == self.source else "take"
        return f"rank {peer} to {verb} {self.tag!r}, exchange {self.number} of rank {self.rank}"

    def check(self, world_size: int) -> None:
        """Raise WorldSizeError unless both ends are ranks."""
        for peer in (self.to, self.source):
            if peer is not None and not 0 <= peer < world_size:
                raise WorldSizeError(f"ranks 0..{world_size - 1}", f"rank {peer} in {self}")


class Message:
    """The tensors that this rank sends, and their header."""

    def __init__(self, label: Label, peer: int, signature: Signature, tensors: Sequence[Tensor]) -> None:
        self.label, self.peer, self.signature = label, peer, signature
        self.tensors = [t.detach().contiguous() for t in tensors]
        self.header = signature.header()
        self.works: list[dist.Work] = []
        self.local, self.taken = peer == label.rank, False

    def wait(self, timeout: float) -> None:
        """Return once the receiver has posted its receive and everything has left."""
        if self.local and not self.taken:
            raise DeadlockError(
                self.label.waits(self.peer), "a message to itself that it has not posted a receive for", _BOTH
            )
        _wait_all(self.works, self.tensors, timeout)


class Expected:
    """The message that this rank receives."""

    def __init__(self, label: Label, peer: int, signature: Signature, buffers: Sequence[Tensor]) -> None:
        self.label, self.peer, self.signature = label, peer, signature
        self.buffers = [b.detach() for b in buffers]
        self.tensors = [b if b.is_contiguous() else b.contiguous() for b in self.buffers]
        self.header = empty_header()
        self.header_works: list[dist.Work] = []
        self.works: list[dist.Work] = []
        self.local = peer == label.rank
        self.source: Message | None = None

    def wait(self, timeout: float) -> None:
        """Return once the buffers are filled; the header is checked before anything else is waited for."""
        if self.local:
            self._take_from_self()
        else:
            _wait_all(self.header_works, [self.header], timeout)
            self._check()
            _wait_all(self.works, self.tensors, timeout)
        for buffer, tensor in zip(self.buffers, self.tensors, strict=True):
            if tensor is not buffer:
                buffer.copy_(tensor)

    def _take_from_self(self) -> None:
        if self.source is None:
            raise DeadlockError(
                self.label.waits(self.peer), "a receive of a message to itself that it has not sent", _BOTH
            )
        self.header = self.source.header
        self._check()
        for tensor, sent in zip(self.tensors, self.source.tensors, strict=True):
            tensor.copy_(sent)

    def _check(self) -> None:
        found = difference(self.signature, self.header)
        if found is not None:
            raise MismatchError(
                f"{self.signature.text}, which rank {self.label.rank} expects from rank {self.peer} "
                f"in its exchange {self.label.number}",
                f"{found}, which rank {self.peer} sent",
                "make both ranks post the same exchanges in the same order",
            )


class Traffic:
    """Posts messages of one process group, and pairs those that a rank sends to itself."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.group = rank, group
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._received: defaultdict[int, int] = defaultdict(int)
        self._to_self: list[Message] = []
        self._from_self: list[Expected] = []

    def post(
        self, label: Label, send: Sequence[Tensor], receive: Sequence[Tensor]
    ) -> tuple[Message | None, Expected | None]:
        """Post both halves of an exchange at once."""
        message = expected = None
        if label.to is not None:
            message = Message(label, label.to, Signature.of(label.tag, send), send)
        if label.source is not None:
            expected = Expected(label, label.source, Signature.of(label.tag, receive), receive)
        if message is not None and message.local:
            self._to_self.append(message)
        if expected is not None and expected.local:
            self._from_self.append(expected)
        while self._to_self and self._from_self:
            sent, taken = self._to_self.pop(0), self._from_self.pop(0)
            sent.taken, taken.source = True, sent
        self._start(message, expected)
        return message, expected

    def _start(self, message: Message | None, expected: Expected | None) -> None:
        """Headers and payloads go in one batch each: on NCCL they travel on different backends."""
        headers: list[dist.P2POp] = []
        payload: list[dist.P2POp] = []
        owners: list[Message | Expected] = []
        if expected is not None and not expected.local:
            count = self._received[expected.peer]
            self._received[expected.peer] += 1
            headers.append(self._op(dist.irecv, expected.header, expected.peer, header_number(count)))
            ops = self._tensors(dist.irecv, expected, count)
            payload += ops
            owners += [expected] * len(ops)
        if message is not None and not message.local:
            count = self._sent[message.peer]
            self._sent[message.peer] += 1
            headers.append(self._op(dist.isend, message.header, message.peer, header_number(count)))
            ops = self._tensors(dist.isend, message, count)
            payload += ops
            owners += [message] * len(ops)
        self._batch(headers, message, expected)
        self._batch_payload(payload, owners)

    def _batch(self, headers: list[dist.P2POp], message: Message | None, expected: Expected | None) -> None:
        for op, work in zip(headers, dist.batch_isend_irecv(headers) if headers else [], strict=True):
            if op.op is dist.irecv and expected is not None:
                expected.header_works.append(work)
            elif message is not None:
                message.works.append(work)

    def _batch_payload(self, payload: list[dist.P2POp], owners: list[Message | Expected]) -> None:
        works = dist.batch_isend_irecv(payload) if payload else []
        if len(works) == len(owners):
            for owner, work in zip(owners, works, strict=True):
                owner.works.append(work)
        else:  # NCCL gives one work for the whole batch
            for owner in {id(o): o for o in owners}.values():
                owner.works += works

    def _op(self, function: Callable[..., Any], tensor: Tensor, peer: int, number: int) -> dist.P2POp:
        return dist.P2POp(function, tensor, group=self.group, group_peer=peer, tag=number)

    def _tensors(
        self, function: Callable[..., Any], half: Message | Expected, count: int
    ) -> list[dist.P2POp]:
        return [
            self._op(function, tensor, half.peer, half.signature.number(count, place))
            for place, tensor in enumerate(half.tensors)
            if tensor.numel()  # gloo may not send nothing; the header has said that it is nothing
        ]


def _wait_all(works: Sequence[dist.Work], tensors: Sequence[Tensor], timeout: float) -> None:
    on_gpu = any(t.is_cuda for t in tensors)
    for work in works:
        if on_gpu:  # orders the current stream after the transfer; NCCL's watchdog keeps the time
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout))
