"""The worker's end of the socket to the judge."""

from __future__ import annotations

import socket
from typing import Any

from ringlab_course.checking.protocol import Frame, FrameReader, pack

PIECE = 1 << 16
"""Bytes received at a time. With more, chance would say how much of a message is in memory twice, and so the peak."""


class Abort(BaseException):
    """The judge has ended this call; no BaseException of the learner's, so that `except Exception` lets it by."""


class Channel:
    """Sends and receives frames."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.reader = FrameReader(from_judge=True)
        self.frames: list[Frame] = []
        self.call = 0
        self.misuse: Exception | None = None  # of this call's ring, raised where nobody may see it

    def send(self, kind: str, value: Any = None, **fields: Any) -> None:
        """Send one frame, marked with the number of the call under way."""
        for part in pack(Frame(kind, {"call": self.call, **fields}, value)):
            self.socket.sendall(part)

    def receive(self) -> Frame:
        """Return the next frame; the end of the judge is the end of the worker."""
        while not self.frames:
            data = self.socket.recv(PIECE)
            if not data:
                raise SystemExit
            self.frames += self.reader.feed(data)
        return self.frames.pop(0)

    def expect(self, kind: str) -> Frame:
        """Return the next frame, which is of `kind` or ends the call."""
        frame = self.receive()
        if frame.kind != kind:
            raise Abort
        return frame
