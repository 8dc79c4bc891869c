"""Sends and receives on a virtual cluster that wait for their other end, and the errors about them."""

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
    """The part of a rank's exchange that error messages need."""

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
    def done(self) -> bool:
        """Return whether the exchange is complete or has failed."""
        ...


@dataclass(eq=False)
class Half:
    """One end of one message: the `place`-th tensor that `rank` sends to, or receives from, `peer`.

    given: whether the receiver may take the tensor instead of a copy. free: whether its owner no longer
    needs the tensor. partner: the other end, which waits until the tensor is free.
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
        """Return the ranks (sender, receiver)."""
        return (self.rank, self.peer) if self.sending else (self.peer, self.rank)

    def __str__(self) -> str:
        verb, way = ("sends", "to") if self.sending else ("expects", "from")
        form = f"{str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)}"
        work = f"exchange {self.work.index}, '{self.work.tag}', tensor {self.place}"
        return f"rank {self.rank} {verb} {form} {way} rank {self.peer} ({work})"


def where(peer: int | None, comm: Comm, name: str) -> int:
    """Return `peer` if it is a rank of `comm`.

    Raises: WorldSizeError, with the argument's name, if it is not.
    """
    if peer is None or not 0 <= peer < comm.world_size:
        raise WorldSizeError(f"{name}= a rank from 0 to {comm.world_size - 1}", f"{name}={peer}")
    return peer


def mismatch(send: Half, receive: Half) -> tuple[str, str, str] | None:
    """Return (needed, got, remedy) if the two ends of a message do not fit, or else None."""
    fits = (send.tensor.shape, send.tensor.dtype) == (receive.tensor.shape, receive.tensor.dtype)
    if fits and send.work.tag == receive.work.tag and send.place == receive.place:
        return None
    shapes = [list(each.tensor.shape) for each in (send, receive)]
    lengths = [shape.pop(-2) if len(shape) > 1 else 0 for shape in shapes]
    remedy = "all ranks must post the same tensors in the same order"
    if lengths[0] != lengths[1] and shapes[0] == shapes[1] and send.tensor.dtype == receive.tensor.dtype:
        remedy += "; ragged shards need length="
    return "both ends of a message to agree in shape, dtype, tag and order", f"{send}; {receive}", remedy


def peer_died(work: Waiting, dead: int, error: BaseException | None) -> PeerDiedError:
    """Return the error of a rank that waits for `work` after rank `dead` has failed."""
    found = PeerDiedError(
        f"rank {dead} to stay alive until exchange {work.index}, '{work.tag}', of rank {work.rank} is complete",
        f"rank {dead} raised {type(error).__name__}: {error}",
        f"mend rank {dead}; rank {work.rank} only waited",
    )
    found.waits = f"rank {work.rank} waits: {'; '.join(map(str, work.open_ends))}"
    return found


def raise_failure(rank: int, error: BaseException | None, P: int) -> NoReturn:
    """Raise the error that ended a run.

    Raises: a RinglabError of `rank` unchanged; RankFailedError for any other error.
    """
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
    """Return an error that says for which rank each rank waits, with the cycle of waiting ranks."""
    lines = [f"rank {rank} waits: {'; '.join(map(str, work.open_ends))}" for rank, work in works.items()]
    cycle = _cycle({rank: work.open_ends[0].peer for rank, work in works.items()})
    drawn = " → ".join(map(str, cycle)) if cycle else "none: they wait for a rank that has finished"
    remedy = "call ring.shift or ring.post equally often on all ranks"
    if cycle:
        remedy = "post sends and receives together (ring.shift, ring.post), equally often on all ranks"
    return DeadlockError(
        "a rank that can go on",
        "\n        ".join([*lines, f"cycle: {drawn}"]),
        remedy,
    )


def unfinished(leftovers: Sequence[Half], unwaited: Sequence[Waiting]) -> UnreceivedError:
    """Return the error for messages that no rank received and exchanges that no rank waited for."""
    lines = [f"{half}, and rank {half.peer} ended without it" for half in leftovers]
    lines += [f"rank {w.rank} never waited for exchange {w.index}, '{w.tag}'" for w in unwaited]
    return UnreceivedError(
        "every message to be taken, and every exchange to be waited for, before the program ends",
        "\n        ".join(lines),
        "call wait() on what post() returns; K/V need only P − 1 shifts",
    )


def _cycle(waits_for: dict[int, int]) -> list[int]:
    """Return a cycle of ranks that wait for each other, with the first rank again at the end, or []."""
    for start in waits_for:
        seen, rank = [start], waits_for[start]
        while rank in waits_for and rank not in seen:
            seen.append(rank)
            rank = waits_for[rank]
        if rank in seen:
            return [*seen[seen.index(rank) :], rank]
    return []
