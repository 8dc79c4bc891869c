"""A rank's transport inside a worker: every message goes to the judge, which acts as the network.

The judge sees what a rank sends, when it waits, and what it receives. It does not see when the worker
computes between two messages. So `compute` waits for the judge when a computation begins and when it ends,
and the judge reads the processor time in between. Only the values show whether a computation was right.

Honest mistakes of a program raise errors with helpful messages in the worker, because the judge treats a
frame in a wrong form as an attack.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from torch import Tensor

from ringlab.comm.protocol import CONTROL, Comm, Work
from ringlab.errors import (
    CommError,
    MismatchError,
    PeerDiedError,
    RinglabError,
    TransportTimeout,
    WorldSizeError,
)
from ringlab_course.checking.faults import EXCHANGES_AFTER_A_DEATH
from ringlab_course.checking.protocol import ProtocolError
from ringlab_course.checking.ring_rules import (
    COMPUTING,
    KEPT,
    dtype_name,
    in_a_thread,
    misuse,
    require_messages,
)
from ringlab_course.judge.channel import Abort, Channel

T = TypeVar("T")
LOST: dict[Any, type[RinglabError]] = {
    kind.__name__: kind for kind in (MismatchError, TransportTimeout, PeerDiedError)
}
"""The errors that an exchange may raise, by the name that the judge uses for them."""


class JudgeComm(Comm):
    """Rank `rank` of `world_size`. The other ranks are other workers, reached only through the judge.

    late: the numbers of the exchanges, not counting control messages, that are posted only when the rank
    waits or posts its next exchange.
    """

    def __init__(self, channel: Channel, rank: int, world_size: int, late: Collection[int] = ()) -> None:
        self.rank, self.world_size = rank, world_size
        self._channel, self._posted, self._count = channel, 0, 0
        self._call, self._thread = channel.call, threading.get_ident()
        self._computing, self._bereft, self._time = False, False, 0.0
        self._late = frozenset(late)
        self._held: _JudgeWork | None = None

    def exchange(
        self,
        *,
        send: Sequence[Tensor] = (),
        to: int | None = None,
        receive: Sequence[Tensor] = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        self._require_program("exchange")
        to, source = (self._peer(*end) for end in (("to", to, send), ("source", source, receive)))
        for tensors in (send, receive):
            require_messages(tensors)
        control = str(tag).startswith(CONTROL)
        if self._bereft and not control:
            raise CommError(
                "no exchange after PeerDiedError", EXCHANGES_AFTER_A_DEATH, "return the result so far"
            )
        if self._held is not None:
            self._held.post()
        work = _JudgeWork(self, tuple(send), to, tuple(receive), source, str(tag)[:200])
        if not control:
            self._count += 1
            if self._count - 1 in self._late:
                self._held = work
                return work
        work.post()
        return work

    def compute(self, label: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if self._computing or threading.get_ident() != self._thread:
            return function(*args, **kwargs)  # a computation inside a computation counts as part of it
        self._require_program("compute")
        self._channel.send("begin", label=str(label)[:200])
        self._channel.expect("begun")
        self._computing = True
        try:
            return function(*args, **kwargs)
        finally:
            self._computing = False
            self._channel.send("end")
            self._channel.expect("ended")

    def _require_program(self, what: str) -> None:
        """Check that this call comes from the program's own thread and from outside of a computation.

        The virtual cluster has the same rules. Raises: CommError. The channel keeps the error too, because
        an error in another thread may be lost.
        """
        if self._channel.call != self._call:
            got, remedy = KEPT
        elif threading.get_ident() != self._thread:
            got, remedy = in_a_thread()
        elif self._computing:
            got, remedy = COMPUTING
        else:
            return
        error = misuse(what, self.rank, got, remedy)
        self._channel.misuse = self._channel.misuse or error
        raise error

    def _peer(self, name: str, peer: Any, tensors: Sequence[Tensor]) -> int | None:
        """Return the rank at the other end. Raises: WorldSizeError if there is no such rank."""
        if peer is None and not tensors:
            return None
        try:
            rank = operator.index(peer)
        except TypeError:
            rank = -1
        if not 0 <= rank < self.world_size:
            raise WorldSizeError(f"{name}= a rank from 0 to {self.world_size - 1}", repr(peer))
        return rank

    def now(self) -> float:
        """Return the time of the virtual clock, as in a notebook.

        Inside a computation, this is the time when the clock was last read.
        """
        if not self._computing and threading.get_ident() == self._thread:
            self._require_program("now")
            self._channel.send("now")
            self._time = self._channel.expect("time").fields["time"]
        return self._time


def sealed(comm: Comm) -> Comm:
    """Return a transport that behaves like `comm` but has no attribute that leads to `comm`.

    So a program cannot remove the rules that a wrapper imposes.
    """

    class Sealed(Comm):
        rank, world_size = comm.rank, comm.world_size

        def exchange(self, **ends: Any) -> Work:
            return comm.exchange(**ends)

        def compute(self, label: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
            return comm.compute(label, function, *args, **kwargs)

        def now(self) -> float:
            return comm.now()

    return Sealed()


class _JudgeWork(Work):
    def __init__(
        self,
        comm: JudgeComm,
        send: tuple[Tensor, ...],
        to: int | None,
        into: tuple[Tensor, ...],
        source: int | None,
        tag: str,
    ) -> None:
        self._comm, self._send, self._into = comm, send, into
        self._fields = {
            "to": to,
            "source": source,
            "tag": tag,
            "receive": [[dtype_name(t), list(t.shape)] for t in into],
        }
        self._index, self._done = -1, False

    def post(self) -> None:
        """Post the exchange unless it was already posted.

        Raises: CommError for messages that cannot be sent.
        """
        if self._index >= 0:
            return
        comm, self._comm._held = self._comm, None
        try:
            sent = tuple(tensor.detach() for tensor in self._send)
            comm._channel.send("exchange", sent, index=comm._posted, **self._fields)
        except ProtocolError as error:
            needed = f"messages in one exchange that can be sent: {error.needed}"
            raise CommError(needed, error.got, "send less at a time") from None
        self._send, self._index = (), comm._posted
        comm._posted += 1

    def wait(self) -> tuple[Tensor, ...]:
        if not self._done:
            self._comm._require_program("wait")
            self.post()
            self._comm._channel.send("wait", index=self._index)
            frame = self._comm._channel.receive()
            if frame.kind == "lost":
                self._comm._bereft = bool(frame.fields.get("final"))
                kind = LOST[frame.fields.get("error")]
                raise kind(*(str(frame.fields.get(part)) for part in ("needed", "got", "remedy")))
            if frame.kind != "received":
                raise Abort
            for buffer, arrived in zip(self._into, frame.value, strict=True):
                buffer.detach().copy_(arrived)
            self._done = True
        return self._into
