"""Several rings at once: the K/V heads are distributed among rings with different strides.

A ring of stride s sends from rank r to r + s. It visits all P ranks if s and P have no common divisor. Rings
of different strides share no link between two ranks. If each pair of ranks has its own link, m rings
therefore take 1/m of one ring's time. If all sends of a rank share one port, as behind a switch, m rings
take as long as one. They send as many bytes as one ring, in m times as many messages. A rank has P − 1
links. Rings can use one for each number below P that has no common divisor with P: all links if P is prime,
and 4 of 7 if P = 8. (TASP's Hamiltonian cycles use all links for every P but 4 and 6. TASP cuts blocks by
tokens, while here each ring has whole heads, so that all rings keep the layout's balance.)
Source: arXiv 2509.26541, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Shaped
from torch import Tensor

from ringlab.comm.protocol import thread_safe, thread_safe_if
from ringlab.comm.ring import Ring
from ringlab.comm.strides import strides
from ringlab.comm.way import OnWay
from ringlab.errors import ShapeError, WorldSizeError
from ringlab.handles import Handled
from ringlab.merge import with_sinks
from ringlab.schedules.block_schedule import gradient_of_sinks, rows_of_backward
from ringlab.schedules.call import AttentionCall, attend_to_block, differentiate_block
from ringlab.schedules.protocol import ForwardResult, Gradients
from ringlab.schedules.ring import RingGradientReturn
from ringlab.schedules.route import circulate
from ringlab.types import KeyValue, Out, Query, RowState, Value


@dataclass(frozen=True)
class Lane:
    """One of the rings: its stride, the offsets at which its blocks are seen, and its heads."""

    call: AttentionCall
    stride: int
    offsets: tuple[int, ...]
    heads: slice
    kv_heads: slice

    def circulate(self, k: KeyValue, v: Value) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield (origin, (k, v)) of the blocks of this ring as they arrive."""
        own = k[:, self.kv_heads], v[:, self.kv_heads]
        return circulate(self.call, self.offsets, *own, tag=f"kv {self.stride}:")


@dataclass(frozen=True)
class MultiRingSchedule(Handled):
    """Attention over `rings` rings, by default over as many as K/V heads and ranks allow.

    Raises: WorldSizeError for a number of rings that is not an integer ≥ 1.
    """

    rings: int | None = None
    takes_sinks = True

    def __post_init__(self) -> None:
        if self.rings is not None and (not isinstance(self.rings, int) or self.rings < 1):
            raise WorldSizeError("rings= a number ≥ 1 of rings", repr(self.rings))

    @property
    def name(self) -> str:
        """Return the name with the number of rings if that was given."""
        return "multi-ring" if self.rings is None else f"multi-ring(rings={self.rings})"

    def check(self, heads: int, kv_heads: int, world_size: int) -> None:
        """Check that there are heads and strides for all rings. Raises: ShapeError, WorldSizeError."""
        rings, most = self.rings or 1, len(strides(world_size))
        if rings > most:
            raise WorldSizeError(
                f"at most {most} rings through {world_size} ranks for schedule '{self.name}'",
                f"{rings}",
                f"rings={most}, or 'multi-ring', which uses as many rings as possible",
            )
        if rings > kv_heads:
            raise ShapeError(
                f"a key/value head for each ring of schedule '{self.name}'",
                f"K={kv_heads} key/value heads",
                f"rings={kv_heads}, or 'multi-ring', which uses as many rings as possible",
            )

    def forward(self, call: AttentionCall, q: Query, k: KeyValue, v: Value) -> ForwardResult:
        """Return attention of this rank's queries. Each head attends to the blocks of its own ring."""
        call.record_short_tiles()
        lanes = self._lanes(call)
        steps = [lane.call.begin_forward(q[:, lane.heads], len(lane.offsets)) for lane in lanes]
        attend = thread_safe_if(call.block.thread_safe, attend_to_block)
        for number, blocks in enumerate(zip(*(lane.circulate(k, v) for lane in lanes), strict=True)):
            for lane, forward, (origin, (block_k, block_v)) in zip(lanes, steps, blocks, strict=True):
                label = f"attend {number}, stride {lane.stride}"
                call.ring.compute(label, attend, lane.call, forward, origin, block_k, block_v)
        parts = [forward.partial() for forward in steps]
        if call.sinks is not None:
            parts = [
                call.ring.compute("sinks", thread_safe(with_sinks), part, call.sinks[lane.heads])
                for lane, part in zip(lanes, parts, strict=True)
            ]
        out = torch.cat([part.out.to(q.dtype) for part in parts], dim=1)
        lse = torch.cat([part.lse for part in parts], dim=1)
        saved = (q, k, v, out, lse)
        return ForwardResult(out, lse, saved if call.sinks is None else (*saved, call.sinks))

    def backward(
        self, call: AttentionCall, saved: tuple[Shaped[Tensor, "..."], ...], dout: Out, dlse: RowState | None
    ) -> Gradients:
        """Return (dq, dk, dv) of this rank's shards. Each ring takes the sums of its heads to the owners."""
        q, k, v, out, lse, *_ = saved
        lanes = self._lanes(call)
        rows = rows_of_backward(call, q, out, lse, dout, dlse)
        steps = [lane.call.begin_backward(rows.of_heads(lane.heads), len(lane.offsets)) for lane in lanes]
        returns = [RingGradientReturn(lane.call, lane.offsets) for lane in lanes]
        differentiate = thread_safe_if(call.block.thread_safe, differentiate_block)
        for number, blocks in enumerate(zip(*(lane.circulate(k, v) for lane in lanes), strict=True)):
            for lane, backward, returning, (origin, (block_k, block_v)) in zip(
                lanes, steps, returns, blocks, strict=True
            ):
                label = f"attend backward {number}, stride {lane.stride}"
                block = origin, block_k, block_v
                returning.add_block(
                    *block, call.ring.compute(label, differentiate, lane.call, backward, *block)
                )
        own = zip(*(returning.own_gradients() for returning in returns), strict=True)
        dk, dv = (torch.cat(parts, dim=1) for parts in own)
        dq = torch.cat([backward.query_gradient() for backward in steps], dim=1)
        return Gradients(dq, dk, dv, gradient_of_sinks(call, saved, rows.delta))

    def _lanes(self, call: AttentionCall) -> list[Lane]:
        """Return the rings, with the K/V heads distributed as evenly as possible."""
        (H, K), P = call.heads, call.ring.world_size
        rings = self.rings or min(K, len(strides(P)))
        bounds = [K * number // rings for number in range(rings + 1)]
        lanes: list[Lane] = []
        for stride, first, last in zip(strides(P), bounds, bounds[1:], strict=False):
            offsets = tuple(d for step in range(P) if (d := stride * step % P) in call.offsets)
            rules = replace(call.rules, first_head=call.rules.first_head + first * H // K)
            heads = slice(first * H // K, last * H // K)
            # the first ring uses the common way, and each other ring a way of its own
            ring = Ring(OnWay(call.ring.comm, f"stride {stride}")) if lanes else call.ring
            lane = replace(call, ring=ring, rules=rules)
            lanes.append(Lane(lane, stride, offsets, heads, slice(first, last)))
        return lanes
