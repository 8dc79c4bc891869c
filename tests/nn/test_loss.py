"""Loss and gradients over a ring equal those of one process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster, zigzag
from ringlab.comm.ring import Ring
from ringlab.errors import TrainingError
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.nn import (
    IGNORE,
    Context,
    Degrees,
    loss_share,
    mesh,
    next_tokens,
    sum_gradients,
    total_weight,
    valid_tokens,
)
from tests.laws.draw import MAKERS, SEEDS
from tests.nn.ways import (
    CONFIG,
    Gradients,
    alone,
    gradients_of,
    model_of,
    on_virtual_ranks,
    tokens_of,
)

ROUNDINGS = 2000 * torch.finfo(torch.float64).eps
"""The roundings of two layers in float64, forward and backward. The smallest mistake is 10¹⁰ times larger."""
LAYOUTS = st.builds(
    lambda make, S, P: make(S, P), st.sampled_from(MAKERS), st.integers(2, 16), st.integers(1, 4)
)


def law_equals_one_process(layout: Layout, tokens: Tensor, ignored: Tensor) -> None:
    loss, gradients = alone(tokens, ignored)
    for of_rank, (shared_loss, shared) in enumerate(on_virtual_ranks(layout, tokens, ignored)):
        assert abs(shared_loss - loss) <= ROUNDINGS * (1 + abs(loss)), f"{shared_loss} for {loss}"
        assert shared.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert close(shared[name], gradient), f"{name}, rank {of_rank}"


@settings(max_examples=15)
@given(layout=LAYOUTS, seed=SEEDS, data=st.data())
def test_loss_and_gradients_are_those_of_one_process(layout: Layout, seed: int, data: st.DataObject) -> None:
    tokens = tokens_of(layout.S, seed)
    keep = data.draw(st.integers(0, layout.S - 2))  # the index of a label that is never ignored
    ignored = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    ignored[0, keep] = False
    law_equals_one_process(layout, tokens, ignored)


TOKENS = tokens_of(12, 1)


def test_an_output_layer_of_its_own_and_heads_without_norms() -> None:
    config = replace(CONFIG, tied=False, qk_norm=False, kv_heads=2, head_dim=6)
    ignored, layout = torch.zeros_like(TOKENS, dtype=torch.bool), zigzag(12, 3)
    loss, gradients = alone(TOKENS, ignored, config)
    for shared_loss, shared in on_virtual_ranks(layout, TOKENS, ignored, config):
        assert abs(shared_loss - loss) <= ROUNDINGS * (1 + loss) and "head.weight" in shared
        assert all(close(shared[name], gradient) for name, gradient in gradients.items())


def close(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= ROUNDINGS * (1 + other.abs().max())).all())


def test_labels_are_the_tokens_after() -> None:
    tokens = torch.arange(10, 16)[None]
    assert next_tokens(tokens).tolist() == [[11, 12, 13, 14, 15, IGNORE]]
    packed = Mask(documents=(2, 0, 3, 1))
    assert next_tokens(tokens, packed).tolist() == [[11, IGNORE, 13, 14, IGNORE, IGNORE]]


def test_a_batch_in_which_nothing_counts_raises_on_every_rank() -> None:
    def program(ring):
        with pytest.raises(TrainingError, match="at least one label counts"):
            valid_tokens(torch.full((1, 3), IGNORE), ring)
        return True

    assert VirtualCluster(2).run(program).results == [True, True]


def test_a_replica_without_labels_has_a_part_in_the_count_of_all() -> None:
    """A replica without labels is right if labels are counted over all rings; its own count is refused."""
    degrees = Degrees(dp=2, cp=2)
    rows = torch.stack([TOKENS[0], TOKENS[1]])
    labels = next_tokens(rows)
    labels[1] = IGNORE

    def program(ring: Ring) -> tuple[Any, int, Gradients]:
        cp, dp = mesh.rings(ring, degrees)
        context = Context(cp, zigzag(12, 2), block="naive")
        mine, theirs = (context.shard(x[dp.rank][None]) for x in (rows, labels))
        try:
            own: Any = valid_tokens(theirs, cp)
        except TrainingError as error:
            own = error.remedy
        count = valid_tokens(theirs, cp, dp)
        model = model_of()
        loss_share(model(mine, context), theirs, count).backward()
        sum_gradients(model, cp, dp)
        return own, count, gradients_of(model)

    _, gradients = alone(rows, torch.tensor([[False], [True]]).expand_as(rows))
    for rank, (own, count, found) in enumerate(VirtualCluster(4, memory=False).run(program).results):
        assert count == 11
        assert own == 11 if rank < 2 else "valid_tokens(labels, cp, dp)" in own
        assert all(close(found[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("count", [0, 0.0, -1, math.nan])
def test_a_count_of_nothing_is_refused(count: Any) -> None:
    """A count of zero is refused, because the loss and then all weights would become NaN."""
    logits, labels = torch.zeros(1, 2, 3), torch.full((1, 2), IGNORE)
    with pytest.raises(TrainingError, match="above zero"):
        loss_share(logits, labels, count)
    assert loss_share(logits, labels, 5).item() == 0.0  # this rank has no labels, but other ranks have 5


@pytest.mark.parametrize("unused", [math.nan, math.inf, -math.inf])
def test_a_weight_of_an_ignored_label_is_not_used(unused: float) -> None:
    logits = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels, weights = torch.tensor([[1, IGNORE, 4]]), torch.tensor([[1.0, unused, 0.5]])
    total = total_weight(weights, labels)
    share = loss_share(logits, labels, total, weights)
    share.backward()
    kept = [0, 2]
    expected = loss_share(logits[:, kept], labels[:, kept], 1.5, weights[:, kept])
    assert total == 1.5 and torch.equal(share, expected)
    assert logits.grad is not None and bool(logits.grad.isfinite().all()) and not logits.grad[0, 1].any()
