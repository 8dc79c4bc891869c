"""Bugs planted in the parser and the reader, which fuzzing must find: name, effect and place of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from ringlab_course.checking import protocol
from ringlab_course.checking.protocol import FrameReader
from ringlab_course.judge import exchanges, submission

Plant = Callable[[Any], None]
"""A function that plants a bug by pytest's monkeypatch."""


def _holds_if(unwanted: str) -> Plant:
    """Return a bug that leaves out one bound: the check whose text contains `unwanted` always passes."""

    def plant(patch: Any) -> None:
        require = protocol._require
        patch.setattr(
            protocol,
            "_require",
            lambda holds, needed, got: require(holds or unwanted in needed, needed, got),
        )

    return plant


def _reaches_less(patch: Any) -> None:
    """Compute the size of an array without regard to empty dimensions, a bug that the parser once had."""
    patch.setattr(
        protocol, "_reach", lambda shape, dtype: int(np.prod(shape, dtype=object)) * protocol.ITEMSIZE[dtype]
    )


def _names_another_error(patch: Any) -> None:
    def value(node: Any, arrays: Any, *rest: Any) -> Any:
        if isinstance(node, dict) and "array" in node and type(node["array"]) is int:
            return arrays[node["array"]]  # the bug: IndexError, and negative numbers count from the end
        return plain(node, arrays, *rest)

    plain = protocol._value
    patch.setattr(protocol, "_value", value)


def _never_gets_on(patch: Any) -> None:
    """Loop for ever while the payload has not arrived completely, a planted bug."""
    plain = FrameReader._next

    def following(self: FrameReader) -> Any:
        frame = plain(self)
        while frame is None and self.header is not None and self.buffer:
            frame = plain(self)
        return frame

    patch.setattr(FrameReader, "_next", following)


def _takes_memory_at_once(patch: Any) -> None:
    plain = FrameReader.feed

    def feed(self: FrameReader, data: Any) -> Any:
        frames = plain(self, data)
        if self.header is not None:
            self.buffer = self.buffer + bytearray(self.needed)  # reserves the size that the header claims
            del self.buffer[-self.needed :]
            self.buffer = _Roomy(self.buffer, self.needed)
        return frames

    patch.setattr(FrameReader, "feed", feed)


class _Roomy(bytearray):
    """A buffer with spare room that its reported size includes."""

    def __new__(cls, data: bytearray, room: int) -> _Roomy:
        return super().__new__(cls)

    def __init__(self, data: bytearray, room: int) -> None:
        super().__init__(data)
        self.room = room

    def __sizeof__(self) -> int:
        return super().__sizeof__() + self.room


def _forgives(patch: Any) -> None:
    plain = FrameReader.feed

    def feed(self: FrameReader, data: Any) -> Any:
        self.broken = False
        return plain(self, data)

    patch.setattr(FrameReader, "feed", feed)


def _pieces_matter(patch: Any) -> None:
    """Drop the first byte of a payload that begins in the same piece as its header, a planted bug."""
    plain = FrameReader._next

    def following(self: FrameReader) -> Any:
        begun = self.header is None
        frame = plain(self)
        if begun and frame is None and self.header is not None and len(self.buffer) > 2:
            del self.buffer[:1]
        return frame

    patch.setattr(FrameReader, "_next", following)


def _any_peer(patch: Any) -> None:
    patch.setattr(exchanges, "_is_rank", lambda peer, world_size, needed: peer is not None or not needed)


def _any_label(patch: Any) -> None:
    patch.setattr(exchanges, "read_label", lambda frame, count: frame.fields["label"])
    from tests.fuzz import frames

    patch.setattr(frames, "read_label", exchanges.read_label)


def _trusts_cells(patch: Any) -> None:
    patch.setattr(
        submission, "_cell", lambda cell: submission.Cell(cell["source"], cell["cell_type"] == "code", None)
    )


def _joins_anything(patch: Any) -> None:
    plain = submission._cell

    def cell(node: Any) -> Any:
        if isinstance(node, dict) and isinstance(node.get("source"), list):
            node = {**node, "source": "".join(node["source"])}  # TypeError for numbers
        return plain(node)

    patch.setattr(submission, "_cell", cell)


def _knows_one_coding(patch: Any) -> None:
    def parse(data: bytes) -> Any:
        try:
            return json.loads(data.decode("utf-8-sig"))
        # the planted bug: a wrong encoding raises UnicodeDecodeError, which is not caught here
        except json.JSONDecodeError:
            raise submission._unreadable("broken JSON") from None

    patch.setattr(submission, "_parse", parse)


def _sends_surrogates(patch: Any) -> None:
    patch.setattr(submission, "_bound_code", lambda read: None)


def _long_names(patch: Any) -> None:
    patch.setattr(submission, "_exercise", lambda document, cells: str(document.get("metadata")))


def _shows_what_cannot_be(patch: Any) -> None:
    """Quote the notebook's text unescaped in the reason, a bug that the reader once had."""
    patch.setattr(submission, "ascii", str, raising=False)


def _looks_for_an_end(patch: Any) -> None:
    """Make the parser loop for ever at an empty cell of a notebook."""
    plain = submission._cell

    def cell(node: Any) -> Any:
        while isinstance(node, dict) and node.get("source") == []:
            pass
        return plain(node)

    patch.setattr(submission, "_cell", cell)


PARSER: dict[str, Plant] = {
    "no bound on an array": _holds_if("arrays of at most"),
    "no bound on the depth": _holds_if("levels deep"),
    "no bound on integers": _holds_if("integers of 64 bits"),
    "any byte is a boolean": _holds_if("booleans of 0 or 1"),
    "layouts from a worker": _holds_if("no layouts"),
    "sizes forget what is empty": _reaches_less,
    "another error for a wrong number": _names_another_error,
    "waits for itself": _never_gets_on,
    "takes memory at once": _takes_memory_at_once,
    "listens on after a broken frame": _forgives,
    "pieces matter": _pieces_matter,
    "any peer": _any_peer,
    "any label": _any_label,
}
READER: dict[str, Plant] = {
    "trusts cells": _trusts_cells,
    "joins anything": _joins_anything,
    "knows one coding": _knows_one_coding,
    "sends surrogates": _sends_surrogates,
    "names of any length": _long_names,
    "shows what cannot be": _shows_what_cannot_be,
    "never steps over an empty cell": _looks_for_an_end,
}
