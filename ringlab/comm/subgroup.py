"""A transport over some ranks of another transport, for rings inside the rows and columns of a mesh."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringlab.comm.protocol import Comm, Tensors, Work, Wrapper
from ringlab.comm.virtual.waiting import where
from ringlab.errors import WorldSizeError


def members(comm: Comm) -> tuple[Comm, tuple[int, ...]]:
    """Return the innermost transport that `comm` wraps, and the numbers that the ranks of `comm` have in it.

    Two transports of one rank give equal results if and only if they have the same ranks in the same order.
    """
    ranks = tuple(range(comm.world_size))
    while isinstance(comm, Wrapper):
        if isinstance(comm, SubGroup):
            ranks = tuple(comm.ranks[rank] for rank in ranks)
        comm = comm.inner
    return comm, ranks


class SubGroup(Wrapper):
    """The ranks `ranks` of `comm`, numbered 0, 1, … in this order. This rank must be among them.

    Each member makes its own SubGroup, without communication. Messages are messages of `comm`, so traces,
    meters and errors use the numbers of `comm`. If two ranks are both in several subgroups, the messages
    between them arrive in the order in which they were sent, whatever the subgroup. A relayed block goes
    from neighbour to neighbour, even if `comm` would fetch it from its owner.

    Raises: WorldSizeError unless `ranks` are different ranks of `comm` and include this one.
    """

    def __init__(self, comm: Comm, ranks: Sequence[int]) -> None:
        super().__init__(comm)
        self.ranks = tuple(ranks)
        there = all(0 <= rank < comm.world_size for rank in self.ranks)
        if not there or len(set(self.ranks)) < len(self.ranks) or comm.rank not in self.ranks:
            raise WorldSizeError(
                f"different ranks from 0 to {comm.world_size - 1}, rank {comm.rank} among them",
                f"{list(self.ranks)}",
            )
        self.rank, self.world_size = self.ranks.index(comm.rank), len(self.ranks)

    def exchange(
        self,
        *,
        send: Tensors = (),
        to: int | None = None,
        receive: Tensors = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        to, source = self._outside(to, send, "to"), self._outside(source, receive, "source")
        return self.inner.exchange(send=send, to=to, receive=receive, source=source, tag=tag)

    def hand_over(self, *, send: Tensors, to: int, receive: Tensors, source: int, tag: str = "") -> Work:
        to, source = self.ranks[where(to, self, "to")], self.ranks[where(source, self, "source")]
        return self.inner.hand_over(send=send, to=to, receive=receive, source=source, tag=tag)

    def name_call(self, ranks: Sequence[int] | None = None) -> str:
        return self.inner.name_call(self.ranks if ranks is None else [self.ranks[rank] for rank in ranks])

    def _outside(self, rank: int | None, tensors: Sequence[Tensor], name: str) -> int | None:
        """Return the number of `rank` in the wrapped transport, or None if no tensor is sent or received."""
        return self.ranks[where(rank, self, name)] if tensors else None
