"""The context of a shard: how its sequence is spread over a ring, and attention over that sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ringlab.attention import ring_attention
from ringlab.blocks.protocol import Block
from ringlab.comm.ring import Ring, check_ring
from ringlab.errors import RinglabError, ShapeError
from ringlab.layout import Layout
from ringlab.mask import Mask, check_position_ids
from ringlab.rank_agreement import agree
from ringlab.schedules.protocol import Schedule
from ringlab.types import Sinks


@dataclass(frozen=True, eq=False)
class Context:
    """The arguments of `ring_attention` that are the same in all layers, and the tokens' positions.

    `position_ids`: the position of each of this rank's tokens, if a tokenizer or data loader provides
    positions; by default the layout's global positions. They may restart at every document of the mask,
    because rotary embedding depends only on differences within a document. `validate`: whether the ranks
    compare their arguments at every call of attention; `train` compares them only in its first step.

    Raises: WorldSizeError for an object that is not a ring, or a layout for another number of ranks;
    LayoutError for position ids that contradict the layout; MaskError for documents that do not add up to the
    sequence.

    >>> from ringlab import VirtualCluster, zigzag
    >>> VirtualCluster(2).run(lambda ring: Context(ring, zigzag(8, 2)).positions.tolist()).results
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    ring: Ring
    layout: Layout
    mask: Mask | None = None
    schedule: str | Schedule = "ring"
    block: str | Block = "auto"
    position_ids: Tensor | None = None
    validate: bool = True

    def __post_init__(self) -> None:
        check_ring(self.ring)
        self.layout.of_ranks(self.ring.world_size)
        if self.mask is not None:
            self.mask.of_length(self.layout.S)
        if self.position_ids is not None:
            check_position_ids(self.position_ids, self.layout, self.mask or Mask(), self.ring.rank)

    @classmethod
    def agreed(cls, ring: Ring, layout: Layout, **options: Any) -> Context:
        """Return the context after all ranks have compared their contexts, by messages of 512 bytes.

        Raises: the errors of the class on a rank with wrong arguments; AgreementError on all other ranks.
        """
        check_ring(ring)
        error, context = None, None
        try:
            context = cls(ring, layout, **options)
        except RinglabError as raised:
            error = raised
        agree(ring.comm, "" if context is None else repr(context._compared), error)
        assert context is not None  # or agree has raised
        return context

    @property
    def _compared(self) -> tuple[object, ...]:
        block, schedule = (x if isinstance(x, str) else x.name for x in (self.block, self.schedule))
        return self.layout, schedule, block, self.mask, self.position_ids is None

    @cached_property
    def positions(self) -> Tensor:
        """Return the positions of this rank's tokens, int64: `position_ids`, or the global positions."""
        if self.position_ids is not None:
            return self.position_ids
        return torch.from_numpy(self.layout.positions(self.ring.rank))

    def shard(self, x: Shaped[Tensor, "..."], dim: int = -1) -> Shaped[Tensor, "..."]:
        """Return this rank's tokens of the whole sequence(s) `x`. `dim` is the sequence axis."""
        shard: Tensor = self.layout.shard(x, self.ring.rank, dim)
        return shard

    def check_tokens(self, x: Shaped[Tensor, "B L ..."]) -> None:
        """Check that `x` has as many tokens as this rank owns.

        Raises: ShapeError if `x` has another number of tokens. The other ranks, which wait in attention,
        then raise AgreementError.
        """
        length = len(self.positions)
        if x.shape[1] == length:
            return
        whole = x.shape[1] == self.layout.S
        error = ShapeError(
            f"the {length} tokens that rank {self.ring.rank} owns under {self.layout!r}",
            f"{x.shape[1]} tokens" + (", the whole sequence" if whole else ""),
            "pass context.shard(tokens)" if whole else "build the layout for this sequence length",
        )
        if self.validate:
            agree(self.ring.comm, "", error)
        raise error

    def attend(
        self,
        q: Float[Tensor, "B H L D"],
        k: Float[Tensor, "B K L D"],
        v: Float[Tensor, "B K L Dv"],
        sinks: Sinks | None = None,
    ) -> Float[Tensor, "B H L Dv"]:
        """Return this rank's rows of attention over the whole sequence. Raises: as `ring_attention`."""
        out: Tensor = ring_attention(
            q, k, v, ring=self.ring, layout=self.layout, mask=self.mask, schedule=self.schedule, block=self.block,
            validate=self.validate, sinks=sinks,
        )  # fmt: skip
        return out
