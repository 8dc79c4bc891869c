"""A training step on a packed batch: the right way, and published mistakes, each with the thread that reports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.nn import IGNORE, Context, loss_share, next_tokens, sum_gradients, total_weight, valid_tokens
from ringlab.nn.loss import summed
from ringlab.packing import Packing
from tests.nn.ways import CONFIG, Gradients, gradients_of, mean_gradients, model_of


@dataclass(frozen=True)
class Batch:
    """A batch as a data loader gives it, and the layout that deals its packed sequence. weights: of each label, or None."""

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
    """One process, each document by itself, with torch's own attention; no packing."""
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


# The parts of a step, and what is done wrong with them.


def masked(batch: Batch, ring: Ring) -> Mask:
    return batch.packing.mask()


def without_documents(batch: Batch, ring: Ring) -> Mask:
    return Mask()


def bounds_divided_by_the_ranks(batch: Batch, ring: Ring) -> Mask:
    """cu_seqlens // cp_size, as if each rank held a P-th of every document (a Megatron fork, 111)."""
    S, P = batch.packing.length, ring.world_size
    bounds = batch.packing.cu_seqlens_padded.astype(int) // P * P
    return Mask(documents=(*np.diff(bounds).tolist(), S - int(bounds[-1])))


def plain_bounds_for_padded_data(batch: Batch, ring: Ring) -> Mask:
    """cu_seqlens where the data need cu_seqlens_padded, the rest taken for one more document (axolotl, 3608)."""
    return Mask(documents=(*batch.packing.documents, sum(batch.packing.padding)))


def shifted_then_sharded(batch: Batch, ring: Ring) -> Tensor:
    return part(batch, ring, labels=batch.tokens)["labels"]


def sharded_then_shifted(batch: Batch, ring: Ring) -> Tensor:
    return next_tokens(part(batch, ring)["tokens"])


def over_the_end_of_documents(batch: Batch, ring: Ring) -> Tensor:
    """The roll of the whole sequence (Megatron-LM, 4495)."""
    rolled = next_tokens(batch.packing.pack(batch.tokens, IGNORE))
    return batch.layout.shard(rolled, ring.rank, dim=1)


def padding_counted(batch: Batch, ring: Ring) -> Tensor:
    """Padding has labels (Megatron-LM, 7238)."""
    rolled = next_tokens(batch.packing.pack(batch.tokens, 0), batch.packing.mask())
    return batch.layout.shard(rolled, ring.rank, dim=1)


def in_documents(batch: Batch, ring: Ring) -> Tensor:
    return part(batch, ring)["position_ids"][0]


def counted_from_zero(batch: Batch, ring: Ring) -> Tensor:
    """Positions of a rank's own tokens (sglang, 32098)."""
    return torch.arange(batch.layout.length(ring.rank))


def of_another_layout(batch: Batch, ring: Ring) -> Tensor:
    """Positions of a contiguous shard, as [0, 3, 0, 3] for [0, 3, 4, 7] (Megatron-LM, 5243)."""
    ids = torch.from_numpy(batch.packing.position_ids)
    before = sum(batch.layout.lengths[: ring.rank])
    return ids[before : before + batch.layout.length(ring.rank)]


def of_all_ranks(labels: Tensor, weights: Tensor | None, ring: Ring) -> float:
    return valid_tokens(labels, ring) if weights is None else total_weight(weights, labels, ring)


def of_this_rank(labels: Tensor, weights: Tensor | None, ring: Ring) -> float:
    """The loss divided by local tokens (verl, 5983)."""
    return max(1, int((labels != IGNORE).sum())) * ring.world_size


def tokens_for_weights(labels: Tensor, weights: Tensor | None, ring: Ring) -> float:
    return valid_tokens(labels, ring)


def part(batch: Batch, ring: Ring, **more: Any) -> dict[str, Any]:
    return batch.packing.shard(batch.layout, ring.rank, tokens=batch.tokens, **more)


def shifted_weights(batch: Batch, ring: Ring) -> Tensor | None:
    return None if batch.weights is None else part(batch, ring, loss_weights=batch.weights)["loss_weights"]


def unshifted_weights(batch: Batch, ring: Ring) -> Tensor | None:
    return None if batch.weights is None else part(batch, ring, weights=batch.weights)["weights"]


@dataclass(frozen=True)
class Step:
    """How mask, labels, positions, count, weights and gradients are made on a rank."""

    __name__: str
    mask: Callable[[Batch, Ring], Mask] = masked
    labels: Callable[[Batch, Ring], Tensor] = shifted_then_sharded
    positions: Callable[[Batch, Ring], Tensor] = in_documents
    weights: Callable[[Batch, Ring], Tensor | None] = shifted_weights
    count: Callable[[Tensor, Tensor | None, Ring], float] = of_all_ranks
    reduce: Callable[[nn.Module, Ring], None] = sum_gradients

    def program(self, ring: Ring, batch: Batch) -> tuple[float, Gradients]:
        """Return the loss of all ranks and the gradients."""
        context = Context(ring, batch.layout, self.mask(batch, ring), block="naive")
        context.__dict__["positions"] = self.positions(batch, ring)
        labels, weights, model = self.labels(batch, ring), self.weights(batch, ring), model_of()
        logits = model(part(batch, ring)["tokens"], context)
        share = loss_share(logits, labels, self.count(labels, weights, ring), weights)
        share.backward()
        self.reduce(model, ring)
        return float(summed(share.detach(), ring)), gradients_of(model)

    def __call__(self, batch: Batch) -> list[tuple[float, Gradients]]:
        """Return the values of each rank."""
        return VirtualCluster(batch.layout.P, memory=False).run(self.program, batch).results


RIGHT = Step("right")
MUTANTS = (
    replace(RIGHT, __name__="documents ignored", mask=without_documents),
    replace(RIGHT, __name__="bounds divided by the ranks", mask=bounds_divided_by_the_ranks),
    replace(RIGHT, __name__="plain bounds for padded data", mask=plain_bounds_for_padded_data),
    replace(RIGHT, __name__="labels shifted after sharding", labels=sharded_then_shifted),
    replace(RIGHT, __name__="labels over the end of documents", labels=over_the_end_of_documents),
    replace(RIGHT, __name__="padding counted in the loss", labels=padding_counted),
    replace(RIGHT, __name__="local positions", positions=counted_from_zero),
    replace(RIGHT, __name__="positions of another layout", positions=of_another_layout),
    replace(RIGHT, __name__="loss by each rank's count", count=of_this_rank),
    replace(RIGHT, __name__="weights divided by tokens", count=tokens_for_weights),
    replace(RIGHT, __name__="weights not shifted", weights=unshifted_weights),
    replace(RIGHT, __name__="mean of gradients", reduce=mean_gradients),
)
