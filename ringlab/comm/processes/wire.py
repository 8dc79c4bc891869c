"""The header that travels before every message on a real transport, and the numbers that pair them.

Gloo pairs sends and receives by (peer, number) alone: it checks neither shape, dtype nor meaning,
fills a buffer partly when the message is short, and aborts the process when it is long. So every
message starts with a header of fixed size that says what it is, and the numbers of its tensors
contain a digest of that description: tensors that do not fit are never paired at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

HEADER_BYTES = 512
_DIGEST_BYTES = 16
_LENGTH_BYTES = 8
_TEXT = _DIGEST_BYTES + _LENGTH_BYTES  # where it begins
_MESSAGES = 1 << 16  # in flight between two ranks, far more than any program posts
_MARKS = 1 << 15  # gloo's numbers are signed 32-bit: 16 bits count messages, 15 bits describe a tensor


@dataclass(frozen=True)
class Signature:
    """What a message is: its tag, the dtype and shape of each tensor, and their bytes together."""

    text: str
    nbytes: int

    @classmethod
    def of(cls, tag: str, tensors: Sequence[Tensor]) -> Signature:
        parts = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors]
        return cls(f"{tag!r}: {', '.join(parts)}", sum(t.nbytes for t in tensors))

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.text.encode(), digest_size=_DIGEST_BYTES).digest()

    def header(self) -> UInt8[Tensor, "512"]:
        """Return the header to send: digest, number of bytes, then as much of the text as fits."""
        text = self.text.encode()[: HEADER_BYTES - _TEXT]
        content = (self.digest + self.nbytes.to_bytes(_LENGTH_BYTES, "big") + text).ljust(HEADER_BYTES, b"\0")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def number(self, message: int, place: int) -> int:
        """Return the number under which the tensor at `place` of the `message`-th message travels."""
        mark = 1 + (int.from_bytes(self.digest[:4], "big") + place) % (_MARKS - 1)
        return message % _MESSAGES * _MARKS + mark


def empty_header() -> UInt8[Tensor, "512"]:
    """Return a buffer to receive a header in."""
    return torch.zeros(HEADER_BYTES, dtype=torch.uint8)


def header_number(message: int) -> int:
    """Return the number under which the header of the `message`-th message travels."""
    return message % _MESSAGES * _MARKS


def difference(expected: Signature, header: UInt8[Tensor, "512"]) -> str | None:
    """Return the sender's description if it is not the expected one, else None."""
    content = header.numpy().tobytes()
    if content[:_DIGEST_BYTES] == expected.digest:
        return None
    return content[_TEXT:].rstrip(b"\0").decode(errors="replace")


def announced_bytes(header: UInt8[Tensor, "512"]) -> int:
    """Return how many bytes the tensors have that come after `header`, whether expected or not."""
    return int.from_bytes(header.numpy().tobytes()[_DIGEST_BYTES:_TEXT], "big")
