"""Exercise 09: the backward ring."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e09_backward_ring.block import BLOCK_STAGE, DELTA_STAGE
from ringlab_course.exercises.e09_backward_ring.ring import STAGE as RING
from ringlab_course.exercises.e09_backward_ring.traffic import STAGE as TRAFFIC

EXERCISE = Exercise(
    id="09",
    slug="09_backward_ring",
    title="The backward ring",
    stages=(DELTA_STAGE, BLOCK_STAGE, RING, TRAFFIC),
)
