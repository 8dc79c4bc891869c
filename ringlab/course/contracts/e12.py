"""Exercise 12, the Triton ring step: one tile, the two ends, the step in one launch, tiles by the table."""

from __future__ import annotations

from ringlab.course.contract import Exercise
from ringlab.course.contracts import e12_ends, e12_steps

EXERCISE = Exercise(
    id="12",
    slug="12_triton_ring_step",
    title="The Triton ring step",
    stages=(e12_ends.TILE, e12_ends.ENDS, e12_steps.STEP, e12_steps.TABLE),
)
