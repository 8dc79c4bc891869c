"""Exercise 17, the ring in JAX: shard_map and ppermute, a window, couriers by custom_vjp."""

from __future__ import annotations

from ringlab.course.contract import Exercise
from ringlab.course.contracts import e17_couriers, e17_forward, e17_window

EXERCISE = Exercise(
    id="17",
    slug="17_ring_in_jax",
    title="The same ring in JAX",
    stages=(e17_forward.STAGE, e17_window.STAGE, e17_couriers.STAGE),
    may_use=("ringlab.course.mesh",),
)
