"""transformers' Trainer over a ring. Batches, token counts and losses are those of one process per ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor

from ringlab.comm.ring import Ring
from ringlab.errors import TrainingError, WorldSizeError
from ringlab.hf.batch import shard_batch
from ringlab.hf.context import context
from ringlab.packing import Packing

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

        Raises: TrainingError for label smoothing or a loss function, which would be ignored; the errors of
        `ringlab.hf.context` and `shard_batch`, such as AgreementError if ranks of a ring have different
        batches.
        """
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise TrainingError(
                "the loss of the model", "label_smoothing_factor= or compute_loss_func=", "leave it out"
            )
        ring, world = self._ring(), self.args.world_size
        packing = Packing.of_batch(inputs)
        layout = packing.layout(self.layout, ring.world_size)
        with context(ring, layout, packing.mask(), **self.options) as around:
            labels = packing.pack(inputs["labels"], fill=-100)
            batch = shard_batch(around, packing.pack(inputs["input_ids"]), labels=labels)
            factor = ring.world_size
            if num_items_in_batch is not None:
                batch["num_items_in_batch"] = num_items_in_batch
                # transformers has summed this number over all processes.
                if self.args.average_tokens_across_devices and world > 1:
                    batch["num_items_in_batch"], factor = num_items_in_batch / ring.world_size, world
            outputs = model(**batch)
        loss = factor * outputs["loss"]
        return (loss, outputs) if return_outputs else loss

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
