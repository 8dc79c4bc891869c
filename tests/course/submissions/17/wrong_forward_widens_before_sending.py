# expects: check=17.forward:wire misconception=widens_before_sending
import jax.numpy as jnp
from jax import lax

from ringlab.course.mesh.blocks import attend, merge


def ring_forward(q, k, v, positions):
    """Return (out, lse) of this device's queries over the keys of all devices."""
    def body(carry, step):
        state, k, v = carry
        k, v = shift(k, v)
        return (merge(state, attend(q.astype(jnp.float32), k, v, sees(positions, step))), k, v), None

    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    state = attend(q.astype(jnp.float32), k, v, sees(positions, 0))
    (state, _, _), _ = lax.scan(body, (state, k, v), jnp.arange(1, len(positions)))
    return state


def shift(*block):
    """Hand the block to the next device; return what came from the previous one."""
    P = lax.axis_size("ring")
    return lax.ppermute(block, "ring", [(rank, (rank + 1) % P) for rank in range(P)])


def sees(positions, step):
    """True where this device's queries see the keys that are here after `step` shifts."""
    rank, deal = lax.axis_index("ring"), jnp.asarray(positions)
    return deal[rank][:, None] >= deal[(rank - step) % len(positions)]
