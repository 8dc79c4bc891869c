"""A rank's transport inside a worker: every message goes to the judge, which is the network.

What a rank sends, when it waits and what it then holds, the judge sees. That it computes between two of
these, and that real work is done there, only the worker says: `compute` tells the judge when it begins
and ends, and what comes out of it shows in the values alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from ringlab.comm.protocol import Comm, Work
from ringlab.errors import CommError, MismatchError, PeerDiedError, WorldSizeError
from ringlab_course.judge.channel import Abort, Channel

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
