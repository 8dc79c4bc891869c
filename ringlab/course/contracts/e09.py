"""Exercise 09: the backward ring."""

from __future__ import annotations

from ringlab.course.contract import Exercise
from ringlab.course.contracts.e09_block import BLOCK_STAGE, DELTA_STAGE
from ringlab.course.contracts.e09_ring import STAGE as RING
from ringlab.course.contracts.e09_traffic import STAGE as TRAFFIC

EXERCISE = Exercise(
    id="09",
    slug="09_backward_ring",
    title="The backward ring",
    stages=(DELTA_STAGE, BLOCK_STAGE, RING, TRAFFIC),
)
