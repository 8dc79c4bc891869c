# expects: check=17.forward:layouts misconception=assumes_contiguous
import jax.numpy as jnp
from jax import lax

from ringlab.course.mesh.blocks import attend, merge


def ring_forward(q, k, v, positions):
    """Return (out, lse) of this device's queries over the keys of all devices."""
    def body(carry, step):
        state, k, v = carry
        k, v = shift(k, v)
        return (merge(state, attend(q, k, v, sees(positions, step))), k, v), None

    state = attend(q, k, v, sees(positions, 0))
    (state, _, _), _ = lax.scan(body, (state, k, v), jnp.arange(1, len(positions)))
    return state


def shift(*block):
    """Hand the block to the next device; return what came from the previous one."""
    P = lax.axis_size("ring")
    return lax.ppermute(block, "ring", [(rank, (rank + 1) % P) for rank in range(P)])


def sees(positions, step):
    P, L = positions.shape
    rank, own = lax.axis_index("ring"), jnp.arange(L)
    return (rank * L + own)[:, None] >= (rank - step) % P * L + own
