"""Schedules that bring K/V block by block to the rows, which stay: forward and backward, the same for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from ringlab.comm.protocol import side_by_side
from ringlab.merge import state_dtype
from ringlab.schedules.call import Call, Saved, attend, attend_backward
from ringlab.schedules.protocol import Attended, Homecoming


class OverBlocks(ABC):
    """What is left to say: in which order the blocks come, and how their gradients go home."""

    name: str

    @abstractmethod
    def blocks(self, call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (origin, k, v), this rank's own block first, then those of other ranks that its rows may see."""

    @abstractmethod
    def homecoming(self, call: Call) -> Homecoming:
        """Return the collector of gradients for one backward."""

    def count(self, call: Call) -> int:
        """Return how many blocks come."""
        return call.blocks

    def check(self, heads: int, kv_heads: int, world_size: int) -> None:  # noqa: B027 (most take all)
        """Return: any heads, on any number of ranks."""

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """Return attention of this rank's queries over all blocks."""
        steps = call.forward_steps(q, self.count(call))
        for step, (origin, block_k, block_v) in enumerate(self.blocks(call, k, v)):
            call.compute(f"attend {step}", attend, steps, origin, block_k, block_v)
        partial = steps.result()
        out, lse = partial.out.to(q.dtype), partial.lse
        return Attended(out, lse, (q, k, v, out, lse))

    def backward(self, call: Call, kept: tuple[Tensor, ...], dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of this rank's shards: dk and dv in the state dtype, dq in that or in q's own."""
        q, k, v, out, lse = kept
        delta = call.ring.compute("delta", _delta, dout, out)
        saved = Saved(q, out, lse, dout, delta)
        steps, homecoming = call.backward_steps(saved, self.count(call)), self.homecoming(call)
        for step, (origin, block_k, block_v) in enumerate(self.blocks(call, k, v)):
            # No name for the gradients: it would keep them while the next block is computed.
            homecoming.add(
                origin,
                block_k,
                block_v,
                call.compute(f"attend backward {step}", attend_backward, steps, origin, block_k, block_v),
            )
        dk, dv = homecoming.finish()
        return steps.result(), dk, dv


@side_by_side
def _delta(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout·out), in the state dtype."""
    dtype = state_dtype(out.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(dim=-1)
