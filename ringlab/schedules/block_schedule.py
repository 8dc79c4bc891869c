"""The forward and backward that are common to all schedules that bring K/V to the rows block by block.

The subclasses `RingSchedule`, `AllGatherSchedule`, `DoubleRingSchedule` and `BidirectionalSchedule` choose
the order of the blocks, and the route by which their gradients return.

`BlockBuffers` are receive buffers for travelling blocks; a buffer is reused once its block has been sent on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from jaxtyping import Shaped
from torch import Tensor

from ringlab.blocks import record_block
from ringlab.blocks.protocol import BackwardRows
from ringlab.comm.protocol import thread_safe, thread_safe_if
from ringlab.handles import Handled
from ringlab.merge import Partial, state_dtype, with_sinks
from ringlab.schedules.call import AttentionCall, attend_to_block, differentiate_block
from ringlab.schedules.protocol import ForwardResult, GradientReturn, Gradients
from ringlab.types import BlockTensor, Out, Query, RowState, Sinks

_THROUGH_LSE = frozenset({"a gradient of lse"})


class BlockSchedule(Handled, ABC):
    """A schedule under which queries stay and K/V blocks come to them, one after the other."""

    name: str
    takes_sinks = True

    @abstractmethod
    def arriving_blocks(
        self, call: AttentionCall, k: BlockTensor, v: BlockTensor
    ) -> Iterator[tuple[int, BlockTensor, BlockTensor]]:
        """Yield (origin, k, v) of each block as it arrives: this rank's own, then all visible ones."""

    @abstractmethod
    def gradient_return(self, call: AttentionCall) -> GradientReturn:
        """Return the `GradientReturn` that takes the gradients of one backward to the blocks' owners."""

    def block_count(self, call: AttentionCall) -> int:
        """Return how many blocks `arriving_blocks` yields."""
        return len(call.offsets)

    def check(self, heads: int, kv_heads: int, world_size: int) -> None:
        """Return None, because any number of heads fits any number of ranks."""

    def forward(self, call: AttentionCall, q: Query, k: BlockTensor, v: BlockTensor) -> ForwardResult:
        """Return attention of this rank's queries over all blocks."""
        steps = call.begin_forward(q, self.block_count(call))
        attend = thread_safe_if(call.block.thread_safe, attend_to_block)
        for step, (origin, block_k, block_v) in enumerate(self.arriving_blocks(call, k, v)):
            call.ring.compute(f"attend {step}", attend, call, steps, origin, block_k, block_v)
        return finished(call, steps.partial(), q, k, v)

    def backward(
        self, call: AttentionCall, saved: tuple[Shaped[Tensor, "..."], ...], dout: Out, dlse: RowState | None
    ) -> Gradients:
        """Return (dq, dk, dv) of this rank's shards, and its part of the gradient of the sinks.

        dk and dv are in the state dtype; dq is in the state dtype or in q's dtype. The gradient of the sinks
        is None without sinks.
        """
        q, k, v, out, lse, *_ = saved
        rows = rows_of_backward(call, q, out, lse, dout, dlse)
        steps = call.begin_backward(rows, self.block_count(call))
        returning = self.gradient_return(call)
        differentiate = thread_safe_if(call.block.thread_safe, differentiate_block)
        for step, (origin, block_k, block_v) in enumerate(self.arriving_blocks(call, k, v)):
            block = origin, block_k, block_v
            label = f"attend backward {step}"
            # The gradients have no name, which would keep them alive while the next block is computed.
            returning.add_block(*block, call.ring.compute(label, differentiate, call, steps, *block))
        dk, dv = returning.own_gradients()
        return Gradients(steps.query_gradient(), dk, dv, gradient_of_sinks(call, saved, rows.delta))


def finished(
    call: AttentionCall, partial: Partial, q: Query, k: BlockTensor, v: BlockTensor
) -> ForwardResult:
    """Return the result of rows whose partial covers all blocks, after adding the sinks once."""
    call.record_short_tiles()
    if call.sinks is not None:
        partial = call.ring.compute("sinks", thread_safe(with_sinks), partial, call.sinks)
    out, lse = partial.out.to(q.dtype), partial.lse
    saved = (q, k, v, out, lse)
    return ForwardResult(out, lse, saved if call.sinks is None else (*saved, call.sinks))


def gradient_of_sinks(
    call: AttentionCall, saved: tuple[Shaped[Tensor, "..."], ...], delta: RowState
) -> Sinks | None:
    """Return this rank's part of the gradient of the sinks, or None without sinks.

    saved: (q, k, v, out, lse), followed by the sinks if there are any.
    """
    lse, sinks = saved[4], saved[5:]
    return call.ring.compute("dsinks", sink_gradient, sinks[0], lse, delta) if sinks else None


def rows_of_backward(
    call: AttentionCall, q: Query, out: Out, lse: RowState, dout: Out, dlse: RowState | None
) -> BackwardRows:
    """Return this rank's rows with everything that backward needs.

    If lse has a gradient, some block backends are replaced by another one. Record the replacement in the trace.
    """
    delta = call.ring.compute("delta", row_delta, dout, out, dlse)
    if dlse is not None:
        record_block(call.ring.comm, call.block.name, call.block, _THROUGH_LSE)
    return BackwardRows(dout, q, out, lse, delta, through_lse=dlse is not None)


@thread_safe
def row_delta(dout: Out, out: Out, dlse: RowState | None = None) -> RowState:
    """Return delta = rowsum(dout·out) − dlse, in the state dtype."""
    dtype = state_dtype(out.dtype)
    delta = (dout.to(dtype) * out.to(dtype)).sum(dim=-1)
    return delta if dlse is None else delta - dlse.to(dtype)


@thread_safe
def sink_gradient(sinks: Sinks, lse: RowState, delta: RowState) -> Sinks:
    """Return −Σ e^(sink − lse)·delta for each head, summed over batch and rows; lse includes the sink."""
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    weights = weights.masked_fill(lse == -math.inf, 0.0)  # rows that see no key and have a sink of −inf
    return -(weights * delta).sum(dim=(0, 2)).to(sinks.dtype)


class BlockBuffers:
    """Receive buffers, each large enough for the longest block of the layout."""

    def __init__(self, call: AttentionCall) -> None:
        self.lengths, self.longest = call.layout.lengths, call.layout.longest
        self.free: list[tuple[int, tuple[Tensor, ...]]] = []

    def reserve(self, origin: int, *like: Shaped[Tensor, "B _ _ _"]) -> tuple[Tensor, ...]:
        """Return buffers for the block of `origin`, with the batch, heads and head dim of `like`."""
        length = self.lengths[origin]
        if self.free and self.free[-1][0] == length:
            return self.free.pop()[1]  # the usual case, because most blocks have the same length
        shapes = [(*t.shape[:2], length, t.shape[-1]) for t in like]
        if not self.free and length == self.longest:
            return tuple(t.new_empty(shape) for t, shape in zip(like, shapes, strict=True))
        storages = self._large_enough(shapes, like)
        return tuple(
            t.new_empty(0).set_(storage, 0, shape)  # type: ignore[call-overload]
            for t, storage, shape in zip(like, storages, shapes, strict=True)
        )

    def _large_enough(
        self, shapes: list[tuple[int, ...]], like: tuple[Tensor, ...]
    ) -> list[torch.UntypedStorage]:
        """Return storages for these shapes, from free buffers or newly allocated for the longest block."""
        sizes = [math.prod(shape) * t.element_size() for shape, t in zip(shapes, like, strict=True)]
        for number, (_, tensors) in enumerate(self.free):
            storages = [tensor.untyped_storage() for tensor in tensors]
            if all(storage.nbytes() >= size for storage, size in zip(storages, sizes, strict=True)):
                del self.free[number]
                return storages
        whole = [(*t.shape[:2], self.longest, t.shape[-1]) for t in like]
        return [t.new_empty(shape).untyped_storage() for t, shape in zip(like, whole, strict=True)]

    def recycle(self, origin: int, tensors: tuple[Shaped[Tensor, "B _ _ _"], ...]) -> None:
        """Take back the buffers of the block of `origin`, which has been sent on, for later blocks."""
        self.free.append((self.lengths[origin], tensors))
