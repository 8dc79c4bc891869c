"""Rings in which queries travel and K/V stay, in forward, backward or both.

In forward, q makes P − 1 hops. Its partial (out, lse) follows one step behind, is merged at every stop, and
returns to its owner with the P-th hop. In backward, q, dout, lse and delta make P − 1 hops, and the sum dq
follows them and returns to its owner; dk and dv stay. Queries travel against the ring's direction, so that
rows meet blocks in the ring's order: their own block, then the previous rank's. If a mask hides all keys at
some distance, queries skip those ranks.

"burst" lets K/V travel in forward and queries in backward, which sends the fewest bytes if H = K. With
grouped heads, it takes fewer bytes to send K/V in both passes (`ringlab.cost.traffic`). out does not travel,
because delta replaces it. "native", "cudnn" and "flash" need out in backward, so "blockwise" replaces them
there.
Source: arXiv 2509.19836, section 3.1.
"""

from __future__ import annotations

from jaxtyping import Shaped
from torch import Tensor

from ringlab.blocks import record_block
from ringlab.blocks.protocol import BackwardRows
from ringlab.blocks.tilewise import RunningSum, add_gradients
from ringlab.comm.protocol import thread_safe, thread_safe_if
from ringlab.merge import Partial, merge_into, state_dtype
from ringlab.schedules.block_schedule import finished, gradient_of_sinks, row_delta
from ringlab.schedules.call import AttentionCall, attend_to_block, differentiate_block
from ringlab.schedules.protocol import ForwardResult, Gradients
from ringlab.schedules.ring import RingSchedule
from ringlab.schedules.route import Couriers, circulate
from ringlab.types import BlockTensor, Out, Query, RowState

_WITHOUT_OUT = frozenset({"queries that travel"})


class QueryRingSchedule(RingSchedule):
    """Queries travel in forward and in backward. Their partials and their gradients follow them."""

    name = "query-ring"
    forward_by_queries = True

    def forward(self, call: AttentionCall, q: Query, k: BlockTensor, v: BlockTensor) -> ForwardResult:
        """Return attention of this rank's queries, which have visited the blocks of all ranks."""
        if not self.forward_by_queries or len(call.offsets) == 1:
            return super().forward(call, q, k, v)
        offsets = _against_the_ring(call)
        partials = Couriers(call, offsets, "partial")
        attend = thread_safe_if(call.block.thread_safe, _partial_of)
        for step, (owner, (rows,)) in enumerate(circulate(call, offsets, q, tag="q")):
            part = call.ring.compute(f"attend {step}", attend, call, owner, rows, k, v)
            merged = call.ring.compute(f"merge {step}", _merged, part, partials.arrived())
            partials.send_on(*merged)
            del part, merged  # these names would keep the tensors alive while the next rows are computed
        out, lse = partials.own()
        return finished(call, Partial(out, lse[..., 0]), q, k, v)

    def backward(
        self, call: AttentionCall, saved: tuple[Shaped[Tensor, "..."], ...], dout: Out, dlse: RowState | None
    ) -> Gradients:
        """Return (dq, dk, dv) of this rank's shards, in the state dtype."""
        if len(call.offsets) == 1:
            return super().backward(call, saved, dout, dlse)
        q, k, v, out, lse, *_ = saved
        record_block(call.ring.comm, call.block.name, call.block, _WITHOUT_OUT)
        delta = call.ring.compute("delta", row_delta, dout, out, dlse)
        del out
        offsets = _against_the_ring(call)
        sums = RunningSum(k), RunningSum(v)
        dqs = Couriers(call, offsets, "dq")
        own = q, dout, lse[..., None], delta[..., None]
        differentiate = thread_safe_if(call.block.thread_safe, _gradient_of)
        for step, (owner, rows) in enumerate(circulate(call, offsets, *own, tag="rows")):
            dq = call.ring.compute(f"attend backward {step}", differentiate, call, owner, rows, k, v, sums)
            dqs.send_on(call.ring.compute(f"add dq {step}", _added, dq, dqs.arrived()))
            del dq
        dk, dv = (total.value() for total in sums)
        return Gradients(dqs.own()[0], dk, dv, gradient_of_sinks(call, saved, delta))


class BurstSchedule(QueryRingSchedule):
    """K/V travel in forward; in backward, queries travel with dout, lse, delta and dq."""

    name = "burst"
    forward_by_queries = False


def _against_the_ring(call: AttentionCall) -> tuple[int, ...]:
    """Return the offsets of the queries' stops. A stop at distance d is d ranks behind, so d is negated."""
    return tuple(-distance % call.ring.world_size for distance in call.offsets)


def _partial_of(call: AttentionCall, owner: int, q: Query, k: BlockTensor, v: BlockTensor) -> Partial:
    """Return the partial of the rows of `owner` over this rank's own block."""
    steps = call.begin_forward(q, 1)
    attend_to_block(call, steps, call.ring.rank, k, v, owner)
    return steps.partial()


def _gradient_of(
    call: AttentionCall,
    owner: int,
    rows: tuple[Tensor, ...],
    k: BlockTensor,
    v: BlockTensor,
    sums: tuple[RunningSum, RunningSum],
) -> Query:
    """Return dq of the rows of `owner` over this rank's block, and add their dk and dv to `sums`."""
    q, dout, lse, delta = rows
    steps = call.begin_backward(BackwardRows(dout, q, None, lse[..., 0], delta[..., 0], through_lse=True), 1)
    add_gradients(sums, differentiate_block(call, steps, call.ring.rank, k, v, owner))
    return steps.query_gradient()


@thread_safe
def _merged(part: Partial, arrived: tuple[Tensor, ...] | None) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of rows over the keys so far, in the state dtype; the last axis of lse has size 1."""
    if arrived is None:
        # A block backend may return tensors that are not contiguous. Copy them, because the receive buffers
        # would have the same strides, and some bits of the results depend on strides.
        return part.out.to(state_dtype(part.out.dtype)).contiguous(), part.lse[..., None].contiguous()
    out, lse = arrived
    merge_into(Partial(out, lse[..., 0]), slice(0, out.shape[-2]), part)
    return out, lse


@thread_safe
def _added(dq: Query, arrived: tuple[Tensor, ...] | None) -> Query:
    """Return dq of rows over the keys so far, in the state dtype."""
    if arrived is None:
        return dq.to(state_dtype(dq.dtype)).contiguous()
    return arrived[0].add_(dq)
