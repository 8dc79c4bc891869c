"""Exercise 16, the bug clinic: a chart for each of eight patients, and each of them mended."""

from __future__ import annotations

from ringlab.course.contract import Exercise
from ringlab.course.contracts import e16_charts, e16_mend

EXERCISE = Exercise(
    id="16",
    slug="16_bug_clinic",
    title="Bug clinic",
    stages=(e16_charts.STAGE, *e16_mend.STAGES),
    may_use=("ringlab.course.clinic.__init__", "ringlab.course.clinic.bedside"),
)
