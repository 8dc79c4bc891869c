"""Ways of a transport: groups of exchanges that must not wait for each other, such as the two directions of a ring.

A schedule decides which of its rings have a way of their own. Over NCCL each way has its own communicator
and stream, because the exchanges of one communicator run one after the other. All other transports move a
rank's exchanges at the same time anyway, so a way changes nothing there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ringlab.comm.protocol import Comm, Tensors, Work, Wrapper
from ringlab.comm.subgroup import members

Key = tuple[str, tuple[int, ...]]
"""The name of a way and its ranks, numbered as in the innermost transport."""
_current: ContextVar[OnWay | None] = ContextVar("way", default=None)


def current_way() -> Key | None:
    """Return the way on which an exchange is being posted, or None for the transport's common way."""
    way = _current.get()
    return None if way is None else (way.name, members(way)[1])


class OnWay(Wrapper):
    """The transport `comm`, whose exchanges use the way called `name`. All its ranks must pass the same name."""

    def __init__(self, comm: Comm, name: str) -> None:
        super().__init__(comm)
        self.name = name

    def exchange(
        self,
        *,
        send: Tensors = (),
        to: int | None = None,
        receive: Tensors = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        with self._posting():
            return self.inner.exchange(send=send, to=to, receive=receive, source=source, tag=tag)

    def hand_over(self, *, send: Tensors, to: int, receive: Tensors, source: int, tag: str = "") -> Work:
        with self._posting():
            return self.inner.hand_over(send=send, to=to, receive=receive, source=source, tag=tag)

    def relay(
        self, *, hops: int, send: Tensors, to: int, receive: Tensors, source: int, tag: str = ""
    ) -> Work:
        with self._posting():
            return self.inner.relay(hops=hops, send=send, to=to, receive=receive, source=source, tag=tag)

    @contextmanager
    def _posting(self) -> Iterator[None]:
        # Of nested ways, use the outermost, which has the fewest ranks.
        token = _current.set(_current.get() or self)
        try:
            yield
        finally:
            _current.reset(token)
