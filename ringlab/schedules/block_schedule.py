"""Schedules that bring K/V to the rows block by block: one forward and one backward for all of them.

Subclasses choose the order of the blocks and the way of their gradients: `RingSchedule`, `AllGatherSchedule` and
`DoubleRingSchedule`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from jaxtyping import Shaped
from torch import Tensor

from ringlab.blocks.protocol import BackwardRows
from ringlab.comm.protocol import side_by_side
from ringlab.merge import state_dtype
from ringlab.schedules.call import Call, attend_to_block, differentiate_block
from ringlab.schedules.protocol import ForwardResult, GradientReturn
from ringlab.types import KeyValue, Query, RowState


class BlockSchedule(ABC):
    """A schedule under which queries stay and K/V blocks come to them, one after the other."""

    name: str

    @abstractmethod
    def arriving_blocks(
        self, call: Call, k: KeyValue, v: KeyValue
    ) -> Iterator[tuple[int, KeyValue, KeyValue]]:
        """Yield (origin, k, v) of each block as it arrives: this rank's own first, then all that its rows may see."""

    @abstractmethod
    def gradient_return(self, call: Call) -> GradientReturn:
        """Return what brings the gradients of one backward back to the blocks' owners."""

    def block_count(self, call: Call) -> int:
        """Return how many blocks `arriving_blocks` yields."""
        return call.block_count

    def check(self, heads: int, kv_heads: int, world_size: int) -> None:  # noqa: B027 (most accept all)
        """Return: any number of heads, on any number of ranks."""

    def forward(self, call: Call, q: Query, k: KeyValue, v: KeyValue) -> ForwardResult:
        """Return attention of this rank's queries over all blocks."""
        steps = call.begin_forward(q, self.block_count(call))
        for step, (origin, block_k, block_v) in enumerate(self.arriving_blocks(call, k, v)):
            call.run(f"attend {step}", attend_to_block, steps, origin, block_k, block_v)
        partial = steps.partial()
        out, lse = partial.out.to(q.dtype), partial.lse
        return ForwardResult(out, lse, (q, k, v, out, lse))

    def backward(
        self, call: Call, saved: tuple[Shaped[Tensor, "..."], ...], dout: Query
    ) -> tuple[Query, KeyValue, KeyValue]:
        """Return (dq, dk, dv) of this rank's shards: dk and dv in the state dtype, dq in that or in q's own."""
        q, k, v, out, lse = saved
        delta = call.ring.compute("delta", row_delta, dout, out)
        steps = call.begin_backward(BackwardRows(dout, q, out, lse, delta), self.block_count(call))
        returning = self.gradient_return(call)
        for step, (origin, block_k, block_v) in enumerate(self.arriving_blocks(call, k, v)):
            # The gradients get no name: it would keep them alive while the next block is computed.
            returning.add_block(
                origin,
                block_k,
                block_v,
                call.run(f"attend backward {step}", differentiate_block, steps, origin, block_k, block_v),
            )
        dk, dv = returning.own_gradients()
        return steps.query_gradient(), dk, dv


@side_by_side
def row_delta(dout: Query, out: Query) -> RowState:
    """Return delta = rowsum(dout·out), in the state dtype."""
    dtype = state_dtype(out.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(dim=-1)
