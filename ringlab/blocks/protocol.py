"""What a block backend offers: attention of one query block on one K/V block."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ringlab.merge import Partial
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
