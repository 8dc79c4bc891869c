"""Exercise 19, serving: pages on ranks, merged partials, decode, prefill of a chunk, bytes sent."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e19_serving import decode as e19_decode
from ringlab_course.exercises.e19_serving import merge as e19_merge
from ringlab_course.exercises.e19_serving import place as e19_place
from ringlab_course.exercises.e19_serving import prefill as e19_prefill
from ringlab_course.exercises.e19_serving import travel as e19_travel

EXERCISE = Exercise(
    id="19",
    slug="19_serving",
    title="Serving a long context",
    stages=(e19_place.STAGE, e19_merge.STAGE, e19_decode.STAGE, e19_prefill.STAGE, e19_travel.STAGE),
)
