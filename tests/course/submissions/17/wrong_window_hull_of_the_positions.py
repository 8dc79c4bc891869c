# expects: check=17.window:edges misconception=hull_of_the_positions
import jax.numpy as jnp
import numpy as np
from jax import lax

from ringlab.course.mesh.blocks import attend, merge


def window_ring(q, k, v, positions, window):
    """Return (out, lse) with a sliding window of `window` tokens."""
    rank, deal = lax.axis_index("ring"), jnp.asarray(positions)

    def near(step):
        age = deal[rank][:, None] - deal[(rank - step) % len(positions)]
        return (age >= 0) & (age < window)

    state = attend(q, k, v, near(0))
    for step in range(1, 1 + hops(positions, window)):
        k, v = shift(k, v)
        state = merge(state, attend(q, k, v, near(step)))
    return state


def hops(positions, window):
    """How many hops the block makes that goes furthest to somebody who sees a key of it."""
    P, needed = len(positions), [0]
    for step in range(1, P):
        first, last = positions.min(axis=1), positions.max(axis=1)
        if ((last >= np.roll(first, step)) & (first - np.roll(last, step) < window)).any():
            needed.append(step)
    return max(needed)


def shift(*block):
    """Hand the block to the next device; return what came from the previous one."""
    P = lax.axis_size("ring")
    return lax.ppermute(block, "ring", [(rank, (rank + 1) % P) for rank in range(P)])
