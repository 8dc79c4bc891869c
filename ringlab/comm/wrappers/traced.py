"""A wrapper that records every exchange and computation, with times and bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from ringlab.comm.protocol import Comm, Tensors, Work, Wrapper
from ringlab.comm.trace import Choice, Compute, Exchange, Trace

T = TypeVar("T")


class Traced(Wrapper):
    """The transport `comm`, which appends every exchange and computation to `trace`."""

    def __init__(self, comm: Comm, trace: Trace) -> None:
        super().__init__(comm)
        self.trace, self.count = trace, 0

    def exchange(
        self,
        *,
        send: Tensors = (),
        to: int | None = None,
        receive: Tensors = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        return self._record(self.inner.exchange, send=send, to=to, receive=receive, source=source, tag=tag)

    def hand_over(self, *, send: Tensors, to: int, receive: Tensors, source: int, tag: str = "") -> Work:
        return self._record(self.inner.hand_over, send=send, to=to, receive=receive, source=source, tag=tag)

    def relay(
        self,
        *,
        hops: int,
        send: Tensors,
        to: int,
        receive: Tensors,
        source: int,
        tag: str = "",
    ) -> Work:
        relay = partial(self.inner.relay, hops=hops)
        return self._record(relay, send=send, to=to, receive=receive, source=source, tag=tag)

    def _record(
        self,
        post: Callable[..., Work],
        *,
        send: Tensors,
        to: int | None,
        receive: Tensors,
        source: int | None,
        tag: str,
    ) -> Work:
        posted, index = self.now(), self.count
        self.count += 1
        work = post(send=send, to=to, receive=receive, source=source, tag=tag)
        sent, received = sum(t.nbytes for t in send), sum(t.nbytes for t in receive)
        shapes = tuple(tuple(t.shape) for t in send)

        def finish(waited: float) -> None:
            times = posted, waited, self.now(), work.stall, work.transit
            self.trace.events.append(
                Exchange(self.rank, index, tag, to, source, sent, received, shapes, *times)
            )

        return _TracedWork(work, self.now, finish)

    def compute(self, label: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        start = self.now()
        result = self.inner.compute(label, function, *args, **kwargs)
        self.trace.events.append(Compute(self.rank, label, start, self.now()))
        return result

    def record_choice(self, asked: str, chosen: str) -> None:
        self.inner.record_choice(asked, chosen)
        self.trace.events.append(Choice(self.rank, asked, chosen, self.now()))


class _TracedWork(Work):
    def __init__(self, work: Work, now: Callable[[], float], finish: Callable[[float], None]) -> None:
        self.work, self.now = work, now
        self.finish: Callable[[float], None] | None = finish

    def wait(self) -> tuple[Tensor, ...]:
        waited = self.now()
        received = self.work.wait()
        if self.finish is not None:
            self.finish(waited)
            self.finish = None
        return received
