"""The learning rate of each step: a warm-up and then a decay. It depends only on the step's number.

A step is one update of the weights. All micro-batches and ranks of a step have the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ringlab.errors import TrainingError

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
}
"""The ways to decay. A function takes the share of the decay that is done, from 0 to below 1. It returns the
rate as a share of the way from the final rate (0) to the peak rate (1)."""


def learning_rate(
    step: int, steps: int, peak: float, *, warmup: int = 0, decay: str = "constant", final: float = 0.0
) -> float:
    """Return the learning rate of step `step`, counted from 0, in a training of `steps` steps.

    The rate is peak · (step + 1) / warmup in the first `warmup` steps. Then it decays from `peak` towards
    `final`, which it would reach one step after the last step. Even with a decay to zero, no step has the
    rate zero.

    Raises: TrainingError for an unknown decay, or a warm-up that is negative or longer than the training.
    Source: the cosine, arXiv 1608.03983, equation 5.

    >>> [learning_rate(step, 6, 0.8, warmup=2, decay="linear") for step in range(6)]
    [0.4, 0.8, 0.8, 0.6000000000000001, 0.4, 0.2]
    """
    check(steps, warmup, decay)
    if step < warmup:
        return peak * (step + 1) / warmup
    share = DECAYS[decay](min(1.0, (step - warmup) / max(1, steps - warmup)))
    return share * peak + (1 - share) * final


def check(steps: int, warmup: int, decay: str) -> None:
    """Check a schedule's name and lengths. Raises: as `learning_rate`."""
    if decay not in DECAYS:
        raise TrainingError(f"decay= one of {', '.join(DECAYS)}", repr(decay))
    if not isinstance(warmup, int) or not 0 <= warmup <= steps:
        raise TrainingError(f"warmup= 0 to {steps} steps, the length of the training", f"{warmup!r}")
