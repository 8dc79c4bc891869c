"""The two halves of an exchange over torch.distributed: the message sent, and the message expected.

Gloo pairs sends and receives only by (peer, number). It checks neither shape nor dtype nor tag, fills only a
part of the buffer if the message is too short, and aborts the process if the message is too long. Every
message therefore starts with a header of fixed size that describes it. The numbers under which its tensors
are sent contain a digest of the description, so tensors that do not fit are never paired.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import UInt8
from torch import Tensor

from ringlab.comm.protocol import AnyTensor, Tensors
from ringlab.errors import DeadlockError, MismatchError, WorldSizeError

HEADER_BYTES = 512
_DIGEST_BYTES = 16
_LENGTH_BYTES = 8
_TEXT = _DIGEST_BYTES + _LENGTH_BYTES  # the byte of the header at which the text begins
_MESSAGES = 1 << 16  # messages in flight between two ranks, far more than any program posts
_MARKS = 1 << 15  # gloo's numbers are signed 32-bit: 16 bits count messages, 15 bits describe a tensor


@dataclass(frozen=True)
class Signature:
    """The description of a message: its tag, the dtype and shape of each tensor, and their total bytes."""

    text: str
    nbytes: int

    @classmethod
    def of(cls, tag: str, tensors: Tensors) -> Signature:
        """Return the signature of a message of these tensors.

        >>> Signature.of("kv", [torch.zeros(2, 3)])
        Signature(text="'kv': float32[2, 3]", nbytes=24)
        """
        parts = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors]
        return cls(f"{tag!r}: {', '.join(parts)}", sum(t.nbytes for t in tensors))

    @property
    def digest(self) -> bytes:
        """Return the 16-byte digest of the text."""
        return hashlib.blake2b(self.text.encode(), digest_size=_DIGEST_BYTES).digest()

    def header(self) -> UInt8[Tensor, "512"]:
        """Return the header to send: the digest, the number of bytes, and as much of the text as fits."""
        text = self.text.encode()[: HEADER_BYTES - _TEXT]
        content = (self.digest + self.nbytes.to_bytes(_LENGTH_BYTES, "big") + text).ljust(HEADER_BYTES, b"\0")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def number(self, message: int, place: int) -> int:
        """Return gloo's number for the tensor at `place` in the `message`-th message."""
        mark = 1 + (int.from_bytes(self.digest[:4], "big") + place) % (_MARKS - 1)
        return message % _MESSAGES * _MARKS + mark


def empty_header() -> UInt8[Tensor, "512"]:
    """Return a buffer for receiving a header."""
    return torch.zeros(HEADER_BYTES, dtype=torch.uint8)


def header_number(message: int) -> int:
    """Return gloo's number for the header of the `message`-th message."""
    return message % _MESSAGES * _MARKS


def difference(expected: Signature, header: UInt8[Tensor, "512"]) -> str | None:
    """Return the sender's description if it differs from the expected description, or else None."""
    content = header.numpy().tobytes()
    if content[:_DIGEST_BYTES] == expected.digest:
        return None
    return content[_TEXT:].rstrip(b"\0").decode(errors="replace")


def announced_bytes(header: UInt8[Tensor, "512"]) -> int:
    """Return the number of bytes of the tensors that follow `header`, whether or not they are expected."""
    return int.from_bytes(header.numpy().tobytes()[_DIGEST_BYTES:_TEXT], "big")


_BOTH = "post the send and the receive in one exchange"


@dataclass(frozen=True)
class Label:
    """The description of an exchange that errors quote."""

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
        """Return a text for errors, which says what this rank waits for `peer` to do."""
        verb = "send" if peer == self.source else "take"
        return f"rank {peer} to {verb} {self.tag!r}, exchange {self.number} of rank {self.rank}"

    def check(self, world_size: int) -> None:
        """Check that both ends are ranks. Raises: WorldSizeError if one is not."""
        for peer in (self.to, self.source):
            if peer is not None and not 0 <= peer < world_size:
                raise WorldSizeError(f"ranks 0..{world_size - 1}", f"rank {peer} in {self}")


class Move(ABC):
    """A transfer of tensors that is under way.

    On a GPU, after `wait`, `event` marks the arrival of the tensors.
    """

    event: torch.cuda.Event | None = None

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Wait until the host's part is done. Raises: RuntimeError or CommError if the transfer fails."""


class Message:
    """The tensors that this rank sends, and their header."""

    def __init__(self, label: Label, peer: int, signature: Signature, tensors: Sequence[Tensor]) -> None:
        self.label, self.peer, self.signature = label, peer, signature
        self.tensors = [t.detach().contiguous() for t in tensors]
        self.header = signature.header()
        self.number = 0  # sequence number among this rank's messages to `peer`
        self.header_works: list[dist.Work] = []
        self.moves: list[Move] = []
        self.local, self.taken = peer == label.rank, False

    def wait(self, timeout: float) -> None:
        """Wait until the receiver has posted its receive and all tensors have been sent.

        Raises: DeadlockError if this rank has sent a message to itself but posted no receive for it.
        """
        if self.local and not self.taken:
            raise DeadlockError(
                self.label.waits(self.peer), "a message to itself, for which it posted no receive", _BOTH
            )
        for work in self.header_works:
            work.wait(timedelta(seconds=timeout))
        for move in self.moves:
            move.wait(timeout)


class Expected:
    """The message that this rank receives.

    `met_elsewhere`: whether the code that moves the tensors waits for the header, so that `wait` need not.
    """

    met_elsewhere = False

    def __init__(self, label: Label, peer: int, signature: Signature, buffers: Sequence[Tensor]) -> None:
        self.label, self.peer, self.signature = label, peer, signature
        self.buffers = [b.detach() for b in buffers]
        self.tensors = [b if b.is_contiguous() else b.contiguous() for b in self.buffers]
        self.header = empty_header()
        self.number = 0  # sequence number among this rank's messages from `peer`
        self.header_works: list[dist.Work] = []
        self.moves: list[Move] = []
        self.local = peer == label.rank
        self.source: Message | None = None

    def wait(self, timeout: float) -> None:
        """Check the header, and wait until the host's part of the transfer is done.

        Raises: MismatchError if the message is not the expected one; DeadlockError if this rank expects a
        message from itself but has not sent it.
        """
        if self.local:
            self._take_from_self()
        elif not self.met_elsewhere:
            self.meet(timeout)
        for move in self.moves:
            move.wait(timeout)

    def meet(self, timeout: float) -> None:
        """Wait for the header, and check it. Raises: MismatchError if it is not the expected header."""
        for work in self.header_works:
            work.wait(timedelta(seconds=timeout))
        found = difference(self.signature, self.header)
        if found is not None:
            raise MismatchError(
                f"{self.signature.text}, which rank {self.label.rank} expects from rank {self.peer} "
                f"in its exchange {self.label.number}",
                f"{found}, which rank {self.peer} sent",
                "make both ranks post the same exchanges in the same order",
            )

    def unpack(self) -> None:
        """Fill the buffers that are not contiguous, after the tensors have arrived."""
        for buffer, tensor in zip(self.buffers, self.tensors, strict=True):
            if tensor is not buffer:
                buffer.copy_(tensor)

    def _take_from_self(self) -> None:
        if self.source is None:
            raise DeadlockError(
                self.label.waits(self.peer), "a receive of a message to itself that it has not sent", _BOTH
            )
        self.header = self.source.header
        self.meet(0.0)
        for tensor, sent in zip(self.tensors, self.source.tensors, strict=True):
            tensor.copy_(sent)


class Traffic:
    """Posts headers, and pairs the messages that a rank sends to itself."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.group = rank, group
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._received: defaultdict[int, int] = defaultdict(int)
        self._to_self: list[Message] = []
        self._from_self: list[Expected] = []

    def post(self, label: Label, send: Tensors, receive: Tensors) -> tuple[Message | None, Expected | None]:
        """Return the two halves of an exchange, with both headers posted at once."""
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
        self._headers(message, expected)
        return message, expected

    def _headers(self, message: Message | None, expected: Expected | None) -> None:
        ops = []
        if expected is not None and not expected.local:
            expected.number = _next(self._received, expected.peer)
            ops.append(
                p2p(self.group, dist.irecv, expected.header, expected.peer, header_number(expected.number))
            )
        if message is not None and not message.local:
            message.number = _next(self._sent, message.peer)
            ops.append(
                p2p(self.group, dist.isend, message.header, message.peer, header_number(message.number))
            )
        for op, work in zip(ops, dist.batch_isend_irecv(ops) if ops else [], strict=True):
            half = expected if op.op is dist.irecv else message
            assert half is not None
            half.header_works.append(work)


def p2p(
    group: dist.ProcessGroup | None, function: Callable[..., Any], tensor: AnyTensor, peer: int, number: int
) -> dist.P2POp:
    """Return an operation for a batch of torch.distributed. `peer` is numbered within the group."""
    return dist.P2POp(function, tensor, group=group, group_peer=peer, tag=number)


def _next(counts: defaultdict[int, int], peer: int) -> int:
    counts[peer] += 1
    return counts[peer] - 1
