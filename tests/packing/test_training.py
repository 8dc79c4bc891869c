"""A step on a packed batch equals a step that computes each of its documents separately."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.laws.draw import SEEDS
from tests.packing.drawn import FORMS, LAYOUT_NAMES, Given, given_batches
from tests.packing.steps import (
    Batch,
    Labels,
    alone,
    batch_of,
    on_virtual_ranks,
    over_the_end_of_documents,
)

ROUNDINGS = 2000 * torch.finfo(torch.float64).eps
"""The roundings of two layers in float64, as in tests/nn/test_loss.py. Every mistake is far larger."""


def law_equals_the_documents_alone(batch: Batch, *labels: Labels) -> None:
    loss, gradients = alone(batch)
    for rank, (shared_loss, shared) in enumerate(on_virtual_ranks(batch, *labels)):
        assert abs(shared_loss - loss) <= ROUNDINGS * (1 + abs(loss)), f"{shared_loss} for {loss}"
        assert shared.keys() == gradients.keys()
        for name, gradient in gradients.items():
            error = (shared[name] - gradient).abs().max()
            assert error <= ROUNDINGS * (1 + gradient.abs().max()), f"{name}, rank {rank}"


@settings(max_examples=15)
@given(
    drawn=given_batches(),
    P=st.integers(1, 4),
    name=st.sampled_from(LAYOUT_NAMES),
    seed=SEEDS,
    weighted=st.booleans(),
)
def test_a_packed_step_is_its_documents_alone(
    drawn: Given, P: int, name: str, seed: int, weighted: bool
) -> None:
    assume(max(drawn.packing.documents) > 1)  # otherwise no label counts
    law_equals_the_documents_alone(batch_of(drawn.packing, name, P, seed, weighted))


@pytest.mark.thorough
def test_the_law_notices() -> None:
    batch = batch_of(FORMS["padded_cu_seqlens"]([7, 1, 6, 2]).packing, "per_document", 3)
    with pytest.raises(AssertionError):
        law_equals_the_documents_alone(batch, over_the_end_of_documents)
