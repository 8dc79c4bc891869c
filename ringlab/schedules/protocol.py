"""What a schedule decides: how K/V blocks come to a rank, and how their gradients go home."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from ringlab.blocks.protocol import Gradient
from ringlab.schedules.call import Call


class Homecoming(Protocol):
    """Collects gradients of K/V blocks on this rank and brings each to the rank that owns the block."""

    def add(self, origin: int, k: Tensor, v: Tensor, gradients: list[Gradient]) -> None:
        """Take what this rank adds to the gradients of the block (k, v) of `origin`."""
        ...

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return (dk, dv) of this rank's own block, complete, in the state dtype."""
        ...


class Schedule(Protocol):
    """Communication of ring attention, forward and backward."""

    name: str

    def blocks(self, call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (origin, k, v) for the block of every rank, this rank's own first."""
        ...

    def homecoming(self, call: Call) -> Homecoming:
        """Return the collector of gradients for one backward."""
        ...
