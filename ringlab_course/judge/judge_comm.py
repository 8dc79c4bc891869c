"""A rank's transport inside a worker: every message goes to the judge, which is the network.

The judge sees what a rank sends, when it waits and what it holds afterwards. Only the worker reports that it computes
between two messages: `compute` tells the judge when it begins and ends, and its result shows in the values alone.
`Channel` is the worker's end of the socket to the judge.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from ringlab.comm.protocol import Comm, Work
from ringlab.errors import CommError, MismatchError, PeerDiedError, WorldSizeError
from ringlab_course.judge.protocol import Frame, FrameReader, pack


class Abort(BaseException):
    """The judge has ended this call; no BaseException of the learner's, so that `except Exception` lets it by."""


class Channel:
    """Sends and receives frames."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.reader = FrameReader(from_judge=True)
        self.frames: list[Frame] = []
        self.call = 0

    def send(self, kind: str, value: Any = None, **fields: Any) -> None:
        """Send one frame, marked with the number of the call under way."""
        for part in pack(Frame(kind, {"call": self.call, **fields}, value)):
            self.socket.sendall(part)

    def receive(self) -> Frame:
        """Return the next frame; the end of the judge is the end of the worker."""
        while not self.frames:
            data = self.socket.recv(1 << 20)
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


T = TypeVar("T")


class JudgeComm(Comm):
    """Rank `rank` of `world_size`; the other ranks are other workers, met only through the judge."""

    def __init__(self, channel: Channel, rank: int, world_size: int, second: float = 1.0) -> None:
        self.rank, self.world_size = rank, world_size
        self._channel, self._count = channel, 0
        self._computing = False
        self._second, self._time = second, 0.0

    def exchange(
        self,
        *,
        send: Sequence[Tensor] = (),
        to: int | None = None,
        receive: Sequence[Tensor] = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        self._not_inside("exchange")
        for name, peer, tensors in (("to", to, send), ("source", source, receive)):
            if tensors and (peer is None or not 0 <= peer < self.world_size):
                raise WorldSizeError(f"{name}= a rank from 0 to {self.world_size - 1}", repr(peer))
        index, self._count = self._count, self._count + 1
        wanted = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in receive]
        fields = {"index": index, "to": to, "source": source, "tag": str(tag)[:200], "receive": wanted}
        self._channel.send("exchange", tuple(t.detach() for t in send), **fields)
        return _JudgeWork(self, index, tuple(receive))

    def compute(self, label: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if self._computing:
            return function(*args, **kwargs)  # a computation inside a computation
        self._channel.send("begin", label=str(label)[:200])
        self._computing = True
        try:
            result = function(*args, **kwargs)
        finally:
            self._computing = False
        self._channel.send("end")
        self._time += self._second
        return result

    def _not_inside(self, what: str) -> None:
        """The same rule as the virtual cluster's."""
        if self._computing:
            raise CommError(
                f"{what} from the program of rank {self.rank} itself",
                "a call from inside ring.compute",
                "exchange before or after ring.compute(...), not inside it",
            )

    def now(self) -> float:
        return self._time  # the virtual clock, as in a notebook


class _JudgeWork(Work):
    def __init__(self, comm: JudgeComm, index: int, into: tuple[Tensor, ...]) -> None:
        self._comm, self._index, self._into = comm, index, into
        self._done = False

    def wait(self) -> tuple[Tensor, ...]:
        if not self._done:
            self._comm._not_inside("wait")
            self._comm._channel.send("wait", index=self._index)
            frame = self._comm._channel.receive()
            if frame.kind == "lost":
                kind = MismatchError if frame.fields.get("error") == MismatchError.__name__ else PeerDiedError
                raise kind(*(str(frame.fields.get(part)) for part in ("needed", "got", "remedy")))
            if frame.kind != "received":
                raise Abort
            self._comm._time = frame.fields["time"]
            for buffer, arrived in zip(self._into, frame.value, strict=True):
                buffer.detach().copy_(arrived)
            self._done = True
        return self._into
