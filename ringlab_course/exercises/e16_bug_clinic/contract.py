"""Exercise 16, the bug clinic: a chart for each of eight patients, and each of them mended."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e16_bug_clinic import charts as e16_charts
from ringlab_course.exercises.e16_bug_clinic import mend as e16_mend

EXERCISE = Exercise(
    id="16",
    slug="16_bug_clinic",
    title="Bug clinic",
    stages=(e16_charts.STAGE, *e16_mend.STAGES),
    may_use=("ringlab_course.clinic.__init__", "ringlab_course.clinic.bedside"),
)
