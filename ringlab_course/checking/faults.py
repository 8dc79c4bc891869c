"""Faults of the network and of the ranks, as data that the notebook and the judge both understand.

A program that keeps the rules of `Comm.exchange` waits for the messages that it needs, from the ranks that
send them, in the order of sending. So slow links, slow ranks and late messages do not change one bit of its
answers. The answers of a program that looks at the clock, or changes tensors that it has posted, depend on
the network. These faults make the difference visible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from ringlab.comm.protocol import CONTROL, Comm, Work, Wrapper
from ringlab.comm.virtual.cluster import Costs
from ringlab.comm.wrappers.faulty import Fault
from ringlab.errors import CommError, PeerDiedError, TransportTimeout, WorldSizeError

T = TypeVar("T")
EXCHANGES_AFTER_A_DEATH = "an exchange after PeerDiedError was raised"
LATEST = 256
"""`Faults.late` chooses among this many first exchanges of a rank. Later exchanges are posted at once."""


@dataclass(frozen=True)
class Faults:
    """The network of one run. Without arguments it has no faults.

    seed: seeds every random choice. delay: the largest additional time of a message in virtual seconds. It is
    drawn for each pair of ranks, so that messages of different pairs overtake each other, and messages of one
    pair never do. slow: (rank, factor), a rank whose computations take `factor` times as long. late: the
    share, from 0 to 1, of exchanges that are posted at the latest moment that a transport allows, when the
    rank waits or posts the next exchange. kill: (rank, exchange), a rank that is killed before this exchange;
    exchanges are counted from 0 without control messages. timeout: (rank, exchange), an exchange that raises
    TransportTimeout when that rank waits for it. final: whether a death ends all exchange. If it does, a rank
    that has seen PeerDiedError gets a CommError from its next exchange that is not a control message.

    In the judge, the order in which ranks continue is also drawn from the seed.
    """

    seed: int = 0
    delay: float = 0.0
    slow: tuple[int, float] | None = None
    late: float = 0.0
    kill: tuple[int, int] | None = None
    timeout: tuple[int, int] | None = None
    final: bool = False

    def costs(self) -> Costs:
        """Return the costs of computations and messages on the virtual clock."""
        return _Weather(self)

    def late_of(self, rank: int) -> list[int]:
        """Return the numbers of the exchanges that `rank` posts late."""
        dice = random.Random(f"late {self.seed} {rank}")
        return [number for number in range(LATEST) if dice.random() < self.late]

    def plan(self, world_size: int) -> tuple[Fault, ...]:
        """Return the late exchanges as faults of `ringlab.comm.wrappers.faulty`. Raises: WorldSizeError."""
        self.require(world_size)
        return tuple(
            Fault("delay", rank, number, seconds=0.0)
            for rank in range(world_size)
            for number in self.late_of(rank)
        )

    def require(self, world_size: int) -> None:
        """Return None if the faults name only ranks that exist. Raises: WorldSizeError."""
        for rank, _ in filter(None, (self.slow, self.kill, self.timeout)):
            if not 0 <= rank < world_size:
                raise WorldSizeError(f"faults of ranks 0..{world_size - 1}", f"rank {rank} in {self}")


@dataclass(frozen=True)
class Ended:
    """The result of a rank that ended early after a rank was killed: its exception's class and message."""

    error: str
    text: str = ""


class Killed(BaseException):
    """Ends the program of a killed rank. It is no Exception, so `except Exception` cannot catch it."""

    def __init__(self) -> None:
        super().__init__("it was killed, as a fault of this run")


class Bereft(Wrapper):
    """A `comm` that raises TransportTimeout when the rank waits for exchange number `timeout`.

    If `final`, it refuses every exchange after a PeerDiedError.
    """

    def __init__(self, comm: Comm, timeout: int | None, final: bool) -> None:
        super().__init__(comm)
        self.timeout, self.final = timeout, final
        self.bereft, self._count = False, 0

    def exchange(
        self,
        *,
        send: Sequence[Tensor] = (),
        to: int | None = None,
        receive: Sequence[Tensor] = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        control, number = tag.startswith(CONTROL), self._count
        if not control:
            if self.bereft:
                raise CommError(
                    "no exchange after PeerDiedError", EXCHANGES_AFTER_A_DEATH, "return the result so far"
                )
            self._count += 1
        work = self.inner.exchange(send=send, to=to, receive=receive, source=source, tag=tag)
        return _BereftWork(self, work, not control and number == self.timeout)


class _BereftWork(Work):
    def __init__(self, comm: Bereft, inner: Work, in_vain: bool) -> None:
        self.comm, self.inner, self.in_vain = comm, inner, in_vain

    def wait(self) -> tuple[Tensor, ...]:
        if self.in_vain:
            raise TransportTimeout("a message from a live rank", "no message in time", "a rank may be slow")
        try:
            return self.inner.wait()
        except PeerDiedError:
            self.comm.bereft = self.comm.final
            raise


class Mortal(Wrapper):
    """The `comm` of a rank that dies before its exchange number `exchange`; later calls raise Killed too."""

    def __init__(self, comm: Comm, exchange: int) -> None:
        super().__init__(comm)
        self.exchange_of_death, self.dead, self._count = exchange, False, 0

    def exchange(
        self,
        *,
        send: Sequence[Tensor] = (),
        to: int | None = None,
        receive: Sequence[Tensor] = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        if not tag.startswith(CONTROL):
            self.dead = self.dead or self._count == self.exchange_of_death
            self._count += 1
        self.require_life()
        return self.inner.exchange(send=send, to=to, receive=receive, source=source, tag=tag)

    def compute(self, label: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        self.require_life()
        return self.inner.compute(label, function, *args, **kwargs)

    def require_life(self) -> None:
        """Return None while the rank lives. Raises: Killed."""
        if self.dead:
            raise Killed


class _Weather(Costs):
    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def compute(self, rank: int, label: str, args: tuple[Any, ...]) -> float:
        slow = self.faults.slow
        return super().compute(rank, label, args) * (slow[1] if slow and slow[0] == rank else 1.0)

    def message(self, source: int, to: int, nbytes: int) -> float:
        if not self.faults.delay:
            return super().message(source, to, nbytes)
        # One draw per pair of ranks, so that a pair's second message never arrives before its first.
        longer = random.Random(f"link {self.faults.seed} {source} {to}").uniform(0.0, self.faults.delay)
        return super().message(source, to, nbytes) + longer
