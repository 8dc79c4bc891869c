"""Exercise 18, packed batches: bounds from position ids, a packed shard, the ring, weights of the loss."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e18_packed_batches import bounds as e18_bounds
from ringlab_course.exercises.e18_packed_batches import ring as e18_ring
from ringlab_course.exercises.e18_packed_batches import shard as e18_shard
from ringlab_course.exercises.e18_packed_batches import weights as e18_weights

EXERCISE = Exercise(
    id="18",
    slug="18_packed_batches",
    title="Packed and variable-length batches",
    stages=(e18_bounds.STAGE, e18_shard.STAGE, e18_ring.STAGE, e18_weights.STAGE),
    may_use=("ringlab.merge",),
)
