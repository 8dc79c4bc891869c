"""The worker's end of the socket to the judge."""

from __future__ import annotations

import socket
from typing import Any

from ringlab_course.checking.protocol import Frame, FrameReader, pack

PIECE = 1 << 16
"""Bytes received at a time. With larger pieces, the peak of memory would vary randomly.

The size of a piece decides how much of a message may be in memory twice.
"""


class Abort(BaseException):
    """The judge has ended this call.

    This is a BaseException, so that a learner's `except Exception` does not catch it.
    """


class Channel:
    """Sends and receives frames."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.reader = FrameReader(from_judge=True)
        self.frames: list[Frame] = []
        self.call = 0
        # The first broken rule of the ring in this call, kept because its error may be lost in a thread.
        self.misuse: Exception | None = None

    def send(self, kind: str, value: Any = None, **fields: Any) -> None:
        """Send one frame, marked with the number of the current call."""
        for part in pack(Frame(kind, {"call": self.call, **fields}, value)):
            self.socket.sendall(part)

    def receive(self) -> Frame:
        """Return the next frame. Raises: SystemExit if the judge has closed the socket."""
        while not self.frames:
            data = self.socket.recv(PIECE)
            if not data:
                raise SystemExit
            self.frames += self.reader.feed(data)
        return self.frames.pop(0)

    def expect(self, kind: str) -> Frame:
        """Return the next frame. Raises: Abort if it is not of `kind`."""
        frame = self.receive()
        if frame.kind != kind:
            raise Abort
        return frame
