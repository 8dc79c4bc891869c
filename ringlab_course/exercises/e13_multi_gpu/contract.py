"""Exercise 13, the lab sheet: a launch, a profile's lanes, honest seconds and reports, a ring's delays."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e13_multi_gpu import lanes as e13_lanes
from ringlab_course.exercises.e13_multi_gpu import launch as e13_launch
from ringlab_course.exercises.e13_multi_gpu import report as e13_report
from ringlab_course.exercises.e13_multi_gpu import seconds as e13_seconds
from ringlab_course.exercises.e13_multi_gpu import straggler as e13_straggler

EXERCISE = Exercise(
    id="13",
    slug="13_multi_gpu",
    title="Multi-GPU ring attention",
    stages=(e13_launch.STAGE, e13_lanes.STAGE, e13_seconds.STAGE, e13_report.STAGE, e13_straggler.STAGE),
)
