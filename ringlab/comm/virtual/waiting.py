"""The ends of messages that wait for each other on a virtual cluster, and the errors they end in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from torch import Tensor

from ringlab.comm.protocol import Comm
from ringlab.errors import (
    DeadlockError,
    PeerDiedError,
    RankFailedError,
    RinglabError,
    UnreceivedError,
    WorldSizeError,
)


class Waiting(Protocol):
    """An exchange of one rank, as far as messages about it need it."""

    rank: int
    tag: str
    index: int
    to: int | None
    source: int | None
    posted: float
    arrival: float
    error: RinglabError | None
    open_ends: list[Half]

    @property
    def done(self) -> bool: ...


@dataclass(eq=False)
class Half:
    """One end of one message: the `place`-th tensor that `rank` sends to, or takes from, `peer`.

    What is `given` may change hands instead of being copied, once its owner needs it no more
    (`free`); `partner` is the other end that waits for that.
    """

    work: Waiting
    rank: int
    peer: int
    tensor: Tensor
    place: int
    sending: bool
    given: bool = False
    free: bool = True
    partner: Half | None = None

    @property
    def pair(self) -> tuple[int, int]:
        return (self.rank, self.peer) if self.sending else (self.peer, self.rank)

    def __str__(self) -> str:
        verb, way = ("sends", "to") if self.sending else ("expects", "from")
        form = f"{str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)}"
        work = f"exchange {self.work.index}, '{self.work.tag}', tensor {self.place}"
        return f"rank {self.rank} {verb} {form} {way} rank {self.peer} ({work})"


def where(peer: int | None, comm: Comm, name: str) -> int:
    """Return `peer` if it is another rank of `comm`. Raises: WorldSizeError."""
    if peer is None or not 0 <= peer < comm.world_size:
        raise WorldSizeError(f"{name}= a rank from 0 to {comm.world_size - 1}", f"{name}={peer}")
    return peer


def mismatch(send: Half, receive: Half) -> tuple[str, str, str] | None:
    """Return what is wrong between the two ends of a message, None if they fit."""
    fits = (send.tensor.shape, send.tensor.dtype) == (receive.tensor.shape, receive.tensor.dtype)
    if fits and send.work.tag == receive.work.tag and send.place == receive.place:
        return None
    remedy = "all ranks must post the same tensors in the same order; ragged shards need length="
    return "both ends of a message to agree in shape, dtype, tag and order", f"{send}; {receive}", remedy


def peer_died(work: Waiting, dead: int, error: BaseException | None) -> PeerDiedError:
    """Return the error of a rank that waits for `work` after `dead` has failed."""
    return PeerDiedError(
        f"rank {dead} to stay alive until exchange {work.index}, '{work.tag}', of rank {work.rank} is complete",
        f"rank {dead} raised {type(error).__name__}: {error}",
        f"mend rank {dead}; rank {work.rank} only waited",
    )


def raise_failure(rank: int, error: BaseException | None, P: int) -> NoReturn:
    """Raise what ended a run: the RinglabError of `rank` as it is, else RankFailedError from its error."""
    assert error is not None
    if isinstance(error, RinglabError):
        error.add_note(f"raised on rank {rank} of {P}")
        raise error
    raise RankFailedError(
        f"the program to end on all {P} ranks",
        f"rank {rank} raised {type(error).__name__}: {error}",
        "the traceback above is that rank's",
    ) from error


def deadlock(works: dict[int, Waiting]) -> DeadlockError:
    """Return the error that names who waits for whom, and draws the cycle."""
    lines = [f"rank {rank} waits: {'; '.join(map(str, work.open_ends))}" for rank, work in works.items()]
    cycle = _cycle({rank: work.open_ends[0].peer for rank, work in works.items()})
    drawn = " → ".join(map(str, cycle)) if cycle else "none: they wait for a rank that has finished"
    return DeadlockError(
        "a rank that can go on",
        "\n        ".join([*lines, f"cycle: {drawn}"]),
        "post sends and receives together (ring.shift, ring.post), equally often on all ranks",
    )


def unfinished(leftovers: Sequence[Half], unwaited: Sequence[Waiting]) -> UnreceivedError:
    """Return the error for messages that nobody took and exchanges that nobody waited for."""
    lines = [f"{half}, and rank {half.peer} ended without it" for half in leftovers]
    lines += [f"rank {w.rank} never waited for exchange {w.index}, '{w.tag}'" for w in unwaited]
    return UnreceivedError(
        "every message to be taken, and every exchange to be waited for, before the program ends",
        "\n        ".join(lines),
        "call wait() on what post() returns; K/V need only P − 1 shifts",
    )


def _cycle(waits_for: dict[int, int]) -> list[int]:
    """A cycle of ranks that wait for each other, its first rank again at its end; empty if none."""
    for start in waits_for:
        seen, rank = [start], waits_for[start]
        while rank in waits_for and rank not in seen:
            seen.append(rank)
            rank = waits_for[rank]
        if rank in seen:
            return [*seen[seen.index(rank) :], rank]
    return []
