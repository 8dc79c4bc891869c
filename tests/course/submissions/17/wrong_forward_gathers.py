# expects: check=17.forward:messages misconception=gathers
import jax.numpy as jnp
from jax import lax

from ringlab.course.mesh.blocks import attend, identity, merge


def ring_forward(q, k, v, positions):
    P, rank = len(positions), lax.axis_index("ring")
    keys, values = (lax.all_gather(x, "ring") for x in (k, v))
    state = identity(q)
    for step in range(P):
        origin = (rank - step) % P
        state = merge(state, attend(q, keys[origin], values[origin], sees(positions, step)))
    return state


def sees(positions, step):
    """True where this device's queries see the keys that are here after `step` shifts."""
    rank, deal = lax.axis_index("ring"), jnp.asarray(positions)
    return deal[rank][:, None] >= deal[(rank - step) % len(positions)]
