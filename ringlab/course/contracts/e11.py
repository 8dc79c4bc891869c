"""Exercise 11, real processes: an order without deadlock, shards of any length, a rank that dies."""

from __future__ import annotations

from ringlab.course.contract import Exercise
from ringlab.course.contracts import e11_lost, e11_order, e11_uneven

EXERCISE = Exercise(
    id="11",
    slug="11_real_processes",
    title="Real processes",
    stages=(e11_order.STAGE, e11_uneven.STAGE, e11_lost.STAGE),
)
