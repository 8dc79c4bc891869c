"""Data × context × tensor parallelism, which combines torch's own parallelism with the ring.

The ranks form a grid (dp, cp, tp). tp is the innermost axis, because its ranks communicate most. The ring
spreads each sequence over cp; different sequences are on different ranks of dp; DTensor splits heads and
feed-forward over tp. FSDP shards parameters, gradients and the optimizer's state over dp × cp together,
because all these ranks use the same weights. (Pipeline stages are also left to torch. They do not concern
the ring, because a stage is a few layers.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.errors import BackendError, ShapeError, WorldSizeError
from ringlab.nn.transformer import Transformer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel.style import ParallelStyle


@dataclass(frozen=True)
class Degrees:
    """The numbers of ranks that share the data (dp), a sequence (cp) and the heads (tp).

    Their product is the world size.

    Raises: WorldSizeError for a degree below 1.

    >>> Degrees(dp=2, cp=4).ranks
    8
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.cp, self.tp) < 1:
            raise WorldSizeError("dp, cp and tp of at least 1", repr(self))

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.dp * self.cp * self.tp


def check(degrees: Degrees, world_size: int, sizes: tuple[int, int, int]) -> None:
    """Check the degrees against the world size and `sizes`, which are heads, kv_heads and hidden.

    Raises: WorldSizeError if the product of the degrees is not the world size; ShapeError if tp does not
    divide a size; BackendError for tp above 1 if the ranks are not processes of torch.distributed.
    """
    if degrees.ranks != world_size:
        fits = [d for d in range(1, world_size + 1) if world_size % (d * degrees.tp) == 0]
        raise WorldSizeError(
            f"dp × cp × tp = {world_size} ranks",
            f"{degrees.dp} × {degrees.cp} × {degrees.tp} = {degrees.ranks}",
            f"with tp={degrees.tp}, cp may be {', '.join(map(str, fits))}"
            if fits
            else f"tp that divides {world_size}",
        )
    for name, size in zip(("heads", "kv_heads", "hidden"), sizes, strict=True):
        if size % degrees.tp:
            raise ShapeError(f"{name} that tp={degrees.tp} divides", f"{name}={size}")
    if degrees.tp > 1 and not of_processes(world_size):
        raise BackendError(
            "processes of torch.distributed, because tp > 1",
            "virtual ranks, which are threads",
            "launch(train, P, ...) or torchrun; only tp needs processes, dp and cp do not",
        )


def of_processes(world_size: int) -> bool:
    """Return whether the ranks are the processes of torch's default group, so that a DeviceMesh can be made."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size


def build(degrees: Degrees, device_type: str = "cpu") -> DeviceMesh:
    """Return torch's mesh of these degrees, with axes "dp", "cp" and "tp".

    All processes must call this method.
    """
    from torch.distributed.device_mesh import init_device_mesh

    shape = degrees.dp, degrees.cp, degrees.tp
    return init_device_mesh(device_type, shape, mesh_dim_names=("dp", "cp", "tp"))


def rings(ring: Ring, degrees: Degrees) -> tuple[Ring, Ring]:
    """Return the ring of this rank's sequence, and the ring of ranks with the same part of other sequences.

    Both rings use the transport of `ring`, virtual or real, and its trace records their messages.
    """
    place, heads = divmod(ring.rank, degrees.tp)
    sequence, part = divmod(place, degrees.cp)

    def rank(dp: int, cp: int) -> int:
        return (dp * degrees.cp + cp) * degrees.tp + heads

    along = [rank(sequence, cp) for cp in range(degrees.cp)]
    across = [rank(dp, part) for dp in range(degrees.dp)]
    return Ring(SubGroup(ring.comm, along)), Ring(SubGroup(ring.comm, across))


def parallelize(model: Transformer, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Split heads and feed-forward of the model over "tp", and shard all parameters over "dp" × "cp".

    `dtype`: the dtype in which FSDP lets layers compute; None means the parameters' dtype. Gradients are
    summed in the parameters' dtype.

    Gradients are SUMMED over dp × cp, because the loss is divided by the global number of tokens. FSDP would
    average them by default. The q, k and v of each rank contain only the heads of its tp rank.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    if mesh["tp"].size() > 1:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], _by_heads(model.config.qk_norm))
    if mesh["dp", "cp"].size() == 1:
        return
    shards, masters = mesh["dp", "cp"]._flatten("dp_cp"), next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(dtype if dtype != masters else None, masters)
    for unit in (*model.layers, model):
        sharded = fully_shard(unit, mesh=shards, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def _by_heads(qk_norm: bool) -> dict[str, ParallelStyle]:
    """Return the plan that splits q, k, v, gate and up by columns, and the matrices after them by rows.

    One all-reduce then suffices for a matrix that is split by columns and the matrix after it.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    columns = [*(f"attention.{name}" for name in "qkv"), "feed_forward.gate", "feed_forward.up"]
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.out", "feed_forward.down")}
    if qk_norm:  # all heads share these weights, so their gradients are summed over all tp ranks
        over_heads = SequenceParallel(sequence_dim=1, use_local_output=True)
        plan |= {f"attention.{name}_norm": over_heads for name in "qk"}
    return plan
