"""The contract of exercise 09, the backward ring."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e09_backward_ring import block, couriers, traffic

EXERCISE = Exercise(
    id="09",
    slug="09_backward_ring",
    title="The backward ring",
    stages=(block.DELTA_STAGE, block.BLOCK_STAGE, couriers.STAGE, traffic.STAGE),
)
