"""Exercise 14, training in parallel: a shard of the batch, a share of the loss, the sum of gradients, and the step."""

from __future__ import annotations

from ringlab.course.contract import Exercise
from ringlab.course.contracts import e14_loss, e14_shard, e14_step, e14_sum

EXERCISE = Exercise(
    id="14",
    slug="14_training",
    title="Training a model in parallel",
    stages=(e14_shard.STAGE, e14_loss.STAGE, e14_sum.STAGE, e14_step.STAGE),
)
