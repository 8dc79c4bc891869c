"""Exercise 14, training in parallel: a shard of the batch, a share of the loss, the sum of gradients, and the step."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e14_training import loss as e14_loss
from ringlab_course.exercises.e14_training import shard as e14_shard
from ringlab_course.exercises.e14_training import step as e14_step
from ringlab_course.exercises.e14_training import sum as e14_sum

EXERCISE = Exercise(
    id="14",
    slug="14_training",
    title="Training a model in parallel",
    stages=(e14_shard.STAGE, e14_loss.STAGE, e14_sum.STAGE, e14_step.STAGE),
)
