"""What a schedule decides: how rows and K/V blocks of all ranks meet, and how gradients go home."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ringlab.blocks.protocol import Gradient
from ringlab.schedules.call import Call


class Attended(NamedTuple):
    """The forward of one rank: its rows of out, in q's dtype, and of lse, and what backward needs.

    lse has no elements where the call does not ask for it and the schedule would have to send it.
    """

    out: Tensor
    lse: Tensor
    kept: tuple[Tensor, ...]


class Schedule(Protocol):
    """Communication of ring attention, forward and backward."""

    @property
    def name(self) -> str:
        """The name by which `get_schedule` finds it."""
        ...

    def check(self, heads: int, kv_heads: int, world_size: int) -> None:
        """Return if so many heads can be computed on so many ranks.

        Raises: WorldSizeError or ShapeError, naming the schedule; nothing has been sent by then.
        """
        ...

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """Return attention of this rank's queries over the tokens of all ranks."""
        ...

    def backward(self, call: Call, kept: tuple[Tensor, ...], dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of this rank's shards, in the state dtype or in q's own where nothing is lost by it."""
        ...


class Homecoming(Protocol):
    """Collects gradients of K/V blocks on this rank and brings each to the rank that owns the block."""

    def add(self, origin: int, k: Tensor, v: Tensor, gradients: list[Gradient]) -> None:
        """Take what this rank adds to the gradients of the block (k, v) of `origin`."""
        ...

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return (dk, dv) of this rank's own block, complete, in the state dtype."""
        ...
