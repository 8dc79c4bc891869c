"""Exercise 15, choosing: bytes by schedule, a decision report, and a decode step on a sharded cache."""

from __future__ import annotations

from ringlab.course.contract import Exercise
from ringlab.course.contracts import e15_choose, e15_decode, e15_traffic

EXERCISE = Exercise(
    id="15",
    slug="15_choosing",
    title="Choosing: ring, all-gather, Ulysses, hybrid, decode",
    stages=(e15_traffic.STAGE, e15_choose.STAGE, e15_decode.STAGE),
)
