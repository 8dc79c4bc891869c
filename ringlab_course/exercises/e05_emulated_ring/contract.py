"""The contract of exercise 05, the emulated ring: one step, the forward ring, the causal ring."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e05_emulated_ring import causal, forward, step

EXERCISE = Exercise(
    id="05",
    slug="05_emulated_ring",
    title="The emulated ring",
    stages=(step.STAGE, forward.STAGE, causal.STAGE),
)
