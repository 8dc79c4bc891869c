"""What every transport offers: a rank among others, `exchange`, and the collectives built on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat, TypeVar

import torch
from torch import Tensor

from ringlab.errors import MismatchError, ShapeError, WorldSizeError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

CONTROL = "control:"
"""Tags that begin so carry no attention data; meters leave them out."""


def side_by_side(function: F) -> F:
    """Mark a function that touches nothing but its arguments and may run for several ranks at once."""
    function.side_by_side = True  # type: ignore[attr-defined]
    return function


class Work(ABC):
    """An exchange under way.

    `stall`: after `wait` on a GPU, the seconds that the computations waited for it, as a float to be
    read when the run is over; None where `wait` itself took that time.
    """

    stall: SupportsFloat | None = None

    @abstractmethod
    def wait(self) -> tuple[Tensor, ...]:
        """Return the receive buffers, filled; from then on the sent tensors may be written again.

        Raises: PeerDiedError, MismatchError, DeadlockError or TransportTimeout, each naming
        both ranks, the tag and the number of the exchange.
        """


class Comm(ABC):
    """One rank's end of a transport.

    Messages from one rank to another arrive in the order of sending; a receive takes the next
    one and fails if its tag, shape or dtype is not the expected one.
    """

    rank: int
    world_size: int

    @abstractmethod
    def exchange(
        self,
        *,
        send: Sequence[Tensor] = (),
        to: int | None = None,
        receive: Sequence[Tensor] = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        """Post sends to rank `to` and receives from rank `source` at once; return without waiting.

        `send` must not be written, and `receive` neither read nor written, before `wait`.
        """

    def hand_over(
        self,
        *,
        send: Sequence[Tensor],
        to: int,
        receive: Sequence[Tensor],
        source: int,
        tag: str = "",
    ) -> Work:
        """Like `exchange`, but gives up what is sent: after `wait` the content of `send` is undefined.

        Transports inside one process swap the memory of both ends instead of copying.
        """
        return self.exchange(send=send, to=to, receive=receive, source=source, tag=tag)

    def relay(
        self,
        *,
        hops: int,
        send: Sequence[Tensor],
        to: int,
        receive: Sequence[Tensor],
        source: int,
        tag: str = "",
    ) -> Work:
        """Like `hand_over`, for a block that has made `hops` hops since its owner's, unchanged.

        All ranks relay at once, by the same distance: first each its own block, which it keeps
        (hops 0), then what it received. A transport may fetch a block from its owner, without
        the ranks between. Up to P − 1 relays make a round; the next hops 0 begins another.
        """
        post = self.hand_over if hops else self.exchange
        return post(send=send, to=to, receive=receive, source=source, tag=tag)

    @abstractmethod
    def now(self) -> float:
        """Seconds on this rank's clock; the virtual cluster counts virtual time."""

    def compute(self, label: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return `function(*args, **kwargs)`; the seam at which transports time, trace or move work."""
        return function(*args, **kwargs)

    def chose(self, asked: str, chosen: str) -> None:  # noqa: B027 (only traces need it)
        """Take note that `chosen` was taken where the program left it open, as in block="auto"."""

    def name_call(self, ranks: Sequence[int] | None = None) -> str:
        """Count a call of attention over `ranks`, all by default, and return its name, the same on each of them.

        All ranks of a call take part in it, so each counts the same; wrappers and subgroups let the transport count
        that they are made of, for a rank may make them anew for every call, or have more of them than another.
        """
        among = tuple(range(self.world_size) if ranks is None else ranks)
        inner = getattr(self, "inner", None)  # the transport that a wrapper is made of
        if isinstance(inner, Comm):
            return inner.name_call(among)
        counts: Counter[tuple[int, ...]] = self.__dict__.setdefault("_named_calls", Counter())
        counts[among] += 1
        over = "" if among == tuple(range(self.world_size)) else f" over ranks {', '.join(map(str, among))}"
        return f"call {counts[among]} of attention{over}"

    def fail(self, error: BaseException) -> None:  # noqa: B027 (most transports need nothing here)
        """Tell the other ranks, where the transport can, that this one gives up because of `error`."""

    def all_gather(
        self, tensor: Tensor, shapes: Sequence[Sequence[int]] | None = None, tag: str = "all_gather"
    ) -> list[Tensor]:
        """Return every rank's tensor in rank order; `shapes` where ranks hold different ones."""
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

    def all_reduce(self, tensor: Tensor, op: str = "sum", tag: str = "all_reduce") -> Tensor:
        """Return the sum or max over ranks, folded in rank order, so the same bits on every rank."""
        if op not in ("sum", "max"):
            raise MismatchError("op 'sum' or 'max'", repr(op))
        first, *rest = self.all_gather(tensor, tag=tag)
        total = first.clone()
        for other in rest:
            total = total + other if op == "sum" else torch.maximum(total, other)
        return total

    def barrier(self) -> None:
        """Return once every rank has arrived here."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8), tag=CONTROL + "barrier")
