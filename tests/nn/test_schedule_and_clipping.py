"""Warm-up, decay, clipping and precision are the same on P ranks as on one process, step by step."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ringlab import VirtualCluster, zigzag
from ringlab.comm.ring import Ring
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import ring_traffic
from ringlab.errors import TrainingError
from ringlab.nn import Recipe, Transformer, clip_gradients, gradient_norm, learning_rate, sum_gradients, train
from ringlab.nn.precision import master_dtype
from ringlab.nn.rates import DECAYS
from tests.nn.curves import SCHEDULED, bound, error, steps_of

DECAY = st.sampled_from(sorted(DECAYS))


# The learning rate.


@given(decay=DECAY, steps=st.integers(1, 60), data=st.data(), peak=st.floats(1e-5, 1.0))
def test_a_rate_rises_to_its_peak_then_never_again(
    decay: str, steps: int, data: st.DataObject, peak: float
) -> None:
    warmup, final = data.draw(st.integers(0, steps)), data.draw(st.floats(0, peak))
    rates = [learning_rate(n, steps, peak, warmup=warmup, decay=decay, final=final) for n in range(steps)]
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == [peak * (n + 1) / warmup for n in range(warmup)]
    ulp = 4 * np.finfo(float).eps  # two products and a sum
    assert falling[:1] in ([], [peak])
    assert all(after <= before * (1 + ulp) for before, after in itertools.pairwise(falling))
    assert all(final * (1 - ulp) <= rate <= peak * (1 + ulp) for rate in falling)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_rates_are_those_of_torch(decay: str) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.8)
    scheduler: Any = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0.2)
        if decay == "cosine"
        else torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.25, total_iters=10)
    )
    for step in range(10):
        own = learning_rate(step, 10, 0.8, decay=decay, final=0.2)
        assert own == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-14)
        optimizer.step()
        scheduler.step()


def test_a_schedule_that_cannot_be_is_refused() -> None:
    with pytest.raises(TrainingError, match="constant, cosine, linear"):
        Recipe(decay="exponential")
    with pytest.raises(TrainingError, match="warmup= 0 to 5 steps"):
        Recipe(steps=5, warmup=6)
    with pytest.raises(TrainingError, match="final_learning_rate= at least 0"):
        Recipe(final_learning_rate=-1.0)
    with pytest.raises(TrainingError, match="a divisor of the batch"):
        Recipe(batch=4, micro_batches=3)
    with pytest.raises(TrainingError, match="clip= a norm above 0"):
        Recipe(clip=0.0)
    with pytest.raises(TrainingError, match="float64, float32, bfloat16"):
        Recipe(precision="float16")


# Clipping.


def model_with(*gradients: list[float]) -> nn.Module:
    model = nn.ParameterList([nn.Parameter(torch.zeros(len(gradient))) for gradient in gradients])
    for parameter, gradient in zip(model, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return model


@given(
    gradients=st.lists(
        st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5), min_size=1, max_size=3
    ),
    limit=st.floats(1e-2, 1e3),
)
def test_a_clipped_gradient_has_the_norm_of_torchs(gradients: list[list[float]], limit: float) -> None:
    model, other = model_with(*gradients), model_with(*gradients)
    norm = clip_gradients(model, limit)
    whole = torch.tensor([entry for gradient in gradients for entry in gradient], dtype=torch.float64)
    assert norm == pytest.approx(float(whole.norm()), rel=1e-14)
    if norm <= limit:
        assert all(
            torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True)
        )
    else:
        assert gradient_norm(model) == pytest.approx(limit, rel=1e-6)
        torch.nn.utils.clip_grad_norm_(other.parameters(), limit)  # adds 1e-6 to the norm
        for one, torchs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.grad, torchs.grad, rtol=1e-6 + 2e-6 / norm, atol=1e-30)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_all_ranks_and_changes_nothing(value: float) -> None:
    def program(ring: Ring) -> list[float]:
        model = model_with([1.0, value if ring.rank == 1 else 2.0], [3.0])
        sum_gradients(model, ring)
        with pytest.raises(TrainingError, match="a gradient with a finite norm"):
            clip_gradients(model, 1e-3)
        return [p.grad[0].item() for p in model.parameters()]

    assert VirtualCluster(3).run(program).results == [[3.0, 9.0]] * 3


# Trainings.


def law_is_one_process(recipe: Recipe, P: int) -> None:
    """Losses and norms are within their bounds, and each step has the recipe's rate."""
    exact = steps_of(replace(recipe, precision="float64", micro_batches=1))
    found = steps_of(recipe, P)
    assert [step.number for step in found] == list(range(1, recipe.steps + 1))
    assert [step.learning_rate for step in found] == [one.learning_rate for one in exact], "rates"
    for name in ("loss", "norm"):
        assert error(found, exact, name) <= bound(recipe, name), name


@pytest.mark.parametrize(
    ("precision", "P", "parts"), [("float64", 2, 1), ("float32", 3, 2), ("bfloat16", 3, 2)]
)
def test_ranks_train_as_one_process(precision: str, P: int, parts: int) -> None:
    exact = steps_of(replace(SCHEDULED, precision="float64"))
    assert sum(step.norm > 0.5 for step in exact if step.norm) == 8, "nothing is clipped"
    law_is_one_process(replace(SCHEDULED, precision=precision, micro_batches=parts), P)


def test_a_linear_decay_to_a_floor_is_that_of_one_process() -> None:
    recipe = replace(SCHEDULED, decay="linear", final_learning_rate=1e-4, micro_batches=4)
    law_is_one_process(recipe, 4)


# The messages of a step.


@pytest.mark.parametrize(
    "changes",
    [{}, {"micro_batches": 4}, {"precision": "bfloat16"}],
    ids=str,
)
def test_a_step_sends_what_the_formula_says(changes: dict[str, Any]) -> None:
    """A step sends gradients once, in the masters' dtype, and K/V in the computing dtype, and no more."""
    recipe, P = replace(SCHEDULED, steps=1, warmup=0, **changes), 3
    trace = VirtualCluster(P, memory=False).run(train, recipe).trace
    parameters = sum(p.numel() for p in Transformer(recipe.model).parameters())
    master = torch.finfo(master_dtype(recipe.precision)).bits // 8
    sizes = Attention(recipe.batch // recipe.micro_batches, H=2, K=1, D=8, dtype=recipe.precision)
    layout = zigzag(recipe.S, P)
    for rank in range(P):
        there, back = (ring_traffic(sizes, layout, rank=rank, backward=way) for way in (False, True))
        reduced = [e.bytes_sent for e in trace.exchanges(rank) if e.tag == "all_reduce"]
        scalars = 2 * 8  # bytes of two float64 numbers: the number of counted labels, and the loss
        assert sum(reduced) == (P - 1) * (parameters * master + scalars)
        around = [e.bytes_sent for e in trace.exchanges(rank) if e.tag != "all_reduce"]
        assert sum(around) == recipe.micro_batches * (there.total_bytes + back.total_bytes)
        assert len(around) == recipe.micro_batches * (there.messages + back.messages)
