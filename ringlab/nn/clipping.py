"""The norm of a model's whole gradient, which is the same number on every rank, and clipping by this norm.

    ‖g‖ = √(Σ over all entries of g²),   g ← g · min(1, limit / ‖g‖)

Clip after the gradient has been summed over ranks. If each rank clipped its part of the sum by the norm of
that part, the direction of the sum would change. A rank that holds only a shard of the gradient can compute
only a part of the norm.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ringlab.comm.ring import Ring
from ringlab.errors import TrainingError
from ringlab.nn.loss import is_sharded


@torch.no_grad()
def gradient_norm(model: nn.Module, ring: Ring | None = None) -> float:
    """Return the 2-norm of the gradient of all of `model`'s parameters, summed in float64.

    `ring`: the ring of all ranks over which FSDP or tensor parallelism shards parameters. Its ranks exchange
    messages of 8 bytes. None means that every rank holds the whole gradient, as after `sum_gradients`; then
    nothing is sent.

    Raises: TrainingError if parameters are sharded and `ring` is None.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
    >>> gradient_norm(model)
    5.0
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if ring is None and any(map(is_sharded, gradients)):
        got = "sharded parameters, and no ring"
        raise TrainingError("the ring of all ranks that hold shards, to add up the norm", got, "ring=ring")
    ranks = 1 if ring is None else ring.world_size
    squares = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        own, shards = _part(gradient)
        squares += own.double().square().sum().cpu() * (shards / ranks)
    if ring is not None and ranks > 1:
        squares = ring.all_reduce(squares)
    return math.sqrt(squares.item())


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float, ring: Ring | None = None) -> float:
    """Scale the gradient down to the norm `limit` if its norm is larger, and return the norm before scaling.

    `ring`: as for `gradient_norm`.

    Raises: TrainingError if the norm is not finite (on every rank, with the gradients unchanged) or if the
    limit is not above 0; the errors of `gradient_norm`.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
    >>> clip_gradients(model, limit=2.5), model.weight.grad
    (5.0, tensor([[1.5000, 2.0000]]))
    """
    if not limit > 0:
        raise TrainingError("a limit of the gradient's norm above 0", f"{limit!r}", "limit=None: no clipping")
    norm = gradient_norm(model, ring)
    if not math.isfinite(norm):
        remedy = "lower the learning rate, or lengthen the warm-up"
        raise TrainingError("a gradient with a finite norm", f"{norm}", remedy)
    if norm > limit:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(limit / norm)
    return norm


def _part(gradient: Any) -> tuple[Float[Tensor, "..."], int]:
    """Return this rank's part of a gradient, and the number of parts into which it is sharded."""
    if not is_sharded(gradient):
        return gradient, 1
    from torch.distributed.tensor import Replicate

    places = [Replicate() if place.is_partial() else place for place in gradient.placements]
    whole = gradient.redistribute(placements=places)
    sizes = zip(gradient.device_mesh.shape, places, strict=True)
    shards = math.prod(
        size for size, place in sizes if not place.is_replicate()
    )  # torch has two kinds of shard placements
    return whole.to_local(), shards
