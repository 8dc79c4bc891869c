"""One step of a model of transformers over a ring, and the usual mistakes as data. Processes import it as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ringlab import VirtualCluster, hf, ring_attention
from ringlab.comm.ring import Ring
from ringlab.hf import attention
from ringlab.hf.masks import LayerMask
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.nn import Context, sum_gradients
from ringlab.nn.loss import loss_share, summed
from tests.hf.models import IGNORE, Batch, Step, build, exact, gradients_of

Shard = Callable[[Context, Batch], dict[str, Any]]


def sharded(context: Context, batch: Batch) -> dict[str, Any]:
    return hf.shard_batch(context, batch.input_ids, labels=batch.labels, **batch.given())


def step_over(
    ring: Ring,
    config: PreTrainedConfig,
    layout: Layout,
    batch: Batch,
    shard: Shard = sharded,
    recompute: bool = False,
    **options: Any,
) -> Step:
    """What a user writes, on one rank: the loss of all ranks, and the gradients summed."""
    model = build(config, "ringlab")
    if recompute:
        model.gradient_checkpointing_enable()
    with hf.context(ring, layout, _mask(batch), **options) as context:
        loss = model(**shard(context, batch)).loss
    loss.backward()
    sum_gradients(model, ring)
    return Step(float(summed(loss.detach(), ring)), gradients_of(model))


def exact_step_over(ring: Ring, config: PreTrainedConfig, layout: Layout, batch: Batch) -> Step:
    """The same in float64 all the way; transformers' own loss is made of logits in float32."""
    model = exact(build(config, "ringlab", torch.float64))
    with hf.context(ring, layout, _mask(batch)) as context:
        given = sharded(context, batch)
        labels, count = given.pop("shift_labels"), given.pop("num_items_in_batch")
        del given["labels"]
        loss = loss_share(model(**given).logits, labels, count)
    loss.backward()
    sum_gradients(model, ring)
    return Step(float(summed(loss.detach(), ring)), gradients_of(model))


def over(config: PreTrainedConfig, layout: Layout, batch: Batch, **options: Any) -> list[Step]:
    """What each rank of a virtual cluster has at the end."""
    return run(partial(step_over, config=config, layout=layout, batch=batch, **options), layout.P)


def run(program: Callable[[Ring], Any], P: int) -> list[Any]:
    return VirtualCluster(P, memory=False).run(program).results


def _mask(batch: Batch) -> Mask | None:
    return None if batch.position_ids is None else hf.mask_of(batch.position_ids)


# Mistakes of an adapter. Those of masks change what ring_attention is given.


def counted_from_zero(context: Context, batch: Batch) -> dict[str, Any]:
    given = sharded(context, batch)
    return given | {"position_ids": torch.arange(given["input_ids"].shape[1])[None]}


def counted_from_the_ranks_before(context: Context, batch: Batch) -> dict[str, Any]:
    given = sharded(context, batch)
    before = sum(context.layout.lengths[: context.ring.rank])
    return given | {"position_ids": before + torch.arange(given["input_ids"].shape[1])[None]}


def shifted_after_sharding(context: Context, batch: Batch) -> dict[str, Any]:
    given = sharded(context, batch)
    mine = context.shard(batch.labels)
    shifted = torch.nn.functional.pad(mine, (0, 1), value=IGNORE)[:, 1:]
    return given | {"labels": shifted, "shift_labels": shifted}


def not_shifted(context: Context, batch: Batch) -> dict[str, Any]:
    mine = context.shard(batch.labels)
    return sharded(context, batch) | {"labels": mine, "shift_labels": mine}


def counted_by_each_rank(context: Context, batch: Batch) -> dict[str, Any]:
    given = sharded(context, batch)
    return given | {"num_items_in_batch": max(1, int((given["labels"] != IGNORE).sum()))}


def without_windows(mask: Mask) -> Mask:
    return replace(mask, window=None)


def with_one_more_key(mask: Mask) -> Mask:
    """A window that does not count the row itself."""
    return mask if mask.window is None else replace(mask, window=mask.window + 1)


def without_documents(mask: Mask) -> Mask:
    return replace(mask, documents=())


def not_causal(mask: Mask) -> Mask:
    return replace(mask, causal=False)


def as_asked(mask: Mask) -> Mask:
    return mask


def positions_unchecked(self: LayerMask, ids: Tensor) -> None:
    """In place of the check that refuses wrong positions, to see that they are wrong."""


@dataclass(frozen=True)
class Mutant:
    """A wrong way to shard a batch, or to pass on a mask."""

    name: str
    shard: Shard = sharded
    passed_on: Callable[[Mask], Mask] = as_asked
    unchecked: bool = False

    def spoil(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the mistake in the adapter's place."""

        def wrong(*tensors: Tensor, mask: Mask, **options: Any) -> Any:
            return ring_attention(*tensors, mask=self.passed_on(mask), **options)

        monkeypatch.setattr(attention, "ring_attention", wrong)
        if self.unchecked:
            monkeypatch.setattr(LayerMask, "check_positions", positions_unchecked)


MUTANTS = (
    Mutant("sliding_window ignored", passed_on=without_windows),
    Mutant("sliding_window one longer", passed_on=with_one_more_key),
    Mutant("documents ignored", passed_on=without_documents),
    Mutant("not causal", passed_on=not_causal),
    Mutant("local position ids", counted_from_zero, unchecked=True),
    Mutant("position ids after the ranks before", counted_from_the_ranks_before, unchecked=True),
    Mutant("labels shifted after sharding", shifted_after_sharding),
    Mutant("labels never shifted", not_shifted),
    Mutant("loss by each rank's count", counted_by_each_rank),
)
