"""Exercise 15, choosing: bytes by schedule, a decision report, and a decode step on a sharded cache."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e15_choosing import choose as e15_choose
from ringlab_course.exercises.e15_choosing import decode as e15_decode
from ringlab_course.exercises.e15_choosing import traffic as e15_traffic

EXERCISE = Exercise(
    id="15",
    slug="15_choosing",
    title="Choosing: ring, all-gather, Ulysses, hybrid, decode",
    stages=(e15_traffic.STAGE, e15_choose.STAGE, e15_decode.STAGE),
)
