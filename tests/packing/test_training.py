"""A step on a packed batch equals a step that computes each of its documents separately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.layout import Layout
from ringlab.nn import Context, loss_share, sum_gradients, total_weight, valid_tokens
from ringlab.nn.loss import summed
from ringlab.packing import Packing
from tests.laws.draw import SEEDS
from tests.nn.ways import CONFIG, Gradients, gradients_of, model_of
from tests.packing.drawn import LAYOUT_NAMES, Given, given_batches


@dataclass(frozen=True)
class Batch:
    """A data loader's batch and the layout of its packed sequence. weights: one for each label, or None."""

    packing: Packing
    layout: Layout
    tokens: Tensor
    weights: Tensor | None = None


def batch_of(packing: Packing, name: str, P: int, seed: int = 0, weighted: bool = False) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CONFIG.vocabulary, packing.shape, generator=draw)
    weights = torch.rand(packing.shape, generator=draw, dtype=torch.float64) + 0.5 if weighted else None
    return Batch(packing, packing.layout(name, P), tokens, weights)


def alone(batch: Batch) -> tuple[float, Gradients]:
    """Return the loss and gradients of one process, document by document, with torch's own attention."""
    model, packing = model_of(), batch.packing
    weights = torch.ones(packing.shape) if batch.weights is None else batch.weights
    total, weight = torch.zeros(()), torch.zeros(())
    for document, its in zip(
        packing.unpack(packing.pack(batch.tokens)), packing.unpack(packing.pack(weights)), strict=True
    ):
        if len(document) < 2:
            continue
        each = F.cross_entropy(model(document[None])[0, :-1], document[1:], reduction="none")
        total, weight = total + (each * its[1:]).sum(), weight + its[1:].sum()
    loss = total / weight
    loss.backward()
    return loss.item(), gradients_of(model)


def part(batch: Batch, ring: Ring, **more: Any) -> dict[str, Any]:
    return batch.packing.shard(batch.layout, ring.rank, tokens=batch.tokens, **more)


def step(ring: Ring, batch: Batch) -> tuple[float, Gradients]:
    """Return the loss of all ranks and the gradients."""
    model, weights = model_of(), None
    mine = part(batch, ring, labels=batch.tokens)
    labels = mine["labels"]
    context = Context(
        ring, batch.layout, batch.packing.mask(), block="naive", position_ids=mine["position_ids"][0]
    )
    if batch.weights is not None:
        weights = part(batch, ring, loss_weights=batch.weights)["loss_weights"]
    count = valid_tokens(labels, ring) if weights is None else total_weight(weights, labels, ring)
    share = loss_share(model(mine["tokens"], context), labels, count, weights)
    share.backward()
    sum_gradients(model, ring)
    return float(summed(share.detach(), ring)), gradients_of(model)


ROUNDINGS = 2000 * torch.finfo(torch.float64).eps
"""The roundings of two layers in float64, as in tests/nn/test_loss.py. Every mistake is far larger."""


def law_equals_the_documents_alone(batch: Batch) -> None:
    loss, gradients = alone(batch)
    for rank, (shared_loss, shared) in enumerate(
        VirtualCluster(batch.layout.P, memory=False).run(step, batch).results
    ):
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
