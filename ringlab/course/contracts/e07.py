"""Exercise 07, the causal imbalance: work per step, tiles of two runs, the ring on any layout, who waits."""

from __future__ import annotations

from ringlab.course.contract import Exercise
from ringlab.course.contracts import e07_makespan, e07_relation, e07_ring, e07_work

EXERCISE = Exercise(
    id="07",
    slug="07_causal_imbalance",
    title="The causal imbalance",
    stages=(e07_work.STAGE, e07_relation.STAGE, e07_ring.STAGE, e07_makespan.STAGE),
    may_use=("ringlab.merge",),
)
