"""Exercise 06, what it costs: the overlap threshold, a makespan, a double-buffered ring, a published table."""

from __future__ import annotations

from ringlab.course.contract import ATTENTION, Exercise
from ringlab.course.contracts import e06_makespan, e06_overlap, e06_table, e06_threshold

EXERCISE = Exercise(
    id="06",
    slug="06_what_it_costs",
    title="What it costs",
    stages=(e06_threshold.STAGE, e06_makespan.STAGE, e06_overlap.STAGE, e06_table.STAGE),
    may_use=("ringlab.blocks", "ringlab.merge", "ringlab.plan", ATTENTION),
)
