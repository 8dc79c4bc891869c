"""Exercise 17, the ring in JAX: shard_map and ppermute, a sliding window, couriers with custom_vjp."""

from __future__ import annotations

from ringlab_course.checking.contract import Exercise
from ringlab_course.exercises.e17_ring_in_jax import couriers as e17_couriers
from ringlab_course.exercises.e17_ring_in_jax import forward as e17_forward
from ringlab_course.exercises.e17_ring_in_jax import window as e17_window

EXERCISE = Exercise(
    id="17",
    slug="17_ring_in_jax",
    title="The same ring in JAX",
    stages=(e17_forward.STAGE, e17_window.STAGE, e17_couriers.STAGE),
    may_use=("ringlab_course.mesh",),
)
