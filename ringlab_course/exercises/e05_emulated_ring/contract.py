"""Exercise 05, the emulated ring: one step, the forward ring, the causal ring."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e05_emulated_ring import causal as e05_causal
from ringlab_course.exercises.e05_emulated_ring import ring as e05_ring
from ringlab_course.exercises.e05_emulated_ring import step as e05_step

EXERCISE = Exercise(
    id="05",
    slug="05_emulated_ring",
    title="The emulated ring",
    stages=(e05_step.STAGE, e05_ring.STAGE, e05_causal.STAGE),
)
