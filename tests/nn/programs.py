"""Programs that run on processes as well; those import them from here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ringlab import zigzag
from ringlab.comm.ring import Ring
from ringlab.nn import Context, Degrees, ModelConfig, Recipe, Transformer, mesh, train
from ringlab.nn.loss import loss_share, next_tokens, sum_gradients, valid_tokens


def gradients_of_a_step(
    ring: Ring, config: ModelConfig, tokens: Tensor, block: str = "auto"
) -> dict[str, Any]:
    """Loss share, summed gradients, and how often this rank sent K and V."""
    context = Context(ring, zigzag(tokens.shape[1], ring.world_size), block=block)
    model = Transformer(config, seed=1)
    mine, labels = context.shard(tokens), context.shard(next_tokens(tokens))
    share = loss_share(model(mine, context), labels, valid_tokens(labels, ring))
    share.backward()
    sum_gradients(model, ring)
    return {"loss": share.item(), **{name: p.grad for name, p in model.named_parameters()}}


def step_on_a_mesh(ring: Ring, config: ModelConfig, degrees: Degrees, tokens: Tensor) -> dict[str, Any]:
    """The whole gradients of a model that is split by `degrees`, and the loss, on every rank."""
    cp, dp = mesh.rings(ring, degrees)
    model = Transformer(config, seed=1)
    mesh.parallelize(model, mesh.build(degrees))
    context = Context(cp, zigzag(tokens.shape[1], cp.world_size))
    rows = tokens[dp.rank :: dp.world_size]
    mine, labels = context.shard(rows), context.shard(next_tokens(rows))
    share = loss_share(model(mine, context), labels, valid_tokens(labels, cp, dp))
    share.backward()
    gradients = {name: _whole(p.grad) for name, p in model.named_parameters()}
    held = sum(_local(p).numel() for p in model.parameters())
    total = dp.all_reduce(cp.all_reduce(share.detach()))
    return {"loss": total.item(), "held": held, **gradients}


def four_on_meshes(
    ring: Ring, config: ModelConfig, tokens: Tensor, several: tuple[Degrees, ...], recipe: Recipe, folder: str
) -> tuple[list[dict[str, Any]], list[float]]:
    """All that tests ask of four processes, in one start: a step by each of `several`, then a training by each."""
    steps = [step_on_a_mesh(ring, config, degrees, tokens) for degrees in several]
    ways = tuple((degrees, 2 * (number + 1)) for number, degrees in enumerate(several))
    return steps, one_after_the_other(ring, recipe, folder, ways)


def one_after_the_other(
    ring: Ring, recipe: Recipe, folder: str, ways: tuple[tuple[Degrees, int], ...]
) -> list[float]:
    """The curve of a training that goes on, from its checkpoints, by other degrees each time."""
    curve: list[float] = []
    for degrees, steps in ways:
        curve = train(ring, replace(recipe, steps=steps), folder, degrees)
    return curve


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
