"""`GroupedContext`: a model's attention in which each sequence goes around its own group of ranks.

All ranks compute their sequences in the order of the assignment. The first unfinished sequence is therefore
the next one on all its ranks, so ranks never wait for each other in a circle, in forward or backward.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.attention import ring_attention
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.cost.sequence_time import shares
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import ring_traffic
from ringlab.nn.context import Context
from ringlab.packing.assignment import Assignment, Placement
from ringlab.types import Sinks


@dataclass(frozen=True, eq=False)
class GroupedContext(Context):
    """The context of a micro-batch of an assignment: its layout and mask, with rings inside its groups of ranks.

    Make one by `of`. A model takes it like any `Context`. Only `attend` differs.

    >>> from ringlab import VirtualCluster
    >>> assignment = Assignment((2, 6), 2, 8, ((Placement(1, 6, 0, 2), Placement(0, 2, 0, 1)),))
    >>> VirtualCluster(2).run(lambda ring: GroupedContext.of(ring, assignment, 0).positions.tolist()).results
    [[0, 1, 0, 1], [2, 3, 4, 5]]
    """

    placements: tuple[Placement, ...] = ()

    @classmethod
    def of(cls, ring: Ring, assignment: Assignment, micro_batch: int, **options: Any) -> GroupedContext:
        """Return the context of a micro-batch after all ranks have compared their contexts.

        options: window=, or schedule=, block= and validate= as in `Context`.
        Raises: WorldSizeError for an assignment to another number of ranks; AgreementError if ranks have
        different assignments.
        """
        packing, layout = assignment.packing(micro_batch), assignment.layout(micro_batch)
        ids = packing.shard(layout, ring.rank)["position_ids"] if layout.P == ring.world_size else None
        return cls.agreed(  # type: ignore[return-value]
            ring,
            layout,
            mask=packing.mask(window=options.pop("window", None)),
            position_ids=None if ids is None else torch.from_numpy(ids[0]),
            placements=assignment.micro_batches[micro_batch],
            **options,
        )

    @property
    def _compared(self) -> tuple[object, ...]:
        digest = hashlib.sha256(repr(self.placements).encode()).hexdigest()[:12]
        return *super()._compared, f"placements #{digest}"

    def attend(
        self,
        q: Float[Tensor, "B H L D"],
        k: Float[Tensor, "B K L D"],
        v: Float[Tensor, "B K L Dv"],
        sinks: Sinks | None = None,
    ) -> Float[Tensor, "B H L Dv"]:
        """Return this rank's rows of attention, computed for each sequence within the sequence's group.

        Raises: as `ring_attention`.
        """
        rank = self.ring.rank
        mine = [each for each in self.placements if rank in each.ranks]
        lengths = [int(shares(each.length, each.degree)[rank - each.first]) for each in mine]
        parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        outs = [self._attend_to(each, sinks, *part) for each, part in zip(mine, parts, strict=True)]
        none = q[..., :1].expand(*q.shape[:-1], v.shape[-1])  # empty, because q then has no tokens
        return torch.cat(outs, dim=2) if outs else none

    def _attend_to(self, each: Placement, sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None if self.mask is None else replace(self.mask, documents=())
        out: Tensor = ring_attention(
            q, k, v, ring=Ring(SubGroup(self.ring.comm, each.ranks)), layout=each.layout, mask=mask,
            schedule=self.schedule, block=self.block, validate=self.validate, sinks=sinks,
        )  # fmt: skip
        return out


def sent_bytes(
    assignment: Assignment, micro_batch: int, rank: int, sizes: Attention, *, backward: bool = False
) -> int:
    """Return the bytes that a rank sends around the rings of its sequences, in one layer of a micro-batch.

    >>> assignment = Assignment((2, 6), 2, 8, ((Placement(1, 6, 0, 2), Placement(0, 2, 0, 1)),))
    >>> sent_bytes(assignment, 0, 1, Attention(H=2, K=1, D=4, dtype="float32"))  # K and V of 4 tokens
    128
    """
    return sum(
        ring_traffic(sizes, each.layout, rank=rank - each.first, backward=backward).total_bytes
        for each in assignment.micro_batches[micro_batch]
        if rank in each.ranks
    )
