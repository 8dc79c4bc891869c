"""Exercise 05, the emulated ring: one step, the forward ring, the causal ring."""

from __future__ import annotations

from ringlab.course.contract import Exercise
from ringlab.course.contracts import e05_causal, e05_ring, e05_step

EXERCISE = Exercise(
    id="05",
    slug="05_emulated_ring",
    title="The emulated ring",
    stages=(e05_step.STAGE, e05_ring.STAGE, e05_causal.STAGE),
)
