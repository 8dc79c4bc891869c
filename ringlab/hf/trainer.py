"""transformers' Trainer over a ring. Batches, token counts and losses are those of one process per ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor

from ringlab.comm.ring import Ring
from ringlab.errors import TrainingError, WorldSizeError
from ringlab.hf.batch import shard_batch
from ringlab.hf.context import context
from ringlab.nn.loss import IGNORE, loss_share, valid_tokens
from ringlab.packing import Packing
from ringlab.packing.reading import ENTRIES

if TYPE_CHECKING:  # importing needs accelerate, and takes seconds
    from transformers import Trainer
else:
    Trainer = object


class OverRing(Trainer):
    """A base class that spreads the batches of Trainer over a ring: `class RingTrainer(OverRing, Trainer)`.

    ring: the ring of the ranks that share a sequence; None means all processes. The ranks of a ring must be
    consecutive.
    layout: the name of a layout, as for `Packing.layout`. Rows of a batch become documents of one sequence
    without padding.
    options: further arguments of `ringlab.hf.context`, such as {"schedule": "burst"}.
    causal: False for encoders that predict each token from its own output, such as BertForMaskedLM. Labels are then
    not shifted.

    Trainer itself would read a different batch on each process, count each label once for every rank of a
    ring, and take the mean of losses that are only shares. Here each ring reads one batch, the count is
    divided by the number of ranks in the ring, and the loss is multiplied to make up for the mean.

    >>> class NextStep:  # in place of transformers' Trainer
    ...     pass
    >>> class RingTrainer(OverRing, NextStep):
    ...     options = {"schedule": "allgather"}
    >>> RingTrainer.layout
    'per_document'
    """

    ring: Ring | None = None
    layout = "per_document"
    causal = True
    options: dict[str, Any] = {}  # noqa: RUF012  # a class attribute that users of Trainer override

    def get_train_dataloader(self) -> Any:
        """Return Trainer's loader, changed so that all ranks of a ring read the same part.

        Raises: as `_of_rings`.
        """
        return self._of_rings(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return Trainer's loader, changed so that all ranks of a ring read the same part.

        Raises: as `_of_rings`.
        """
        return self._of_rings(super().get_eval_dataloader(eval_dataset))

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Int[Tensor, ""] | int | None = None,
    ) -> Any:
        """Return this rank's share of the loss, scaled so that the mean over processes is the loss.

        With return_outputs, return (loss, outputs).

        Raises: TrainingError for label smoothing or a loss function, which would be ignored, and for a batch without
        labels or with entries that are not of tokens; the errors of `ringlab.hf.context` and `shard_batch`, such as
        AgreementError if ranks of a ring have different batches.
        """
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise TrainingError(
                "the model's own loss", "label_smoothing_factor= or compute_loss_func=", "leave it out"
            )
        ring, (packing, beside) = self._ring(), _packed(inputs)
        count, factor = self._count_and_factor(num_items_in_batch)
        ids, labels = packing.pack(inputs["input_ids"]), packing.pack(inputs["labels"], fill=IGNORE)
        layout, mask = packing.layout(self.layout, ring.world_size), packing.mask(causal=self.causal)
        with context(ring, layout, mask, **self.options) as around:
            batch = shard_batch(around, ids, labels=labels if self.causal else None)
            batch |= {name: around.shard(packing.pack(inputs[name])) for name in beside}
            if self.causal and count is not None:
                batch["num_items_in_batch"] = count
            outputs = model(**batch)
        if self.causal:
            loss = factor * outputs["loss"]
        else:
            own = around.shard(labels)
            count = valid_tokens(own, ring) if count is None else float(count)
            loss = factor * loss_share(outputs["logits"], own, count)
        return (loss, outputs) if return_outputs else loss

    def _count_and_factor(self, num_items: Any) -> tuple[Any, int]:
        """Return the number of labels by which a share is divided, and the factor of the loss.

        The number is None if the ring must count its labels.
        """
        P, world = self._ring().world_size, self.args.world_size
        # If transformers averages over devices, `num_items` is a sum over processes, and counts each label P times.
        if num_items is not None and self.args.average_tokens_across_devices and world > 1:
            return num_items / P, world
        return num_items, P

    def _ring(self) -> Ring:
        """Return the ring.

        Raises: WorldSizeError if its ranks are not consecutive, or if cp_size or sp_size is also set.
        """
        self.ring = ring = Ring.of_group() if self.ring is None else self.ring
        if self.args.process_index % ring.world_size != ring.rank or self.args.world_size % ring.world_size:
            got = f"{ring!r} on process {self.args.process_index} of {self.args.world_size}"
            raise WorldSizeError(
                "a ring of consecutive processes", got, 'init_device_mesh(…, ("dp", "cp"))["cp"]'
            )
        config = getattr(self.args, "parallelism_config", None)
        if getattr(config, "cp_size", 1) > 1 or getattr(config, "sp_size", 1) > 1:
            raise WorldSizeError(
                "only the ring's context parallelism", "accelerate's cp_size or sp_size too", "leave them out"
            )
        return ring

    def _of_rings(self, loader: Any) -> Any:
        """Return accelerate's loader with a part for each ring, not for each process.

        Raises: TrainingError for a loader in which one process reads batches and sends them to the others.
        """
        P, index, world = self._ring().world_size, self.args.process_index, self.args.world_size
        parts = [part for part in (loader.batch_sampler, loader.dataset) if hasattr(part, "num_processes")]
        if world > 1 and not parts:
            raise TrainingError(
                "a data loader from which each process reads a part",
                f"a {type(loader).__name__} of a {type(loader.dataset).__name__}",
                "TrainingArguments(accelerator_config={'dispatch_batches': False})",
            )
        for part in parts:
            part.num_processes, part.process_index = world // P, index // P
        return loader


_READ = {*ENTRIES, "input_ids", "labels", "shift_labels", "attention_mask", "max_length_q", "max_length_k"}
"""The entries of a batch that `Packing.of_batch` and `shard_batch` read, or make anew."""


def _packed(inputs: dict[str, Any]) -> tuple[Packing, list[str]]:
    """Return a batch's packing, and the names of further entries with a value for each token, such as "token_type_ids".

    Raises: TrainingError for a batch without token ids or labels, and for entries of another shape; MaskError, as
    `Packing.of_batch`.
    """
    lacking = [name for name in ("input_ids", "labels") if inputs.get(name) is None]
    if lacking:
        raise TrainingError(
            f"batches with {' and '.join(lacking)}",
            f"one of {', '.join(inputs)}",
            "a loss of another kind, such as DPO's, needs a loop of its own: docs/guide/packed.md",
        )
    packing, tokens = Packing.of_batch(inputs), tuple(inputs["input_ids"].shape)
    names = [name for name in inputs if name not in _READ and inputs[name] is not None]
    for name in names:
        shape = tuple(getattr(inputs[name], "shape", ()))
        if shape[:2] != tokens:
            got = f"{name} of shape {shape}" if shape else f"{name}={inputs[name]!r}"
            raise TrainingError(
                f"entries of a batch with a value for each token, {tokens}", got, "leave it out"
            )
    return packing, names
