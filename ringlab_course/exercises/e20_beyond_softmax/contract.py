"""Exercise 20, rings beyond softmax: a chunk of linear attention, transitions, the scan, the layer."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e20_beyond_softmax import chunk as e20_chunk
from ringlab_course.exercises.e20_beyond_softmax import layer as e20_layer
from ringlab_course.exercises.e20_beyond_softmax import scan as e20_scan
from ringlab_course.exercises.e20_beyond_softmax import transition as e20_transition

EXERCISE = Exercise(
    id="20",
    slug="20_beyond_softmax",
    title="Rings beyond softmax",
    stages=(e20_chunk.STAGE, e20_transition.STAGE, e20_scan.STAGE, e20_layer.STAGE),
)
