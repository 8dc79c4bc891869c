"""In bfloat16 with float32 masters, gradients equal a bfloat16 model's, and updates are those of float32."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ringlab import VirtualCluster, launch, zigzag
from ringlab.comm.ring import Ring
from ringlab.nn import (
    Context,
    Recipe,
    Transformer,
    clip_gradients,
    computing_in,
    loss_share,
    next_tokens,
    sum_gradients,
    train,
    valid_tokens,
)
from ringlab.nn.text import batch, library
from ringlab.nn.training import update
from tests.nn.curves import CONFIG, SCHEDULED
from tests.nn.ways import gradients_of

BF16 = torch.bfloat16
TOKENS = batch(library(), 24, 2, 0)


def share_of(model: nn.Module, context: Context | None = None) -> Tensor:
    labels = next_tokens(TOKENS)
    mine, theirs = (TOKENS, labels) if context is None else (context.shard(TOKENS), context.shard(labels))
    ring = None if context is None else context.ring
    share = loss_share(model(mine, context), theirs, valid_tokens(theirs, ring))
    share.backward()
    return share.detach()


@pytest.mark.parametrize("changes", [{}, {"recompute": True}, {"tied": False}], ids=str)
def test_gradients_are_those_of_a_bfloat16_model(changes: dict[str, Any]) -> None:
    """Gradients are bit for bit a bfloat16 model's, even with recomputed layers and a shared table."""
    masters = Transformer(replace(CONFIG, **changes), seed=2)
    rounded = deepcopy(masters).to(BF16)
    before = deepcopy(masters.state_dict())
    with computing_in(BF16, masters):
        loss = share_of(masters)
    assert torch.equal(loss, share_of(rounded))
    gradients, expected = gradients_of(masters), gradients_of(rounded)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32 and torch.equal(gradient, expected[name].float()), name
    assert all(torch.equal(value, before[name]) for name, value in masters.state_dict().items())


def test_masters_are_back_after_an_error() -> None:
    model = Transformer(CONFIG)
    with pytest.raises(IndexError), computing_in(BF16, model):
        model(torch.full((1, 4), 999))
    assert {p.dtype for p in model.parameters()} == {torch.float32} and model.norm.weight.is_leaf


LAYOUT = zigzag(24, 3)
RATE = 1e-4


def a_rank_of_a_step(ring: Ring, masters: torch.dtype) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    """Return a rank's weights after a step in bfloat16, and the dtypes of the optimizer's state."""
    model = Transformer(CONFIG, seed=2).to(masters)
    optimizer = AdamW(model.parameters(), lr=RATE)
    update(model, optimizer, TOKENS, Context(ring, LAYOUT), dtype=BF16, clip=0.5)
    return model.state_dict(), {x.dtype for values in optimizer.state.values() for x in values.values()}


def law_of_the_update(masters: torch.dtype) -> None:
    """A step changes weights, to the last bit, as float32 AdamW would with the sum of rounded gradients."""

    def gradients(ring: Ring) -> dict[str, Tensor]:
        model = Transformer(CONFIG, seed=2).to(BF16)
        share_of(model, Context(ring, LAYOUT))
        return gradients_of(model)

    expected = Transformer(CONFIG, seed=2)
    of_ranks = VirtualCluster(3).run(gradients).results
    for name, parameter in expected.named_parameters():
        parameter.grad = sum(of_rank[name].float() for of_rank in of_ranks)
    clip_gradients(expected, 0.5)
    AdamW(expected.parameters(), lr=RATE).step()
    for weights, dtypes in VirtualCluster(3).run(a_rank_of_a_step, masters).results:
        assert dtypes == {torch.float32}, "the optimizer's state is float32"
        for name, value in expected.state_dict().items():
            assert torch.equal(value, weights[name]), name


def test_an_update_is_adamws_on_the_float32_sum_of_the_ranks_rounded_gradients() -> None:
    law_of_the_update(torch.float32)


def test_the_law_notices_masters_in_bfloat16() -> None:
    with pytest.raises(AssertionError):
        law_of_the_update(BF16)


def test_masters_take_the_steps_that_bfloat16_would_ignore() -> None:
    """Float32 masters take steps so small that a bfloat16 weight of 1 would not change."""

    def after_three_steps(masters: torch.dtype) -> Tensor:
        model = Transformer(CONFIG, seed=2).to(masters)
        optimizer = AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        for _ in range(3):
            update(model, optimizer, TOKENS, dtype=BF16)
        return model.norm.weight.detach()

    assert RATE < (after_three_steps(torch.float32) - 1).abs().max() < 4 * RATE
    assert (after_three_steps(BF16) == 1).all()


# Real processes.


class Plain(nn.Module):
    """A user's own model over the ring, in which only the attention is ringlab's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix = (
            nn.Embedding(256, 8, dtype=torch.float64),
            nn.Linear(8, 24, dtype=torch.float64),
        )

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        x = self.table(tokens)
        q, k, v = self.mix(x)[:, None].chunk(3, dim=-1)
        return (x + context.attend(q, k, v)[:, 0]) @ self.table.weight.T


def gradients_by(ring: Ring, way: str) -> dict[str, Tensor]:
    """Return the gradients of one step of `Plain` that this rank has in the end."""
    model: nn.Module = Plain()
    wrapped = DistributedDataParallel(model) if way.startswith("DDP") else model
    context = Context(ring, zigzag(24, ring.world_size))
    mine, labels = context.shard(TOKENS), context.shard(next_tokens(TOKENS))
    share = loss_share(wrapped(mine, context), labels, valid_tokens(labels, ring))
    (share * (ring.world_size if way == "DDP, loss × P" else 1)).backward()
    if way == "sum_gradients":
        sum_gradients(model, ring)
    return gradients_of(model)


WAYS = ("sum_gradients", "DDP", "DDP, loss × P")
FEW = replace(SCHEDULED, steps=4)


def on_processes(ring: Ring, recipes: dict[str, Recipe]) -> dict[str, Any]:
    trained = {precision: train(ring, recipe) for precision, recipe in recipes.items()}
    return trained | {way: gradients_by(ring, way) for way in WAYS}


RECIPES = {precision: replace(FEW, precision=precision) for precision in ("float64", "float32", "bfloat16")}


@cache
def two_processes() -> list[dict[str, Any]]:
    return launch(on_processes, 2, RECIPES, memory=False).results


@pytest.mark.thorough
@pytest.mark.parametrize("precision", RECIPES)
def test_processes_train_as_virtual_ranks_do_bit_for_bit(precision: str) -> None:
    virtual = VirtualCluster(2, memory=False).run(train, RECIPES[precision]).results
    assert [found[precision] for found in two_processes()] == virtual


@pytest.mark.thorough
def test_ddp_averages_so_its_loss_is_to_be_multiplied_by_the_number_of_ranks() -> None:
    """For a user's model, `sum_gradients` gives the right gradients.

    DDP's are too small by a factor of P, unless the loss is multiplied by P.
    """
    [true] = VirtualCluster(1).run(gradients_by, "sum_gradients").results
    for found in two_processes():
        for way, factor in zip(WAYS, (1.0, 0.5, 1.0), strict=True):
            assert found[way].keys() == true.keys()
            for name, gradient in true.items():
                rounding = 2000 * torch.finfo(torch.float64).eps * gradient.abs().max()
                assert (found[way][name] - factor * gradient).abs().max() <= rounding, (way, name)
