"""In bfloat16 with float32 masters, gradients equal a bfloat16 model's, and updates are those of float32."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from ringlab import VirtualCluster, zigzag
from ringlab.comm.ring import Ring
from ringlab.nn import (
    Context,
    Transformer,
    clip_gradients,
    computing_in,
    loss_share,
    next_tokens,
    valid_tokens,
)
from ringlab.nn.text import batch, library
from ringlab.nn.training import update
from tests.nn.curves import CONFIG
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


def a_rank_of_a_step(ring: Ring) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    """Return a rank's weights after a step in bfloat16, and the dtypes of the optimizer's state."""
    model = Transformer(CONFIG, seed=2)
    optimizer = AdamW(model.parameters(), lr=RATE)
    update(model, optimizer, TOKENS, Context(ring, LAYOUT), dtype=BF16, clip=0.5)
    return model.state_dict(), {x.dtype for values in optimizer.state.values() for x in values.values()}


def test_an_update_is_adamws_on_the_float32_sum_of_the_ranks_rounded_gradients() -> None:
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
    for weights, dtypes in VirtualCluster(3).run(a_rank_of_a_step).results:
        assert dtypes == {torch.float32}, "the optimizer's state is float32"
        for name, value in expected.state_dict().items():
            assert torch.equal(value, weights[name]), name


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
