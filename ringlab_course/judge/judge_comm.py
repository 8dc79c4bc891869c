"""A rank's transport inside a worker: every message goes to the judge, which is the network.

What a rank sends, when it waits and what it then holds, the judge sees. That it computes between two of
these only the worker says: `compute` waits for the judge when it begins and when it ends, so that the judge
can read how much the processor did meanwhile. What came out of it shows in the values alone.

What a program may do wrong without meaning harm is an error here, in its own words: whatever reaches the
judge in a wrong form is taken for an attack.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from ringlab.comm.protocol import Comm, Work
from ringlab.errors import CommError, MismatchError, PeerDiedError, WorldSizeError
from ringlab_course.judge.channel import Abort, Channel
from ringlab_course.judge.protocol import ITEMSIZE, LIMITS, ProtocolError

T = TypeVar("T")
KEPT = ("a ring of an earlier run", "use the ring that your function is given, and keep none")
COMPUTING = ("a call from inside ring.compute", "exchange before or after ring.compute(...), not inside it")
"""What went wrong, and the remedy."""


class JudgeComm(Comm):
    """Rank `rank` of `world_size`; the other ranks are other workers, met only through the judge."""

    def __init__(self, channel: Channel, rank: int, world_size: int, second: float = 1.0) -> None:
        self.rank, self.world_size = rank, world_size
        self._channel, self._count = channel, 0
        self._call, self._thread = channel.call, threading.get_ident()
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
        self._require_program("exchange")
        to, source = (self._peer(*end) for end in (("to", to, send), ("source", source, receive)))
        for tensors in (send, receive):
            require_messages(tensors)
        wanted = [[_dtype(t), list(t.shape)] for t in receive]
        fields = {"index": self._count, "to": to, "source": source, "tag": str(tag)[:200], "receive": wanted}
        try:
            self._channel.send("exchange", tuple(t.detach() for t in send), **fields)
        except ProtocolError as error:
            needed = f"messages in one exchange that can be sent: {error.needed}"
            raise CommError(needed, error.got, "send less at a time") from None
        self._count += 1
        return _JudgeWork(self, self._count - 1, tuple(receive))

    def compute(self, label: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if self._computing or threading.get_ident() != self._thread:
            return function(*args, **kwargs)  # a computation inside a computation
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
            self._time += self._second

    def _require_program(self, what: str) -> None:
        """Return if the program itself asks, and not inside a computation; the virtual cluster has the same rules.

        Raises: CommError. One in another thread may be lost there, so that the channel keeps it.
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
        """Return the rank at the other end. Raises: WorldSizeError."""
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
        return self._time  # the virtual clock, as in a notebook


def misuse(what: str, rank: int, got: str, remedy: str) -> CommError:
    """Return the error for a call of `what` that does not come from the ring's own program."""
    return CommError(f"{what} from the program of rank {rank} itself", got, remedy)


def in_a_thread() -> tuple[str, str]:
    """Return what went wrong where this thread uses a ring that is another thread's, and the remedy."""
    got = f"a call from the thread '{threading.current_thread().name}'"
    return got, "let the function's own thread exchange: ring.post returns at once, and work.wait() waits"


def require_messages(tensors: Sequence[Tensor]) -> None:
    """Return if these can be sent and received. Raises: CommError."""
    got = f"{len(tensors)} of them" if len(tensors) > LIMITS.arrays else ""
    for tensor in tensors:
        if _dtype(tensor) not in ITEMSIZE:
            got = f"a tensor of {_dtype(tensor)}"
        elif tensor.ndim > LIMITS.dimensions:
            got = f"a tensor of {tensor.ndim} dimensions"
    if got:
        needed = f"at most {LIMITS.arrays} tensors of at most {LIMITS.dimensions} dimensions, {', '.join(ITEMSIZE)}"
        raise CommError(needed, got, "convert what you exchange")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class _JudgeWork(Work):
    def __init__(self, comm: JudgeComm, index: int, into: tuple[Tensor, ...]) -> None:
        self._comm, self._index, self._into = comm, index, into
        self._done = False

    def wait(self) -> tuple[Tensor, ...]:
        if not self._done:
            self._comm._require_program("wait")
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
