"""Wrong rings of what travels: patches of one function each, that the oracle must notice."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ringlab.comm.protocol import Work
from ringlab.layout import contiguous, zigzag
from ringlab.mask import Mask
from ringlab.merge import Partial
from ringlab.schedules import bidirectional, multi_ring, query_ring
from ringlab.schedules.call import Call
from ringlab.schedules.multi_ring import Lane
from ringlab.schedules.travel import Followers, Tensors
from tests.schedules.problems import Problem

right_merged, right_added, right_gradients = query_ring._merged, query_ring._added, query_ring._gradient_of
right_lanes, right_ways = multi_ring.MultiRingSchedule._lanes, bidirectional._both_ways


def merged_twice(part: Partial, arrived: Tensors | None) -> tuple[Tensor, Tensor]:
    once = right_merged(part, arrived)
    return right_merged(part, once) if arrived is not None else once


def without_what_arrived(part: Partial, arrived: Tensors | None) -> tuple[Tensor, Tensor]:
    return right_merged(part, None)


def without_its_lse(part: Partial, arrived: Tensors | None) -> tuple[Tensor, Tensor]:
    """The lse of the first stop stays: it is not sent on."""
    out, lse = right_merged(part, None if arrived is None else tuple(x.clone() for x in arrived))
    return out, lse if arrived is None else arrived[1]


def dq_of_one_step(dq: Tensor, arrived: Tensors | None) -> Tensor:
    return right_added(dq, None)


def delta_of_this_rank(call: Call, owner: int, rows: Tensors, *block: Any) -> Any:
    """Rows arrive with the delta of the rank before their owner, as if it had been left behind on the way."""
    q, dout, lse, delta = rows
    return right_gradients(call, owner, (q, dout, lse, delta.roll(1, dims=-2)), *block)


def lse_of_one_block(call: Call, owner: int, rows: Tensors, *block: Any) -> Any:
    q, dout, _, delta = rows
    steps = call.begin_forward(q, 1)
    steps.attend(call.tiles(call.ring.rank, owner), block[0], block[1])
    return right_gradients(call, owner, (q, dout, steps.partial().lse[..., None], delta), *block)


def home_to_the_next(self: Followers, tensors: Tensors, give: bool) -> Work:
    """What is complete goes to the rank after its owner."""
    ring, last = self.call.ring, self.stops[-1]
    into = tuple(x.new_empty(x.shape) for x in tensors)
    to, source = ring.origin(last - 1), ring.origin(1 - last)
    return ring.comm.hand_over(send=tensors, to=to, receive=into, source=source, tag="home")


def one_way_only(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return right_ways(call)[0], ()


def home_sums_of_one_way(self: bidirectional.BothWaysReturn) -> tuple[Tensor, Tensor]:
    if self.far:
        self.of_far.own_gradients()
    return self.of_near.own_gradients()


def heads_of_the_other_ring(self: multi_ring.MultiRingSchedule, call: Call) -> list[Lane]:
    """Halves of a block swapped: each ring's rows meet the other's K/V heads."""
    lanes = right_lanes(self, call)
    swapped = [lane.kv_heads for lane in reversed(lanes)]
    return [
        Lane(lane.call, lane.stride, lane.stops, lane.heads, kv)
        for lane, kv in zip(lanes, swapped, strict=True)
    ]


FOUR = Problem(zigzag(16, 4), 4, 2)
FAR = Problem(contiguous(16, 4), 4, 2, Mask(causal=False))
MUTANTS_OF_TRAVEL: dict[str, tuple[Any, str, Any, Any, Problem]] = {
    "a partial is merged twice": (query_ring, "_merged", merged_twice, "query-ring", FOUR),
    "a partial forgets earlier ranks": (query_ring, "_merged", without_what_arrived, "query-ring", FOUR),
    "lse is not sent on": (query_ring, "_merged", without_its_lse, "query-ring", FOUR),
    "dq forgets earlier ranks": (query_ring, "_added", dq_of_one_step, "burst", FOUR),
    "dq goes to the wrong owner": (Followers, "_send_home", home_to_the_next, "burst", FOUR),
    "delta is that of other rows": (query_ring, "_gradient_of", delta_of_this_rank, "burst", FOUR),
    "lse is that of one block": (query_ring, "_gradient_of", lse_of_one_block, "burst", FOUR),
    "blocks come from one side only": (bidirectional, "_both_ways", one_way_only, "bidirectional", FOUR),
    "sums of the far way are lost": (
        bidirectional.BothWaysReturn, "own_gradients", home_sums_of_one_way, "bidirectional", FAR,
    ),
    "half blocks are swapped": (
        multi_ring.MultiRingSchedule, "_lanes", heads_of_the_other_ring, "multi-ring(rings=2)", FOUR,
    ),
}  # fmt: skip
