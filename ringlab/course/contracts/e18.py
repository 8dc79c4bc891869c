"""Exercise 18, the capstone: a whole ring attention of the learner's own, held to the conformance suite."""

from __future__ import annotations

from ringlab.course.contract import Exercise
from ringlab.course.contracts.e18_parts import BLOCK_STAGE, MERGE_STAGE, OWNED_STAGE
from ringlab.course.contracts.e18_ring import BACKWARD_STAGE, FORWARD_STAGE

EXERCISE = Exercise(
    id="18",
    slug="18_capstone",
    title="Capstone: your own ring attention",
    stages=(OWNED_STAGE, BLOCK_STAGE, MERGE_STAGE, FORWARD_STAGE, BACKWARD_STAGE),
    about=tuple(f"ringlab.layout.{name}" for name in ("contiguous", "striped", "zigzag", "dealt")),
)
