"""Exercise 10: measure an error, fold in float32, choose a tolerance, find the precision bug from error curves."""

from __future__ import annotations

from ringlab_course.checking.contract import ATTENTION, Exercise
from ringlab_course.exercises.e10_numerics import accept, diagnose, error, fold

EXERCISE = Exercise(
    id="10",
    slug="10_numerics",
    title="Numerics",
    stages=(error.STAGE, fold.STAGE, accept.STAGE, diagnose.STAGE),
    may_use=(
        *("ringlab.oracle", "ringlab.merge", "ringlab.viz", ATTENTION),
        *(f"ringlab_course.figures.{name}" for name in ("__init__", "error_curves")),
        *("ringlab.conformance.__init__", "ringlab.conformance.tolerance"),
    ),
)
