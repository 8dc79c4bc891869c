"""Exercise 21, the capstone: the learner's own complete ring attention, judged by the conformance suite."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.checking.forbidden import makers_of_layouts
from ringlab_course.exercises.e21_capstone.parts import BLOCK_STAGE, MERGE_STAGE, OWNED_STAGE
from ringlab_course.exercises.e21_capstone.ring import BACKWARD_STAGE, FORWARD_STAGE

EXERCISE = Exercise(
    id="21",
    slug="21_capstone",
    title="Capstone: your own ring attention",
    stages=(OWNED_STAGE, BLOCK_STAGE, MERGE_STAGE, FORWARD_STAGE, BACKWARD_STAGE),
    about=makers_of_layouts(),
)
