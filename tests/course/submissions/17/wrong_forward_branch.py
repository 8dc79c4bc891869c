# expects: check=17.forward:values misconception=branch
import jax.numpy as jnp
from jax import lax

from ringlab.course.mesh.blocks import attend, merge


def ring_forward(q, k, v, positions):
    rank, P = lax.axis_index("ring"), len(positions)
    state = attend(q, k, v, sees(positions, 0))
    for step in range(1, P):
        k, v = lax.cond(rank >= step, lambda block: tuple(shift(*block)), lambda block: block, (k, v))
        state = merge(state, attend(q, k, v, sees(positions, step)))
    return state


def shift(*block):
    """Hand the block to the next device; return what came from the previous one."""
    P = lax.axis_size("ring")
    return lax.ppermute(block, "ring", [(rank, (rank + 1) % P) for rank in range(P)])


def sees(positions, step):
    """True where this device's queries see the keys that are here after `step` shifts."""
    rank, deal = lax.axis_index("ring"), jnp.asarray(positions)
    return deal[rank][:, None] >= deal[(rank - step) % len(positions)]
