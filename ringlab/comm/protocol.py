"""The interface of every transport: rank, world_size, `exchange`, and the collectives that use it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, SupportsFloat, TypeAlias, TypeVar

import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from ringlab.errors import MismatchError, ShapeError, WorldSizeError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

AnyTensor: TypeAlias = Shaped[Tensor, "..."]
"""A tensor of any shape and dtype, because a message may contain any."""
Tensors: TypeAlias = Sequence[AnyTensor]
Bytes: TypeAlias = UInt8[Tensor, " _"]
"""The memory of a tensor, or a part of it."""

CONTROL = "control:"
"""The beginning of the tags of messages without attention data, which meters leave out."""


def thread_safe(function: F) -> F:
    """Return `function`, marked as touching only its arguments: several ranks may run it at once."""
    function.thread_safe = True  # type: ignore[attr-defined]
    return function


def thread_safe_if(safe: bool, function: Callable[..., T]) -> Callable[..., T]:
    """Return `function`, or a copy that is marked as thread-safe if `safe` is true.

    `safe` depends on the block of a call. The mark is on a copy, because another call may use another block.
    """
    return thread_safe(partial(function)) if safe else function


class Work(ABC):
    """An exchange that is under way.

    `stall`: after `wait` on a GPU, the seconds for which computations waited for the exchange. Read it as a
    float when the run has ended. It is None if `wait` itself took that time.
    `transit`: after `wait`, the intervals in which a message was under way. Only virtual clocks know them.
    """

    stall: SupportsFloat | None = None
    transit: tuple[tuple[float, float], ...] | None = None

    @abstractmethod
    def wait(self) -> tuple[Tensor, ...]:
        """Return the filled receive buffers. After `wait` the sent tensors may be written again.

        Raises: PeerDiedError, MismatchError, DeadlockError or TransportTimeout if the messages do not arrive
        or do not fit. Each error names both ranks, the tag and the number of the exchange.
        """


class Comm(ABC):
    """One rank's end of a transport.

    Messages from one rank to another arrive in the order in which they were sent. A receive takes the next message, and
    raises an error if the message's tag, shape or dtype is not the expected one.
    """

    rank: int
    world_size: int

    @abstractmethod
    def exchange(
        self,
        *,
        send: Tensors = (),
        to: int | None = None,
        receive: Tensors = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        """Post a send to rank `to` and a receive from rank `source` at once, and return the work of both.

        Before `wait`, the tensors `send` must not be written, and `receive` must be neither read nor written.

        Raises: WorldSizeError if `to` or `source` is needed and is not a rank.
        """

    def hand_over(
        self,
        *,
        send: Tensors,
        to: int,
        receive: Tensors,
        source: int,
        tag: str = "",
    ) -> Work:
        """Return the work of an `exchange` that gives `send` away: after `wait` its content is undefined.

        Transports inside one process swap the memory of both ends instead of copying.
        """
        return self.exchange(send=send, to=to, receive=receive, source=source, tag=tag)

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
        """Return the work of a `hand_over` of a block that left its owner `hops` hops ago and is unchanged.

        All ranks relay together, by the same distance: first their own block (hops 0), which each rank
        keeps, and then the block that they received last. A transport may fetch a block directly from its
        owner instead of from the previous rank. A round has at most P − 1 relays. A relay with hops 0 begins
        another round.
        """
        post = self.hand_over if hops else self.exchange
        return post(send=send, to=to, receive=receive, source=source, tag=tag)

    @abstractmethod
    def now(self) -> float:
        """Return the seconds on this rank's clock. On the virtual cluster they are virtual."""

    def compute(self, label: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return `function(*args, **kwargs)`.

        Transports override this method to time, trace or move the work.
        """
        return function(*args, **kwargs)

    def record_choice(self, asked: str, chosen: str) -> None:  # noqa: B027 (only traces need it)
        """Record that `chosen` was used where the program left the choice open, as in block="auto"."""

    def name_call(self, ranks: Sequence[int] | None = None) -> str:
        """Return a name for the next call of attention over `ranks`. It is the same on each of these ranks.

        ranks: by default all. The name contains the number of calls over these ranks so far. Each rank
        takes part in every such call, so their counts agree. Wrappers and subgroups leave counting to the
        transport that they wrap, because a rank may make new wrappers for every call, or may have more
        wrappers than another rank.
        """
        among = tuple(range(self.world_size) if ranks is None else ranks)
        inner = getattr(self, "inner", None)  # the transport that a wrapper wraps
        if isinstance(inner, Comm):
            return inner.name_call(among)
        counts: Counter[tuple[int, ...]] = self.__dict__.setdefault("_named_calls", Counter())
        counts[among] += 1
        over = "" if among == tuple(range(self.world_size)) else f" over ranks {', '.join(map(str, among))}"
        return f"call {counts[among]} of attention{over}"

    def fail(self, error: BaseException) -> None:  # noqa: B027 (most transports need nothing here)
        """Tell the other ranks, if the transport can, that this rank ends because of `error`."""

    def all_gather(
        self, tensor: AnyTensor, shapes: Sequence[Sequence[int]] | None = None, tag: str = "all_gather"
    ) -> list[Tensor]:
        """Return every rank's tensor in rank order. shapes: the shape of each rank's tensor, if they differ.

        Raises: WorldSizeError unless there is a shape for each rank; ShapeError if this rank's tensor has
        another shape.
        """
        shapes = shapes or [tensor.shape] * self.world_size
        if len(shapes) != self.world_size:
            raise WorldSizeError(f"{self.world_size} shapes, one per rank", f"{len(shapes)}")
        if tuple(shapes[self.rank]) != tuple(tensor.shape):
            raise ShapeError(
                f"shape {tuple(shapes[self.rank])} on rank {self.rank}", f"{tuple(tensor.shape)}"
            )
        tensor = tensor.contiguous()
        gathered = [tensor if r == self.rank else tensor.new_empty(tuple(s)) for r, s in enumerate(shapes)]
        pending = []
        for distance in range(1, self.world_size):
            to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            pending.append(
                self.exchange(send=(tensor,), to=to, receive=(gathered[source],), source=source, tag=tag)
            )
        for work in pending:
            work.wait()
        return gathered

    def all_reduce(self, tensor: AnyTensor, op: str = "sum", tag: str = "all_reduce") -> Tensor:
        """Return the sum or maximum over ranks, computed in rank order, so every rank gets the same bits.

        Raises: MismatchError unless `op` is "sum" or "max".
        """
        if op not in ("sum", "max"):
            raise MismatchError("op 'sum' or 'max'", repr(op))
        first, *rest = self.all_gather(tensor, tag=tag)
        total = first.clone()
        for other in rest:
            total = total + other if op == "sum" else torch.maximum(total, other)
        return total

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8), tag=CONTROL + "barrier")


class Wrapper(Comm):
    """A transport that wraps the transport `inner`. A subclass overrides `exchange`.

    `hand_over`, `relay` and the collectives use that `exchange`, unless they are overridden too. All other
    calls are passed to `inner`.
    """

    def __init__(self, inner: Comm) -> None:
        self.inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size

    def compute(self, label: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return self.inner.compute(label, function, *args, **kwargs)

    def now(self) -> float:
        return self.inner.now()

    def record_choice(self, asked: str, chosen: str) -> None:
        self.inner.record_choice(asked, chosen)

    def fail(self, error: BaseException) -> None:
        self.inner.fail(error)
