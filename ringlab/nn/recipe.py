"""`Recipe`: the model, the data and the hyperparameters of a training."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ringlab.blocks import known
from ringlab.errors import BackendError, TrainingError
from ringlab.layout import get_layout
from ringlab.mask import Mask
from ringlab.nn import rates
from ringlab.nn.precision import PRECISIONS
from ringlab.nn.transformer import ModelConfig
from ringlab.schedules import get_schedule


@dataclass(frozen=True)
class Recipe:
    """The model, the data and the hyperparameters: `steps` steps, each with `batch` sequences of S bytes.

    `layout`, `schedule` and `block` choose how attention is spread over the ranks. These fields,
    `micro_batches` and `save_every` may change between runs that share a checkpoint. `steps` may change too
    if the rate does not decay, but not to fewer than the finished steps. The other fields must not change.
    `save_every`: the number of steps between checkpoints. The last step is also saved.
    `warmup`, `decay`, `final_learning_rate`: as for `rates.learning_rate`.
    `clip`: the largest norm of the gradient, or None for no limit. `precision`: the dtype in which the model
    computes. Weights, summed gradients and the optimizer's state are float32 at least.
    `micro_batches`: the number of equal parts of the batch that are computed one after the other, to save
    memory.

    Raises: LayoutError for an unknown layout; BackendError for an unknown block; BackendError or
    WorldSizeError for an invalid schedule; MaskError for a window below 1; TrainingError for sizes below 1,
    rates that are negative or not finite, an unknown decay or precision, a warm-up longer than the training,
    or micro-batches that do not divide the batch.

    >>> Recipe(window=32).mask.window
    32
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    S: int = 256
    batch: int = 2
    steps: int = 200
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0
    window: int | None = None
    layout: str = "zigzag"
    schedule: str = "ring"
    block: str = "auto"
    save_every: int = 100
    warmup: int = 0
    decay: str = "constant"
    final_learning_rate: float = 0.0
    clip: float | None = None
    precision: str = "float32"
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name in ("S", "batch", "steps", "save_every", "micro_batches"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise TrainingError(f"{name}= at least 1, an integer", f"{value}")
        for name in ("learning_rate", "weight_decay", "final_learning_rate"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:  # false for NaN
                raise TrainingError(f"{name}= at least 0 and finite", f"{value!r}")
        if self.clip is not None and not (isinstance(self.clip, (int, float)) and self.clip > 0):
            raise TrainingError("clip= a norm above 0, or None", f"{self.clip!r}")
        if self.precision not in PRECISIONS:
            raise TrainingError(f"precision= one of {', '.join(PRECISIONS)}", repr(self.precision))
        if self.batch % self.micro_batches:
            got = f"batch={self.batch}, micro_batches={self.micro_batches}"
            raise TrainingError("micro_batches= a divisor of the batch", got)
        rates.check(self.steps, self.warmup, self.decay)
        if self.block not in (*known(), "auto"):
            raise BackendError(f"one of the blocks {', '.join(known())} or auto", repr(self.block))
        # These calls also check the recipe of a single process without a ring.
        _ = get_layout(self.layout, self.S, 1), self.mask, get_schedule(self.schedule)

    @property
    def mask(self) -> Mask | None:
        """Return the mask, or None for the plain causal mask."""
        return None if self.window is None else Mask(window=self.window)

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        return rates.learning_rate(
            step,
            self.steps,
            self.learning_rate,
            warmup=self.warmup,
            decay=self.decay,
            final=self.final_learning_rate,
        )

    def lasting(self) -> dict[str, object]:
        """Return the fields, by name, that must be equal in a run and in the checkpoint that it resumes."""
        passing = {"layout", "schedule", "block", "steps", "save_every", "micro_batches"}
        if self.decay != "constant":
            passing.remove("steps")  # the number of steps changes the rate of each step
        said = {name: value for name, value in asdict(self).items() if name not in passing}
        how_computed = ("feed_forward_block", "recompute")
        return said | {"model": {k: v for k, v in said["model"].items() if k not in how_computed}}

    @classmethod
    def of(cls, said: dict[str, Any]) -> Recipe:
        """Return the recipe, given the dictionary that `dataclasses.asdict` made from it.

        Raises: TypeError for unknown fields.
        """
        return cls(**said | {"model": ModelConfig(**said["model"])})

    def unusual(self) -> dict[str, object]:
        """Return the fields that differ from the defaults, by name; the model's are like "model.width".

        >>> Recipe(ModelConfig(width=32), clip=1.0).unusual()
        {'model.width': 32, 'clip': 1.0}
        """
        usual = flat(asdict(Recipe()))
        return {name: value for name, value in flat(asdict(self)).items() if value != usual[name]}


def flat(said: dict[str, Any]) -> dict[str, object]:
    """Return one dictionary of the model's sizes and the other fields, with a separate name for each.

    >>> flat({"model": {"width": 32}, "S": 8})
    {'model.width': 32, 'S': 8}
    """
    rest = {name: value for name, value in said.items() if name != "model"}
    return {f"model.{name}": value for name, value in said["model"].items()} | rest
