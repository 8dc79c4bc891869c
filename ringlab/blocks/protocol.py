"""What a block backend offers: attention of one query block on one K/V block, tile by tile or all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ringlab.merge import Partial
from ringlab.plan import Tile
from ringlab.scores import TileScores
from ringlab.types import KeyValue, Query, RowState


class Block(Protocol):
    """One way to compute a tile; backends keep no state.

    Query head h reads key/value head h // (H // K). With `causal`, row i sees keys 0..i
    (aligned top-left) and there are no more keys than rows.
    """

    name: str
    largest_causal: int | None
    """Rows of the largest causal tile worth giving to this backend; None for any."""
    thread_safe: bool
    """Whether several threads may compute with this backend at once."""

    def forward(self, q: Query, k: KeyValue, v: KeyValue, *, causal: bool, scale: float) -> Partial:
        """Return the partial of softmax(scale·q·kᵀ)·v over these keys."""
        ...

    def backward(
        self,
        dout: Query,
        q: Query,
        k: KeyValue,
        v: KeyValue,
        out: Query,
        lse: RowState,
        delta: RowState,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what these keys add to (dq, dk, dv).

        out, lse and delta = rowsum(dout·out) are those of the whole attention, over all keys:
        P = exp(S − lse), dV = Pᵀ·dout, dS = P·(dout·Vᵀ − delta), dQ = scale·dS·K, dK = scale·dSᵀ·Q.
        Source: arXiv 2205.14135, appendix B.
        """
        ...

    def supports(self, q: Query) -> str | None:
        """Return None, or why tensors of this dtype, device and head dim cannot be computed."""
        ...


@runtime_checkable
class ScoringBlock(Protocol):
    """A block that computes more of `ringlab.scores.Scores` than a scale; its names are those of `Scores.wishes`.

    `how` says where the tile's tokens stand and what becomes of its scores: weights are exp(capped − lse), those
    that are dropped count in lse but neither in out nor in dV, and dS has the slope of the cap as a factor.
    """

    offers: frozenset[str]

    def forward(
        self, q: Query, k: KeyValue, v: KeyValue, *, causal: bool, scale: float, how: TileScores | None
    ) -> Partial:
        """Return the partial of these keys, as `Block.forward` does."""
        ...

    def backward(
        self,
        dout: Query,
        q: Query,
        k: KeyValue,
        v: KeyValue,
        out: Query,
        lse: RowState,
        delta: RowState,
        *,
        causal: bool,
        scale: float,
        how: TileScores | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what these keys add to (dq, dk, dv), as `Block.backward` does; delta is that of the dropped out."""
        ...


@dataclass(frozen=True)
class Gradient:
    """What some rows add to the gradients of the `keys` of a block."""

    keys: slice
    dk: Tensor
    dv: Tensor


@runtime_checkable
class ForwardSteps(Protocol):
    """The forward of one rank's queries while blocks pass by; it carries a state of its own."""

    def take(self, tiles: tuple[Tile, ...], k: KeyValue, v: KeyValue, how: TileScores | None = None) -> None:
        """Attend to the next block, where `tiles` says that something of it is visible.

        `how` is that of all rows and all keys of the block; given to blocks that offer what it asks for.
        """
        ...

    def result(self) -> Partial:
        """Return the partial over all blocks, after the last of them."""
        ...


@runtime_checkable
class BackwardSteps(Protocol):
    """The backward of one rank's queries while blocks pass by."""

    def take(
        self, tiles: tuple[Tile, ...], k: KeyValue, v: KeyValue, how: TileScores | None = None
    ) -> list[Gradient]:
        """Return what these queries add to the gradients of the next block; `how` as in the forward."""
        ...

    def result(self) -> Tensor:
        """Return dq over all blocks, after the last of them."""
        ...


@runtime_checkable
class StepBlock(Block, Protocol):
    """A block that computes all tiles of a ring step at once, and knows the first step and the last."""

    def forward_steps(self, q: Query, count: int, *, scale: float) -> ForwardSteps:
        """Return the forward of `q` over `count` blocks, of which each will be given to `take` once."""
        ...

    def backward_steps(
        self, dout: Query, q: Query, lse: RowState, delta: RowState, count: int, *, scale: float
    ) -> BackwardSteps:
        """Return the backward over `count` blocks; lse and delta are those of the whole attention."""
        ...
