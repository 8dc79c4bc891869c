"""Ulysses: ranks exchange their tokens for heads by all-to-all, attend to the whole sequence, and exchange back.

Each rank then holds H/P query heads and K/P key/value heads of all tokens. If there are more ranks than
key/value heads, it holds the one key/value head that its query heads read. If the caller asks for lse, lse
travels to the tokens' ranks. If any rank then has a gradient of lse, the gradients travel to the heads'
ranks. lse and its gradient have one number for each row and query head. Source: arXiv 2309.14509.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Shaped
from torch import Tensor

from ringlab.errors import ShapeError
from ringlab.handles import Handled
from ringlab.merge import state_dtype
from ringlab.rank_agreement import on_any_rank
from ringlab.schedules.all_to_all import to_heads, to_tokens
from ringlab.schedules.block_schedule import BlockSchedule
from ringlab.schedules.call import AttentionCall
from ringlab.schedules.mesh import Mesh
from ringlab.schedules.protocol import ForwardResult, Gradients
from ringlab.schedules.ring import RingSchedule
from ringlab.types import KeyValue, Out, Query, RowState, Sinks, Value


class MeshSchedule(Handled):
    """Attention on a mesh: ranks of a row share heads, and the columns run the schedule `between`.

    Ulysses is a mesh of one row, and a ring is a mesh of one column.
    """

    name: str
    between: BlockSchedule
    takes_sinks = True

    def degrees(self, world_size: int) -> tuple[int, int]:
        """Return (number of rows, number of ranks in a row). Raises: WorldSizeError."""
        raise NotImplementedError

    def check(self, heads: int, kv_heads: int, world_size: int) -> None:
        """Check that the ranks of a row can share these heads. Raises: WorldSizeError, ShapeError."""
        ring, ulysses = self.degrees(world_size)
        fit = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        if ulysses not in fit:
            raise ShapeError(
                f"heads that the {ulysses} ranks of a row of schedule '{self.name}' can share: H divisible by "
                f"{ulysses}, and K divisible by it or a divisor of it",
                f"H={heads} query and K={kv_heads} key/value heads",
                f"rows of {', '.join(str(n) for n in fit if world_size % n == 0)} ranks in a hybrid(ulysses=…), or schedule='ring'",
            )
        self.between.check(heads // ulysses, max(1, kv_heads // ulysses), ring)

    def forward(self, call: AttentionCall, q: Query, k: KeyValue, v: Value) -> ForwardResult:
        """Return attention of this rank's rows. The tensors after the all-to-all are saved for backward."""
        ring, ulysses = self.degrees(call.ring.world_size)
        if ulysses == 1:
            return self.between.forward(call, q, k, v)
        mesh = Mesh.of(call, ring, ulysses)
        inside = self.between.forward(mesh.column, *to_heads(mesh, q, k, v, tag="qkv to heads"))
        H, _ = call.heads
        [out] = to_tokens(mesh, inside.out, heads=(H,), tag="out to tokens")
        lse = out.new_empty(0)
        if call.wants_lse:
            lse = to_tokens(mesh, inside.lse.unsqueeze(-1), heads=(H,), tag="lse to tokens")[0].squeeze(-1)
        return ForwardResult(out, lse, inside.saved)

    def backward(
        self, call: AttentionCall, saved: tuple[Shaped[Tensor, "..."], ...], dout: Out, dlse: RowState | None
    ) -> Gradients:
        """Return (dq, dk, dv) of this rank's shards, and its part of the gradient of the sinks.

        Gradients of heads that a single rank computes are in q's dtype. Gradients of key/value heads that
        several ranks compute are in the state dtype.
        """
        ring, ulysses = self.degrees(call.ring.world_size)
        if ulysses == 1:
            return self.between.backward(call, saved, dout, dlse)
        mesh = Mesh.of(call, ring, ulysses)
        H, K = call.heads
        [of_heads] = to_heads(mesh, dout, tag="dout to heads")
        dlse = _dlse_of_heads(mesh, dout, dlse) if call.wants_lse else None
        dq, dk, dv, dsinks = self.between.backward(mesh.column, saved, of_heads, dlse)
        # These sums are complete, so rounding them here gives the same result as rounding at the owner.
        if K >= mesh.row.world_size:
            dk, dv = dk.to(dout.dtype), dv.to(dout.dtype)
        dq, dk, dv = to_tokens(mesh, dq.to(dout.dtype), dk, dv, heads=(H, K, K), tag="dqkv to tokens")
        return Gradients(dq, dk, dv, None if dsinks is None else _among_all_heads(mesh, dsinks, H))


def _among_all_heads(mesh: Mesh, dsinks: Sinks, heads: int) -> Float[Tensor, " heads"]:
    """Return the gradients of this rank's sinks at their places among all heads, and 0 for other heads."""
    whole, first = dsinks.new_zeros(heads), mesh.row.rank * len(dsinks)
    whole[first : first + len(dsinks)] = dsinks
    return whole


def _dlse_of_heads(mesh: Mesh, dout: Out, dlse: RowState | None) -> Float[Tensor, "B heads row"] | None:
    """Return the gradient of lse of this rank's heads, or None if no rank of the row has one.

    The choice of the block depends on whether lse has a gradient, so all ranks of the row must know this
    before they compute. To learn it from a gradient that was sent, a rank would have to wait for its GPU.
    """
    if not on_any_rank(mesh.row, dlse is not None):
        return None
    sent = dout.new_zeros(dout.shape[:3], dtype=state_dtype(dout.dtype)) if dlse is None else dlse
    [of_heads] = to_heads(mesh, sent.unsqueeze(-1), tag="dlse to heads")
    return of_heads.squeeze(-1)


@dataclass(frozen=True)
class UlyssesSchedule(MeshSchedule):
    """All ranks share the heads: attention of the whole sequence runs between two all-to-alls."""

    name = "ulysses"
    between = RingSchedule()

    def degrees(self, world_size: int) -> tuple[int, int]:
        """Return the degrees of one row of all ranks."""
        return 1, world_size
