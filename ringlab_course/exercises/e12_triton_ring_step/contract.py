"""Exercise 12, the Triton ring step: one tile, the two ends, the step in one launch, tiles from a table."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e12_triton_ring_step import ends as e12_ends
from ringlab_course.exercises.e12_triton_ring_step import steps as e12_steps

EXERCISE = Exercise(
    id="12",
    slug="12_triton_ring_step",
    title="The Triton ring step",
    stages=(e12_ends.TILE, e12_ends.ENDS, e12_steps.STEP, e12_steps.TABLE),
)
