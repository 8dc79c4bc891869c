"""One step's loss and gradients over a ring.

The module also has the programs that run on processes, because processes import their programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringlab import VirtualCluster, zigzag
from ringlab.comm.ring import Ring
from ringlab.errors import TrainingError
from ringlab.layout import Layout
from ringlab.nn import IGNORE, Context, Degrees, ModelConfig, Recipe, Transformer, mesh, train
from ringlab.nn.clipping import clip_gradients, gradient_norm
from ringlab.nn.loss import loss_share, next_tokens, sum_gradients, summed, valid_tokens
from ringlab.nn.precision import computing_in

Gradients = dict[str, Tensor]
CONFIG = ModelConfig(vocabulary=11, width=8, layers=2, heads=2, kv_heads=1, hidden=12, qk_norm=True)


def model_of(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float64) -> Transformer:
    """Return a model with weights ten times the initial ones, so that attention and positions matter."""
    model = Transformer(config, seed=3).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0 if parameter.ndim > 1 else 1.0)
    return model


def tokens_of(S: int, seed: int = 0, rows: int = 2) -> Tensor:
    return torch.randint(CONFIG.vocabulary, (rows, S), generator=torch.Generator().manual_seed(seed))


def gradients_of(model: nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def equal(one: list[float], other: list[float]) -> bool:
    """Return whether two loss curves are equal step by step, to 1e-5 relative in float32."""
    return len(one) == len(other) and all(
        abs(a - b) <= 1e-5 * abs(b) for a, b in zip(one, other, strict=True)
    )


# One process with an ordinary model: torch's own attention, no ring.


def alone(tokens: Tensor, ignored: Tensor, config: ModelConfig = CONFIG) -> tuple[float, Gradients]:
    model = model_of(config)
    labels = next_tokens(tokens)
    labels[ignored] = IGNORE
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    loss.backward()
    return loss.item(), gradients_of(model)


# Over a ring.


def shifted_then_sharded(tokens: Tensor, ignored: Tensor, context: Context) -> Tensor:
    labels = next_tokens(tokens)
    labels[ignored] = IGNORE
    return context.shard(labels)


def step(
    ring: Ring,
    layout: Layout,
    tokens: Tensor,
    ignored: Tensor,
    config: ModelConfig = CONFIG,
) -> tuple[float, Gradients]:
    """Return the result of a rank: the loss of all ranks and the gradients."""
    context = Context(ring, layout, block="naive")
    model, labels = model_of(config), shifted_then_sharded(tokens, ignored, context)
    share = loss_share(model(context.shard(tokens), context), labels, valid_tokens(labels, ring))
    share.backward()
    sum_gradients(model, ring)
    return float(summed(share.detach(), ring)), gradients_of(model)


def on_virtual_ranks(layout: Layout, *args: Any, **options: Any) -> list[tuple[float, Gradients]]:
    return VirtualCluster(layout.P, memory=False).run(partial(step, **options), layout, *args).results


def gradients_of_a_step(
    ring: Ring, config: ModelConfig, tokens: Tensor, block: str = "auto"
) -> dict[str, Any]:
    """Return the loss share and the summed gradients of this rank."""
    context = Context(ring, zigzag(tokens.shape[1], ring.world_size), block=block)
    model = Transformer(config, seed=1)
    mine, labels = context.shard(tokens), context.shard(next_tokens(tokens))
    share = loss_share(model(mine, context), labels, valid_tokens(labels, ring))
    share.backward()
    sum_gradients(model, ring)
    return {"loss": share.item(), **{name: p.grad for name, p in model.named_parameters()}}


def step_on_a_mesh(ring: Ring, config: ModelConfig, degrees: Degrees, tokens: Tensor) -> dict[str, Any]:
    """Return the whole gradients of a model that `degrees` split, and the loss, on every rank."""
    cp, dp = mesh.rings(ring, degrees)
    model = Transformer(config, seed=1)
    mesh.parallelize(model, mesh.build(degrees))
    context = Context(cp, zigzag(tokens.shape[1], cp.world_size))
    rows = tokens[dp.rank :: dp.world_size]
    mine, labels = context.shard(rows), context.shard(next_tokens(rows))
    share = loss_share(model(mine, context), labels, valid_tokens(labels, cp, dp))
    share.backward()
    gradients = {name: _whole(p.grad) for name, p in model.named_parameters()}
    norms = {"norm": gradient_norm(model, ring), "own": _norm_of_the_own_part(model)}
    clip_gradients(model, 0.5 * norms["norm"], ring)
    norms["clipped"] = gradient_norm(model, ring)
    refused = [_refusal(lambda: gradient_norm(model)), _refusal(lambda: sum_gradients(model, ring))]
    if degrees.dp * degrees.cp > 1:
        refused.append(_refusal(lambda: computing_in(torch.bfloat16, model).__enter__()))
    held = sum(_local(p).numel() for p in model.parameters())
    total = dp.all_reduce(cp.all_reduce(share.detach()))
    return {"loss": total.item(), "held": held, "norms": norms, "refused": refused, **gradients}


def four_on_meshes(
    ring: Ring, config: ModelConfig, tokens: Tensor, several: tuple[Degrees, ...], recipe: Recipe, folder: str
) -> tuple[list[dict[str, Any]], list[float], list[list[float]]]:
    """Return all results that tests need from four processes: a step for each of `several`, and trainings."""
    steps = [step_on_a_mesh(ring, config, degrees, tokens) for degrees in several]
    ways = tuple((degrees, 2 * (number + 1)) for number, degrees in enumerate(several))
    in_bfloat16 = [train(ring, replace(recipe, precision="bfloat16"), None, degrees) for degrees in several]
    return steps, one_after_the_other(ring, recipe, folder, ways), in_bfloat16


def one_after_the_other(
    ring: Ring, recipe: Recipe, folder: str, ways: tuple[tuple[Degrees, int], ...]
) -> list[float]:
    """Return the curve of a training that continues from its checkpoints with other degrees each time."""
    curve: list[float] = []
    for degrees, steps in ways:
        curve = train(ring, recipe, folder, degrees, until=steps)
    return curve


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _norm_of_the_own_part(model: nn.Module) -> float:
    """A mutant: return the norm of the rank's own part, as if no other rank had a part."""
    return sum(float(_local(p.grad).double().square().sum()) for p in model.parameters()) ** 0.5


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except TrainingError as error:
        return str(error)
    return "none"


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
