"""The solution, without its comments."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ringlab_course.mesh.blocks import attend, attend_backward, merge


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
    """True where this device's queries see the keys that are here after `step` shifts."""
    rank, deal = lax.axis_index("ring"), jnp.asarray(positions)
    return deal[rank][:, None] >= deal[(rank - step) % len(positions)]


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
    """The largest number of hops after which a block still meets a query that sees one of its keys."""
    P, needed = len(positions), [0]
    for step in range(1, P):
        ages = positions[:, :, None] - np.roll(positions, step, axis=0)[:, None, :]
        if ((ages >= 0) & (ages < window)).any():
            needed.append(step)
    return max(needed)


def courier_ring(q, k, v, positions):
    """Return (out, lse) like `ring_forward`; gradients travel with the blocks that they belong to."""
    attention = jax.custom_vjp(lambda q, k, v: ring_forward(q, k, v, positions))
    attention.defvjp(
        lambda q, k, v: keep(q, k, v, positions),
        lambda kept, cotangents: backward(kept, cotangents, positions),
    )
    return attention(q, k, v)


def keep(q, k, v, positions):
    """Return ((out, lse), what the backward needs)."""
    out, lse = ring_forward(q, k, v, positions)
    return (out, lse), (q, k, v, out, lse)


def backward(kept, cotangents, positions):
    """Return (dq, dk, dv) of this device's q, k and v."""
    (q, k, v, out, lse), (dout, dlse) = kept, cotangents
    delta = (dout * out).sum(-1) - dlse

    def body(carry, step):
        dq, k, v, dk, dv = carry[0], *shift(*carry[1:])
        more = attend_backward(dout, q, k, v, lse, delta, sees(positions, step))
        return (dq + more[0], k, v, dk + more[1], dv + more[2]), None

    dq, dk, dv = attend_backward(dout, q, k, v, lse, delta, sees(positions, 0))
    (dq, _, _, dk, dv), _ = lax.scan(body, (dq, k, v, dk, dv), jnp.arange(1, len(positions)))
    return tuple(x.astype(q.dtype) for x in (dq, *shift(dk, dv)))
