"""A rank's transport inside a worker: every message goes to the judge, who is the network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ringlab.comm.protocol import Comm, Work
from ringlab.errors import WorldSizeError

if TYPE_CHECKING:
    from ringlab.course.judge.worker import Channel


class JudgeComm(Comm):
    """Rank `rank` of `world_size`; the other ranks are other workers, met only through the judge."""

    def __init__(self, channel: Channel, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._channel, self._count = channel, 0

    def exchange(
        self,
        *,
        send: Sequence[Tensor] = (),
        to: int | None = None,
        receive: Sequence[Tensor] = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        for name, peer, tensors in (("to", to, send), ("source", source, receive)):
            if tensors and (peer is None or not 0 <= peer < self.world_size):
                raise WorldSizeError(f"{name}= a rank from 0 to {self.world_size - 1}", repr(peer))
        index, self._count = self._count, self._count + 1
        wanted = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in receive]
        fields = {"index": index, "to": to, "source": source, "tag": str(tag)[:200], "receive": wanted}
        self._channel.send("exchange", tuple(t.detach() for t in send), **fields)
        return _JudgeWork(self._channel, index, tuple(receive))

    def now(self) -> float:
        return time.perf_counter()


class _JudgeWork(Work):
    def __init__(self, channel: Channel, index: int, into: tuple[Tensor, ...]) -> None:
        self._channel, self._index, self._into = channel, index, into
        self._done = False

    def wait(self) -> tuple[Tensor, ...]:
        if not self._done:
            self._channel.send("wait", index=self._index)
            frame = self._channel.receive()
            if frame.kind != "received":
                from ringlab.course.judge.worker import Abort

                raise Abort
            for buffer, arrived in zip(self._into, frame.value, strict=True):
                buffer.detach().copy_(arrived)
            self._done = True
        return self._into
