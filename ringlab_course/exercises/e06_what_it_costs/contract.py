"""Exercise 06, what it costs: the overlap threshold, a makespan, a double-buffered ring, a published table."""

from __future__ import annotations

from ringlab_course.checking.contract import ATTENTION, Exercise
from ringlab_course.exercises.e06_what_it_costs import makespan as e06_makespan
from ringlab_course.exercises.e06_what_it_costs import overlap as e06_overlap
from ringlab_course.exercises.e06_what_it_costs import table as e06_table
from ringlab_course.exercises.e06_what_it_costs import threshold as e06_threshold

EXERCISE = Exercise(
    id="06",
    slug="06_what_it_costs",
    title="What it costs",
    stages=(e06_threshold.STAGE, e06_makespan.STAGE, e06_overlap.STAGE, e06_table.STAGE),
    may_use=("ringlab.blocks", "ringlab.merge", "ringlab.plan", "ringlab.scores", ATTENTION),
)
