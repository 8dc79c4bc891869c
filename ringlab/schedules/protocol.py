"""The interface of a schedule: the communication of attention, forward and backward.

`ring_attention` calls `check` before any data moves, then `forward`, and `backward` when the loss is differentiated.
The default schedule, `RingSchedule`, inherits `forward` and `backward` from `BlockSchedule`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Shaped
from torch import Tensor

from ringlab.blocks.protocol import Gradient
from ringlab.schedules.call import AttentionCall
from ringlab.types import BlockTensor, Out, Query, RowState


class ForwardResult(NamedTuple):
    """The forward of one rank: its rows of out (in q's dtype) and lse, and the tensors saved for backward.

    If the caller did not ask for lse, it is empty under schedules that would have to send it.
    """

    out: Tensor
    lse: Tensor
    saved: tuple[Tensor, ...]


class Gradients(NamedTuple):
    """The gradients of one rank's shards, in the state dtype, or in q's dtype if that loses nothing.

    dsinks (H,) is this rank's part of the gradient of the sinks; the parts of all ranks add up to the
    gradient. It is None without sinks.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None


@runtime_checkable
class Schedule(Protocol):
    """A way to bring the rows and K/V blocks of all ranks together, and to return gradients to the owners.

    A schedule that takes account of `AttentionCall.sinks` has an attribute `takes_sinks` that is true. Other
    schedules never get sinks.
    """

    @property
    def name(self) -> str:
        """The name by which `get_schedule` finds the schedule, including degrees."""
        ...

    def check(self, heads: int, kv_heads: int, world_size: int) -> None:
        """Check that this schedule can compute so many heads on so many ranks. Send nothing.

        Raises: WorldSizeError or ShapeError, naming the schedule.
        """
        ...

    def forward(self, call: AttentionCall, q: Query, k: BlockTensor, v: BlockTensor) -> ForwardResult:
        """Return attention of this rank's queries over all ranks' tokens. See `BlockSchedule.forward`."""
        ...

    def backward(
        self, call: AttentionCall, saved: tuple[Shaped[Tensor, "..."], ...], dout: Out, dlse: RowState | None
    ) -> tuple[Query, BlockTensor, BlockTensor] | Gradients:
        """Return the `Gradients` of this rank's shards. See `BlockSchedule.backward`.

        saved: the tensors that the forward saved. dlse: the gradient of lse; None if no loss depends on this rank's lse.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ScheduledCall(AttentionCall):
    """A call with the schedule that runs it, as it passes through the stages of `ring_attention`.

    description: a text that must be equal on all ranks, which is checked before any data moves; empty if the
    ranks do not compare their calls.
    """

    schedule: Schedule
    description: str = field(default="", compare=False)


class GradientReturn(Protocol):
    """Returns the gradients of K/V blocks to their owners, during one backward of one rank.

    The default is a `RingGradientReturn`.
    """

    def add_block(self, origin: int, k: BlockTensor, v: BlockTensor, gradients: list[Gradient]) -> None:
        """Accept this rank's contribution to the gradients of the block (k, v) of `origin`."""
        ...

    def own_gradients(self) -> tuple[BlockTensor, BlockTensor]:
        """Return the complete (dk, dv) of this rank's own block in the state dtype, after the last block."""
        ...
