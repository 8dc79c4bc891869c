"""This rank's part of a whole batch: positions stay global, and labels are shifted before they are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from ringlab.errors import DeviceError, MaskError, ShapeError, TrainingError
from ringlab.hf.held import held_or_none
from ringlab.hf.masks import unpadded
from ringlab.mask import Mask
from ringlab.nn.context import Context
from ringlab.nn.loss import IGNORE, next_tokens
from ringlab.rank_agreement import cut_alike
from ringlab.upload import upload


def mask_of(position_ids: Int[Tensor, "*rows S"], **other: Any) -> Mask:
    """Return the mask of a packed batch, given the position ids of one or more rows. A 0 begins a document.

    other: further fields of the mask, such as window=.
    Raises: MaskError if rows are packed differently, or ids neither ascend by one nor begin again at 0.

    >>> mask_of(torch.tensor([[0, 1, 2, 0, 1]])).documents
    (3, 2)
    """
    rows = position_ids if position_ids.ndim == 2 else position_ids[None]
    if rows.ndim != 2 or len(rows) == 0 or bool((rows != rows[:1]).any()):
        raise MaskError(
            "rows that are packed alike",
            f"position ids of shape {tuple(position_ids.shape)}"
            + " that differ between rows" * (rows.ndim == 2),
            "make one row of them: packing = ringlab.packing.Packing.of_batch(batch); packing.pack(input_ids)",
        )
    return Mask.of_position_ids(rows[0], **other)


def shard_batch(
    context: Context,
    input_ids: Int[Tensor, "..."],
    *,
    labels: Int[Tensor, "..."] | None = None,
    position_ids: Int[Tensor, "..."] | None = None,
    attention_mask: Shaped[Tensor, "..."] | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of a model's forward on this rank, given WHOLE sequences, (B, S) each.

    labels: not shifted, as transformers expects them, and −100 where a token does not count. No token gets a
    label from another document of the context's mask. The model's loss is then this rank's share: the sum
    over its tokens, divided by the number of tokens that count on all ranks. The whole loss is the SUM of
    the shares, and the gradient is the sum of the ranks' gradients (`ringlab.nn.sum_gradients`). With data
    parallelism, set "num_items_in_batch" to the number over all replicas.
    position_ids: by default the positions in the mask's documents, or the global positions if the mask has no
    documents.
    attention_mask: 0 for padding. Padding must be at the end of rows, under a causal mask, so that no token
    that counts sees it. Labels of padding are set to −100, and the model's output for padding is meaningless.

    Raises: ShapeError for shapes that do not fit; MaskError for padding elsewhere, or for position ids that
    differ between rows or contradict the mask; TrainingError if no label counts; DeviceError for tensors
    without data. If one rank raises such an error, all others raise AgreementError, as do all ranks of a
    ring if their batches differ. The ranks compare a hash of the batch, unless the context has
    validate=False.

    >>> from ringlab import VirtualCluster, zigzag
    >>> from ringlab.hf import context, shard_batch
    >>> def program(ring):
    ...     with context(ring, zigzag(8, 2)) as around:
    ...         batch = shard_batch(around, torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17]]))
    ...     return batch["input_ids"].tolist(), batch["position_ids"].tolist()
    >>> for ids, positions in VirtualCluster(2).run(program).results:
    ...     print(ids, positions)
    [[10, 11, 16, 17]] [[0, 1, 6, 7]]
    [[12, 13, 14, 15]] [[2, 3, 4, 5]]
    """
    whole = {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "attention_mask": attention_mask,
    }
    arrays = {name: x for name, x in whole.items() if x is not None}
    return cut_alike(context.ring, arrays, lambda: _shard(context, **whole), context.validate)  # type: ignore[arg-type]


def _shard(
    context: Context,
    input_ids: Tensor,
    labels: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
) -> dict[str, Any]:
    """Return the result of `shard_batch` for this rank's whole batch. Raises: as `shard_batch`."""
    if any(x is not None and x.is_meta for x in (input_ids, labels, position_ids, attention_mask)):
        raise DeviceError(
            "tensors with data", "tensors on the device meta", "make the batch on the CPU or a GPU"
        )
    if input_ids.ndim != 2:
        raise ShapeError("input_ids (batch, tokens)", f"shape {tuple(input_ids.shape)}")
    for name, x in (("labels", labels), ("attention_mask", attention_mask)):
        if x is not None and x.shape != input_ids.shape:
            raise ShapeError(f"{name} of input_ids' shape {tuple(input_ids.shape)}", f"{tuple(x.shape)}")
    mine = context.shard(input_ids)
    batch: dict[str, Any] = {
        "input_ids": mine,
        "attention_mask": torch.ones_like(
            mine
        ),  # otherwise transformers would look for documents in the positions of a shard
        "position_ids": upload(_positions(context, position_ids), mine.device),
        "use_cache": False,
    }
    around = held_or_none()
    if around is not None:
        around.padded = attention_mask is not None and not bool(attention_mask.all())
    if attention_mask is not None:
        _check_padding(context, attention_mask)
    if labels is not None:
        after = _shifted(labels, attention_mask, context.mask)
        count = int((after != IGNORE).sum())
        if not count:
            raise TrainingError("a batch in which at least one label counts", "every label ignored")
        share = context.shard(after)
        batch |= {"labels": share, "shift_labels": share, "num_items_in_batch": count}
    return batch


def _shifted(labels: Tensor, attention_mask: Tensor | None, mask: Mask | None) -> Tensor:
    """Return each token's label, which is the label of the next token in its document.

    Padding and the last token of a document get no label.
    """
    if attention_mask is not None:
        labels = labels.masked_fill(attention_mask == 0, IGNORE)
    return next_tokens(labels, mask)


def _positions(context: Context, given: Tensor | None) -> Tensor:
    """Return this rank's position ids, (1, L)."""
    layout, mask = context.layout, context.mask
    if given is None:
        whole = np.arange(layout.S) if mask is None else mask.position_ids(np.arange(layout.S))
        return context.shard(torch.from_numpy(whole)[None])
    rows = given if given.ndim == 2 else given[None]
    if bool((rows != rows[:1]).any()):
        raise MaskError(
            "rows that are packed alike", "position ids that differ between rows", "pack them into one row"
        )
    if rows.shape[-1] != layout.S:
        raise ShapeError(
            f"{layout.S} position ids", f"shape {tuple(given.shape)}", "pass those of the whole sequence"
        )
    _check_whole(rows[0], mask or Mask())
    return context.shard(rows[:1])


def _check_whole(ids: Tensor, mask: Mask) -> None:
    """Raise MaskError unless the ids are global positions, or start again where the mask's documents do."""
    given, everyone = ids.detach().cpu().numpy(), np.arange(len(ids))
    known = everyone, mask.position_ids(everyone)
    if any(np.array_equal(given, each) for each in known):
        return
    offset = max(0, int(given[0]))  # some models' ids begin at 1 or 2
    named = f"position_ids - {offset}" if offset else "position_ids"
    remedies = [f"pass {named}"] if offset else []
    if not any(np.array_equal(given - offset, each) for each in known):
        remedies.append(f"make the context with mask=ringlab.hf.mask_of({named})")
    raise MaskError(
        "position ids that ascend by one, or begin again at 0 where the mask's documents begin",
        f"{given[:8].tolist()}…, and {len(mask.documents) or 'no'} documents in the mask",
        "; ".join(remedies),
    )


def _check_padding(context: Context, attention_mask: Tensor) -> None:
    """Raise MaskError unless padding is at the end of each row, where no token that counts sees it."""
    kept = attention_mask != 0
    if bool(kept.all()):
        return
    mask = context.mask or Mask()
    holes = bool((kept[:, 1:] & ~kept[:, :-1]).any())
    if holes or not mask.causal or any(mask.prefixes):
        why = "with holes, or at the beginning" if holes else "under a mask that lets tokens see it"
        raise MaskError(
            "padding at the end of rows, under a causal mask without prefixes",
            f"padding {why}",
            unpadded(mask.causal),
        )
