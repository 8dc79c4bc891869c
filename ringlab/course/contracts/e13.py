"""Exercise 13, the lab sheet: a launch, a profile's lanes, honest seconds, an honest report, and who holds the ring up."""

from __future__ import annotations

from ringlab.course.contract import Exercise
from ringlab.course.contracts import e13_lanes, e13_launch, e13_report, e13_seconds, e13_straggler

EXERCISE = Exercise(
    id="13",
    slug="13_multi_gpu",
    title="Multi-GPU ring attention",
    stages=(e13_launch.STAGE, e13_lanes.STAGE, e13_seconds.STAGE, e13_report.STAGE, e13_straggler.STAGE),
)
