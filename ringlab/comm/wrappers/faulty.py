"""A wrapper that makes a chosen exchange go wrong, in the same way in each run.

A message under this wrapper has a sequence number in its tag, as on any network that may lose or swap
messages. A receiver that gets a message other than the next one therefore raises an error, on every
transport, even if tag and shape agree:

| kind      | what happens to the message of that exchange      | what follows                          |
|-----------|---------------------------------------------------|---------------------------------------|
| drop      | it is not sent; the sender believes it was        | MismatchError if another follows it,  |
|           |                                                   | else DeadlockError (virtual cluster), |
|           |                                                   | PeerDiedError or TransportTimeout     |
| delay     | nothing is posted, neither send nor receive,      | the right result, later; or           |
|           | until the rank waits or posts the next exchange,  | TransportTimeout                      |
|           | and `seconds` have passed                         |                                       |
| duplicate | it is sent twice                                  | MismatchError if the receiver takes   |
|           |                                                   | another one, else UnreceivedError     |
| reorder   | it is sent after the next message to that rank    | MismatchError; as drop if none follows|
| corrupt   | one element of one tensor arrives with other bits | no error: only an oracle notices      |
| kill      | the rank ends before it posts                     | RankKilled in it (virtual cluster) or |
|           |                                                   | a SIGKILL; PeerDiedError in the others|

A send is a rendezvous on all transports: it completes when its receiver has posted the receive. The sender of
a dropped or reordered message does not wait. No rank waits for the second copy of a duplicate: it stays under
way until a receive takes it or the run ends.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from time import sleep
from typing import Any

import torch
from torch import Tensor

from ringlab.comm.protocol import CONTROL, Comm, Tensors, Work, Wrapper
from ringlab.errors import CommError, WorldSizeError

KINDS = ("drop", "delay", "duplicate", "reorder", "corrupt", "kill")


class RankKilled(CommError):
    """The error of a rank that a fault killed."""


@dataclass(frozen=True)
class Fault:
    """A fault of one rank in its exchange number `exchange`, counted from 0 without control messages.

    seconds: the length of a delay on the wall clock. seed: the seed that selects the corrupted element and
    its new bits.

    Raises: CommError for an unknown kind, or a negative rank or exchange.
    """

    kind: str
    rank: int
    exchange: int
    seconds: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CommError(f"one of the kinds of fault {', '.join(KINDS)}", repr(self.kind))
        if self.rank < 0 or self.exchange < 0:
            raise CommError("rank and exchange 0 or above", f"rank {self.rank}, exchange {self.exchange}")


def random_faults(
    seed: int, kinds: Sequence[str], world_size: int, exchanges: int, count: int = 1
) -> tuple[Fault, ...]:
    """Return `count` random faults at different places. Equal arguments give equal faults.

    exchanges: the number of exchanges that each rank makes. Raises: CommError if there are fewer places than
    faults.
    """
    places = [(rank, exchange) for rank in range(world_size) for exchange in range(exchanges)]
    if count > len(places):
        raise CommError(f"at most {len(places)} faults, one per rank and exchange", f"{count}")
    dice = random.Random(seed)
    chosen = sorted(dice.sample(places, count))
    return tuple(
        Fault(dice.choice(list(kinds)), rank, exchange, seed=dice.randrange(1 << 30))
        for rank, exchange in chosen
    )


def _raise_killed(fault: Fault) -> None:
    raise RankKilled(
        f"rank {fault.rank} to make exchange {fault.exchange}",
        "a fault killed the rank before it",
        "the argument faults= asked for this",
    )


class Faulty(Wrapper):
    """The transport `comm`, in which this rank's faults among `faults` happen.

    Wrap all ranks or no rank, because both ends must number the messages. For a kill, `die` is called to end
    this rank; by default it raises RankKilled. `fired` lists the faults that have happened.

    Raises: WorldSizeError for a fault of a rank that does not exist; CommError for two faults in one exchange.
    """

    def __init__(
        self, comm: Comm, faults: Sequence[Fault], die: Callable[[Fault], None] = _raise_killed
    ) -> None:
        super().__init__(comm)
        self.die = die
        self.fired: list[Fault] = []
        self._faults = _by_exchange(faults, comm)
        self._count = 0
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._received: defaultdict[int, int] = defaultdict(int)
        self._late: _Late | None = None
        self._held: dict[int, list[Callable[[], Any]]] = defaultdict(list)

    def exchange(
        self,
        *,
        send: Tensors = (),
        to: int | None = None,
        receive: Tensors = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        if self._late is not None:
            self._late.post()
        if tag.startswith(CONTROL):
            return self.inner.exchange(send=send, to=to, receive=receive, source=source, tag=tag)
        fault = self._faults.get(self._count)
        self._count += 1
        if fault is not None:
            self.fired.append(fault)
        if fault is not None and fault.kind == "kill":
            self.die(fault)
        outgoing = self._numbered(tag, tuple(send), to, self._sent)
        incoming = self._numbered(tag, tuple(receive), source, self._received)
        return self._post(fault, outgoing, incoming)

    def _post(self, fault: Fault | None, outgoing: _End, incoming: _End) -> Work:
        kind = fault.kind if fault is not None and outgoing.tensors else None
        if fault is not None and fault.kind == "delay":
            late = partial(copy_context().run, self._both, outgoing, incoming)  # keeps the current way
            self._late = _Late(self, fault.seconds, late)
            return self._late
        if kind == "drop":
            return self._both(_NOTHING, incoming)
        if kind == "reorder":
            copy = outgoing.cloned()
            self._held[outgoing.peer].append(lambda: self._both(copy, _NOTHING))
            return self._both(_NOTHING, incoming)
        if kind == "corrupt":
            assert fault is not None
            return self._both(_corrupted(outgoing, fault.seed), incoming)
        work = self._both(outgoing, incoming)
        if kind == "duplicate":
            self._both(outgoing.cloned(), _NOTHING)
        if outgoing.tensors:
            for post in self._held.pop(outgoing.peer, []):
                post()
        return work

    def _both(self, outgoing: _End, incoming: _End) -> Work:
        """Return the work of posting both halves, in one exchange if their tags agree.

        Without faults their tags agree.
        """
        if outgoing.tensors and incoming.tensors and outgoing.tag != incoming.tag:
            first = self.inner.exchange(send=outgoing.tensors, to=outgoing.peer, tag=outgoing.tag)
            second = self.inner.exchange(receive=incoming.tensors, source=incoming.peer, tag=incoming.tag)
            return _Two(second, first)
        return self.inner.exchange(
            send=outgoing.tensors,
            to=outgoing.peer if outgoing.tensors else None,
            receive=incoming.tensors,
            source=incoming.peer if incoming.tensors else None,
            tag=outgoing.tag if outgoing.tensors else incoming.tag,
        )

    def _numbered(
        self, tag: str, tensors: tuple[Tensor, ...], peer: int | None, counts: defaultdict[int, int]
    ) -> _End:
        if not tensors or peer is None:
            return _End(tag, tensors, -1 if peer is None else peer)
        number = counts[peer]
        counts[peer] += 1
        return _End(f"{tag} (message {number})", tensors, peer)


@dataclass(frozen=True)
class _End:
    """The sending half or the receiving half of an exchange."""

    tag: str
    tensors: tuple[Tensor, ...]
    peer: int

    def cloned(self) -> _End:
        return _End(self.tag, tuple(t.detach().clone() for t in self.tensors), self.peer)


_NOTHING = _End("", (), -1)


class _Late(Work):
    """An exchange that is posted only when the rank waits for it or posts the next exchange."""

    def __init__(self, comm: Faulty, seconds: float, post: Callable[[], Work]) -> None:
        self.comm, self.seconds, self._post = comm, seconds, post
        self.work: Work | None = None

    def post(self) -> Work:
        if self.work is None:
            self.comm._late = None
            sleep(self.seconds)
            self.work = self._post()
        return self.work

    def wait(self) -> tuple[Tensor, ...]:
        return self.post().wait()


class _Two(Work):
    """A receive and a send that count as one exchange."""

    def __init__(self, receive: Work, send: Work) -> None:
        self.receive, self.send = receive, send

    def wait(self) -> tuple[Tensor, ...]:
        received = self.receive.wait()
        self.send.wait()
        return received


def _by_exchange(faults: Sequence[Fault], comm: Comm) -> dict[int, Fault]:
    for fault in faults:
        if fault.rank >= comm.world_size:
            raise WorldSizeError(f"faults of ranks 0..{comm.world_size - 1}", f"{fault}")
    mine = [fault for fault in faults if fault.rank == comm.rank]
    chosen = {fault.exchange: fault for fault in mine}
    if len(chosen) < len(mine):
        raise CommError("one fault per rank and exchange", f"{mine}")
    return chosen


def _corrupted(end: _End, seed: int) -> _End:
    """Return a copy in which one element of one tensor has other bits."""
    tensors = list(end.cloned().tensors)
    filled = [i for i, t in enumerate(tensors) if t.numel()]
    if filled:
        dice = random.Random(seed)
        tensor = tensors[dice.choice(filled)]
        flat = tensor.contiguous().view(-1)
        place = dice.randrange(flat.numel())
        if tensor.dtype == torch.bool:  # a bool with bits other than 0 and 1 is undefined
            flat[place] = ~flat[place]
        else:
            bits = flat[place : place + 1].view(torch.uint8)
            bits ^= torch.tensor([dice.randrange(1, 256) for _ in range(bits.numel())], dtype=torch.uint8).to(
                bits.device
            )
        tensor.copy_(flat.view(tensor.shape))
    return _End(end.tag, tuple(tensors), end.peer)
