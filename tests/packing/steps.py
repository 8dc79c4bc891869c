"""A training step on a packed batch, and one published mistake; the conformance suite has other mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.layout import Layout
from ringlab.nn import IGNORE, Context, loss_share, next_tokens, sum_gradients, total_weight, valid_tokens
from ringlab.nn.loss import summed
from ringlab.packing import Packing
from tests.nn.ways import CONFIG, Gradients, gradients_of, model_of


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


Labels = Callable[[Batch, Ring], Tensor]


def shifted_then_sharded(batch: Batch, ring: Ring) -> Tensor:
    return part(batch, ring, labels=batch.tokens)["labels"]


def over_the_end_of_documents(batch: Batch, ring: Ring) -> Tensor:
    """Return labels rolled over the whole sequence, the mistake of Megatron-LM 4495."""
    rolled = next_tokens(batch.packing.pack(batch.tokens, IGNORE))
    return batch.layout.shard(rolled, ring.rank, dim=1)


def part(batch: Batch, ring: Ring, **more: Any) -> dict[str, Any]:
    return batch.packing.shard(batch.layout, ring.rank, tokens=batch.tokens, **more)


def step(ring: Ring, batch: Batch, make_labels: Labels = shifted_then_sharded) -> tuple[float, Gradients]:
    """Return the loss of all ranks and the gradients."""
    model, labels, weights = model_of(), make_labels(batch, ring), None
    mine = part(batch, ring)
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


def on_virtual_ranks(batch: Batch, *labels: Labels) -> list[tuple[float, Gradients]]:
    """Return the loss and gradients of each rank."""
    return VirtualCluster(batch.layout.P, memory=False).run(step, batch, *labels).results
