"""The interface of a block backend: attention of some query rows over one K/V block, forward and backward.

A schedule delivers the K/V blocks. For each of them, `AttentionCall` passes the tiles to a `Block`. A backend
that can compute all tiles of a K/V block in one launch is a `StepBlock`, and keeps its state between blocks
in a `ForwardSteps` or `BackwardSteps`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ringlab.errors import ShapeError
from ringlab.merge import Partial
from ringlab.scores import PLAIN_RULES, TileRules
from ringlab.tile import Tile
from ringlab.types import KeyValue, Out, Query, RowState, Value


@dataclass(frozen=True)
class BackwardRows:
    """Some query rows, with all tensors that the backward needs for them.

    out and lse are results of the forward over all keys, not over one block, and include the sinks if there
    are any. delta is rowsum(dout·out) minus the gradient of lse, if lse has one. through_lse: whether lse has
    a gradient, so that delta cannot be computed from dout and out.
    out is None for rows that travel without out. Then through_lse is true, and a backend must use the given
    delta.
    """

    dout: Out
    q: Query
    out: Out | None
    lse: RowState
    delta: RowState
    through_lse: bool = False

    def part(self, rows: slice) -> BackwardRows:
        """Return the rows in the slice `rows`, as views of these tensors."""
        start, length = rows.start, rows.stop - rows.start
        return replace(
            self,
            dout=self.dout.narrow(-2, start, length),
            q=self.q.narrow(-2, start, length),
            out=None if self.out is None else self.out.narrow(-2, start, length),
            lse=self.lse.narrow(-1, start, length),
            delta=self.delta.narrow(-1, start, length),
        )

    def of_heads(self, heads: slice) -> BackwardRows:
        """Return all rows of some heads, as views of these tensors."""
        out = None if self.out is None else self.out[:, heads]
        return replace(
            self, dout=self.dout[:, heads], q=self.q[:, heads], out=out, lse=self.lse[:, heads], delta=self.delta[:, heads]
        )  # fmt: skip

    def reversed(self) -> BackwardRows:
        """Return the rows in reverse order."""
        out = None if self.out is None else self.out.flip(-2)
        return replace(
            self, dout=self.dout.flip(-2), q=self.q.flip(-2), out=out, lse=self.lse.flip(-1), delta=self.delta.flip(-1)
        )  # fmt: skip


@runtime_checkable
class Block(Protocol):
    """One way to compute a tile. Backends keep no state between tiles.

    The head dim of v may differ from that of q and k; out has the head dim of v. Query head h reads key/value
    head h // (H // K). With `causal`, row i sees keys 0 … i (aligned top-left), and there are no more keys than
    rows.
    """

    name: str
    largest_causal: int | None
    """The rows of the largest causal tile to compute at once. Larger ones are cut. None means no limit."""
    thread_safe: bool
    """Whether several threads may compute with this backend at once."""
    supported_rules: frozenset[str]
    """The score rules that the block supports, among "softcap" and "dropout". It gets no other rules."""

    def supports(self, q: Query) -> str | None:
        """Return None, or the reason why tensors of this dtype, device and head dim are not supported."""
        ...

    def forward(
        self,
        q: Query,
        k: KeyValue,
        v: Value,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> Partial:
        """Return the partial of softmax(scale·q·kᵀ)·v over these keys; by default `Native.forward`.

        Scores are first capped by `rules`. Dropped weights count in lse but not in out.
        """
        ...

    def backward(
        self,
        rows: BackwardRows,
        k: KeyValue,
        v: Value,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> tuple[Query, KeyValue, Value]:
        """Return the contribution of these rows and keys to (dq, dk, dv); by default `Native.backward`.

        P = exp(S − lse), dV = Pᵀ·dout, dS = P·(dout·Vᵀ − delta), dQ = scale·dS·K, dK = scale·dSᵀ·Q.
        Under `rules`, S is the capped score, dS has the slope of the cap as a factor, and dropped weights do not
        count in dV.
        Source: arXiv 2205.14135, appendix B.
        """
        ...


@dataclass(frozen=True)
class Gradient:
    """The contribution of some rows to the gradients of the `keys` of a block."""

    keys: slice
    dk: Tensor
    dv: Tensor


@runtime_checkable
class ForwardSteps(Protocol):
    """The forward of one rank's queries, one K/V block at a time: `TilewiseForward` or `TritonForward`."""

    def attend(self, tiles: tuple[Tile, ...], k: KeyValue, v: Value, rules: TileRules = PLAIN_RULES) -> None:
        """Attend to the next block.

        tiles: its visible parts. rules: the rules of all rows and all its keys.
        """
        ...

    def partial(self) -> Partial:
        """Return the partial over all blocks, after the last one."""
        ...


@runtime_checkable
class BackwardSteps(Protocol):
    """The backward of one rank's queries, one K/V block at a time: `TilewiseBackward` or `TritonBackward`."""

    def differentiate(
        self, tiles: tuple[Tile, ...], k: KeyValue, v: Value, rules: TileRules = PLAIN_RULES
    ) -> list[Gradient]:
        """Return the contribution of these queries to the gradients of the next block.

        tiles, k, v, rules: as in the forward.
        """
        ...

    def query_gradient(self) -> Query:
        """Return dq over all blocks, after the last one."""
        ...


@runtime_checkable
class StepBlock(Block, Protocol):
    """A block backend that computes all tiles of a K/V block at once. It must know the number of blocks in advance.

    `TritonBlock`, `Flex` and `FlashAttention` are StepBlocks. `Naive`, `Blockwise`, `Native` and `Cudnn` are not.
    """

    def begin_forward(self, q: Query, count: int, *, scale: float) -> ForwardSteps:
        """Return the forward of `q`, ready for the first of `count` blocks."""
        ...

    def begin_backward(self, rows: BackwardRows, count: int, *, scale: float) -> BackwardSteps:
        """Return the backward of `rows`, ready for the first of `count` blocks."""
        ...

    def forward(
        self,
        q: Query,
        k: KeyValue,
        v: Value,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> Partial:
        """Return the partial of these keys. Raises: ShapeError for a causal tile with more keys than rows."""
        steps = self.begin_forward(q, 1, scale=scale)
        steps.attend(_one_tile(q, k, causal), k, v, rules)
        return steps.partial()

    def backward(
        self,
        rows: BackwardRows,
        k: KeyValue,
        v: Value,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> tuple[Query, KeyValue, Value]:
        """Return the contribution of these rows and keys to (dq, dk, dv).

        Raises: ShapeError for a causal tile with more keys than rows.
        """
        steps = self.begin_backward(rows, 1, scale=scale)
        gradients = steps.differentiate(_one_tile(rows.q, k, causal), k, v, rules)
        if not gradients:  # no rows, or no keys
            return steps.query_gradient(), torch.zeros_like(k), torch.zeros_like(v)
        return steps.query_gradient(), gradients[0].dk, gradients[0].dv


def _one_tile(q: Tensor, k: Tensor, causal: bool) -> tuple[Tile, ...]:
    """Return the tiles of a step that make up one tile of a block backend.

    A causal tile may have more rows than keys. It is cut into a square causal tile and a full one.

    Raises: ShapeError for a causal tile with more keys than rows.
    """
    rows, keys = q.shape[-2], k.shape[-2]
    if not (rows and keys):
        return ()
    if not causal:
        return (Tile(0, rows, 0, keys, False),)
    if keys > rows:
        remedy = f"cut k and v to the {rows} keys that some row sees, or pass causal=False"
        raise ShapeError("a causal tile with no more keys than rows", f"{rows} rows, {keys} keys", remedy)
    square = Tile(0, keys, 0, keys, True)
    return (square, Tile(keys, rows, 0, keys, False)) if rows > keys else (square,)
