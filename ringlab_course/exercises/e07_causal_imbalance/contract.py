"""Exercise 07, the causal imbalance: work per step, tiles of two runs, a ring on any layout, a makespan."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e07_causal_imbalance import makespan as e07_makespan
from ringlab_course.exercises.e07_causal_imbalance import relation as e07_relation
from ringlab_course.exercises.e07_causal_imbalance import ring as e07_ring
from ringlab_course.exercises.e07_causal_imbalance import work as e07_work

EXERCISE = Exercise(
    id="07",
    slug="07_causal_imbalance",
    title="The causal imbalance",
    stages=(e07_work.STAGE, e07_relation.STAGE, e07_ring.STAGE, e07_makespan.STAGE),
    may_use=("ringlab.merge",),
)
