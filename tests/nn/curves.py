"""Short trainings, and the distance of their loss curves from the exact curve of one process in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.conformance.tolerance import FACTOR
from ringlab.nn import ModelConfig, Recipe, Step, train
from ringlab.nn.precision import master_dtype

CONFIG = ModelConfig(width=16, layers=1, heads=2, kv_heads=1, hidden=32, qk_norm=True)
SCHEDULED = Recipe(
    CONFIG, S=48, batch=4, steps=8, learning_rate=3e-3, warmup=2, decay="cosine", clip=0.5, seed=1
)  # fmt: skip


@cache
def steps_of(recipe: Recipe, P: int | None = None) -> list[Step]:
    """Return the steps of a training on P virtual ranks, or on one process."""
    steps: list[Step] = []

    def program(ring: Ring | None) -> list[float]:
        return train(ring, recipe, report=steps.append)

    if P is None:
        program(None)
    else:
        curves = VirtualCluster(P, memory=False).run(program).results
        assert all(curve == curves[0] for curve in curves), "ranks have different losses"
    return steps


def error(found: list[Step], true: list[Step], name: str = "loss") -> float:
    """Return the largest relative difference between two curves of losses or norms."""
    values = [(getattr(one, name), getattr(other, name)) for one, other in zip(found, true, strict=True)]
    return max(abs(one - other) / abs(other) for one, other in values)


def bound(recipe: Recipe, name: str = "loss") -> float:
    """Return the largest allowed error: FACTOR times one process's in the same precision, plus roundings.

    The error of one process is the largest over a few seeds and over a few orders in which it adds up its
    gradients (micro-batches), so that luck does not decide. In float64 one process is exact, so only the term
    for roundings remains, which is that of test_loss.py.
    """
    plain = max(_plain_error(replace(recipe, seed=recipe.seed + other), name) for other in range(3))
    roundings = 2000 if recipe.precision == "float64" else 1
    return FACTOR * plain + roundings * torch.finfo(master_dtype(recipe.precision)).eps


@cache
def _plain_error(recipe: Recipe, name: str) -> float:
    if recipe.precision == "float64":
        return 0.0
    exact = steps_of(replace(recipe, precision="float64", micro_batches=1))
    orders = [replace(recipe, micro_batches=parts) for parts in (1, 2, 4) if not recipe.batch % parts]
    return max(error(steps_of(order), exact, name) for order in orders)
