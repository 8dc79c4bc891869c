"""Exercise 11, real processes: an order without deadlock, shards of any length, a rank that dies."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e11_real_processes import lost as e11_lost
from ringlab_course.exercises.e11_real_processes import order as e11_order
from ringlab_course.exercises.e11_real_processes import uneven as e11_uneven

EXERCISE = Exercise(
    id="11",
    slug="11_real_processes",
    title="Real processes",
    stages=(e11_order.STAGE, e11_uneven.STAGE, e11_lost.STAGE),
)
