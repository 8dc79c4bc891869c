"""The plain ring over torch.distributed: an example of a target that does not use ringlab's Comm.

`ringlab check ringlab.conformance.plain_distributed:attend` runs it in gloo processes. Under torchrun the
same command runs it on torchrun's ranks. The layout is contiguous or zig-zag; the function gets
it as the argument `positions`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from ringlab import plain_ring
from ringlab.conformance.target.claims import Target


class Neighbours:
    """The part of a ring that `plain_ring` needs, by batches of isend and irecv on a process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def origin(self, step: int) -> int:
        """Return the rank whose block is on this rank after `step` hops."""
        return (self.rank - step) % self.world_size

    def post(self, *tensors: Float[Tensor, "B K _ D"], length: int, tag: str) -> Transfer:
        """Start sending to the next rank and receiving from the previous one; return without waiting."""
        neighbours = ((self.rank + way) % self.world_size for way in (1, -1))
        if self.group is not None:  # torch addresses the peers of a message by their ranks in the world
            neighbours = (dist.get_global_rank(self.group, rank) for rank in neighbours)
        after, before = neighbours
        sends = [x.contiguous() for x in tensors]
        buffers = tuple(x.new_empty((*x.shape[:2], length, x.shape[3])) for x in tensors)
        operations = [dist.P2POp(dist.isend, x, after, self.group) for x in sends if x.numel()]
        operations += [dist.P2POp(dist.irecv, x, before, self.group) for x in buffers if x.numel()]
        return Transfer(dist.batch_isend_irecv(operations) if operations else [], sends, buffers)


class Transfer:
    """Messages in flight; the sent tensors are kept alive until they have arrived."""

    def __init__(self, works: list[dist.Work], sends: list[Tensor], buffers: tuple[Tensor, ...]) -> None:
        self.works, self.sends, self.buffers = works, sends, buffers

    def wait(self) -> tuple[Tensor, ...]:
        """Return the receive buffers once they are filled."""
        for work in self.works:
            work.wait()
        return self.buffers


def ring(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B K L D"],
    v: Float[Tensor, "B K L D"],
    *,
    causal: bool,
    positions: list[Int[Tensor, " _"]],
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"]]:
    """Return this rank's (out, lse) on `group`, by default on all ranks. Raises: ValueError."""
    neighbours = Neighbours(group)
    needed = len(positions[neighbours.rank])
    # otherwise gloo would fill a part of a longer buffer, or end the process
    if {q.shape[2], k.shape[2]} != {needed}:
        raise ValueError(f"rank {neighbours.rank} owns {needed} tokens, got {q.shape[2]} and {k.shape[2]}")
    return plain_ring.attend(neighbours, q, k, v, causal=causal, positions=positions, scale=scale)  # type: ignore[arg-type]


def head_tail(S: int, P: int) -> list[Tensor]:
    """Return zig-zag positions, written independently: rank r holds pieces r and 2P − 1 − r of 2P."""
    pieces = torch.arange(S).tensor_split(2 * P)
    return [torch.cat([pieces[rank], pieces[2 * P - 1 - rank]]) for rank in range(P)]


attend = Target(
    ring,
    name="plain ring over torch.distributed",
    over="torch.distributed",
    layouts={"contiguous": "contiguous", "head-tail": head_tail},
)
