# expects: check=17.forward:values misconception=turns
import jax.numpy as jnp
from jax import lax

from ringlab.course.mesh.blocks import attend, merge


def ring_forward(q, k, v, positions):
    rank = lax.axis_index("ring")

    def body(carry):
        step, state, k, v = carry
        k, v = shift(k, v)
        return step + 1, merge(state, attend(q, k, v, sees(positions, step))), k, v

    state = attend(q, k, v, sees(positions, 0))
    return lax.while_loop(lambda carry: carry[0] <= rank, body, (1, state, k, v))[1]


def shift(*block):
    """Hand the block to the next device; return what came from the previous one."""
    P = lax.axis_size("ring")
    return lax.ppermute(block, "ring", [(rank, (rank + 1) % P) for rank in range(P)])


def sees(positions, step):
    """True where this device's queries see the keys that are here after `step` shifts."""
    rank, deal = lax.axis_index("ring"), jnp.asarray(positions)
    return deal[rank][:, None] >= deal[(rank - step) % len(positions)]
