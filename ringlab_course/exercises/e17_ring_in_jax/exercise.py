# %% [markdown]
# # Exercise 17 · The same ring in JAX
#
# **You build** the ring as a program of one device: forward with any layout, with a window that saves hops, and with
# couriers for the gradients.
#
# **You need** [lesson 17](../notebooks/17_ring_in_jax.ipynb), and the extra `jax`. **Minutes** 60.
#
# | stage | function | what is checked |
# |---|---|---|
# | 17.forward | `ring_forward` | out and lse in any layout, 2(P − 1) messages in the *compiled* program, types |
# | 17.window | `window_ring` | a window in global positions, no unnecessary hop |
# | 17.couriers | `courier_ring` | all gradients, also through lse; messages, float32 couriers, memory |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded, on new inputs.
#
# **Not allowed:** JAX's and PyTorch's attention, and all of ringlab that this notebook does not import.

# %%
import numpy as np

from ringlab import zigzag
from ringlab_course import check, corpus, hint, needs_extra

needs_extra("jax")
import jax
import jax.numpy as jnp
from jax import lax

from ringlab_course.mesh.blocks import attend, attend_backward, identity, merge
from ringlab_course.mesh.examine import examine

# %% [markdown]
# ## What is given
#
# You write programs of *one device*. The checks put them into `shard_map` on P simulated devices, on a mesh with one axis
# `"ring"`. They compile each program, read the messages of the compiled program, and run it.
#
# - `q`, `k` and `v` are the device's parts, (B, H, L, D): here K = H, each query head has a K/V head of its own.
# - `positions` is a **NumPy** array (P, L). Row r lists the global positions that device r owns, in the order of its
#   tokens; they need not be sorted. Every device owns equally many, L ≥ 1. They are known while JAX traces; the rank,
#   `lax.axis_index("ring")`, is not.
#
# From lesson 17 you have these functions:
#
# - `attend(q, k, v, mask)` returns (out, lse) over one block; a row that sees nothing gives 0 and −inf.
# - `merge(a, b)` returns the state over the keys of both; `identity(q)` the state before any key.
# - `attend_backward(dout, q, k, v, lse, delta, mask)` returns the terms of one block for (dq, dk, dv), in float32.
#
# ## 17.forward · The ring in shard_map
#
# Compute causal attention over the blocks of all devices: a query sees a key if the key's *global* position is not after
# its own. Return `(out, lse)` in float32. Send blocks to the next device, rank + 1, with `lax.ppermute`, in the type that
# they have. Each device sends K and V P − 1 times; the *compiled* program is counted.
#
# Keep messages out of branches, such as `lax.cond`, and out of loops whose number of turns is unknown beforehand: if some
# devices do not send, others wait forever. The checks compile such a program but do not run it, even if all devices would
# take the same branch. One device alone has nobody to send to: P may be 1, and what a device sends to itself, or would send
# in a loop of no turns, is not counted.
#
# If q, k and v are bfloat16, K and V travel in bfloat16. Everything that is *computed* is float32, as in `attend` and
# `merge`: scores, weights and state. So out and lse are as exact as with the same numbers in float32.


# %% grade="17.forward"
def ring_forward(q, k, v, positions):
    """Return (out, lse) of this device's queries over the keys of all devices."""

    # BEGIN SOLUTION attention over the blocks of all devices, with 2(P − 1) messages
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
    # END SOLUTION


# %%
check("17.forward")

# %% [markdown]
# Stuck? `hint("17.forward")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 17.window · A window, and no hop too many
#
# Now a query sees only itself and the `window` − 1 keys before it, in global positions. All devices make the same hops,
# each to the next device. The last hop is the last one that brings some device a key that it sees, in whatever layout.
# Make it and all hops before it, and none after it: a block that is needed later must pass through every device on its
# way. Work this out in Python while JAX traces, from `positions` of all devices. You cannot ask for one device by its
# rank, which has no value yet.
#
# Messages stay outside branches here too. Python's `if` on a NumPy result is allowed, because it is decided while tracing.


# %% grade="17.window"
def window_ring(q, k, v, positions, window):
    """Return (out, lse) with a sliding window of `window` tokens."""
    # BEGIN SOLUTION attention within the window, with as few hops as the layout allows
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
    """How many hops the block makes that travels furthest to a query that sees one of its keys."""
    P, needed = len(positions), [0]
    for step in range(1, P):
        ages = positions[:, :, None] - np.roll(positions, step, axis=0)[:, None, :]
        if ((ages >= 0) & (ages < window)).any():
            needed.append(step)
    return max(needed)
    # END SOLUTION


# %%
check("17.window")

# %% [markdown]
# Stuck? `hint("17.window")` in a new cell helps.

# %% [markdown]
# ## 17.couriers · Couriers by custom_vjp
#
# `courier_ring` returns the same as `ring_forward`, but its gradient is a ring of its own. K and V come around again in
# P − 1 hops, one fewer than in the lesson's loop. dK and dV travel with them in P hops, in **float32**, whatever the type
# of q, k and v. From the forward, a device keeps nothing that grows with P. lse is a result like out, so it has a cotangent (a gradient that arrives from
# outside), too.
#
# If q, k and v are bfloat16, K and V travel as they came, and everything that is computed is float32. The gradients have
# the types of q, k and v and are rounded *once*, at the very end.
#
# A device's memory is read off the *compiled* step, forward and backward together. With the number of tokens per
# device fixed, two limits hold, from 4 devices to 8: at most 25 % more memory; and at most half a block of K per added
# device. Remember lesson 17, section 9: if Python's `for` writes out the turns, the compiler may hold many of them at once. This
# holds for `ring_forward` as well: stage 17.forward accepts a `for`, but here it may cost points.
#
# `jax.custom_vjp` is already set up. If a gradient is wanted, `keep` runs in place of the forward, and returns the results
# and what is kept. `backward` gets what was kept and the cotangents, and returns (dq, dk, dv). Write both.


# %% grade="17.couriers"
def courier_ring(q, k, v, positions):
    """Return (out, lse) like `ring_forward`; gradients travel with the blocks they belong to."""
    attention = jax.custom_vjp(lambda q, k, v: ring_forward(q, k, v, positions))
    attention.defvjp(
        lambda q, k, v: keep(q, k, v, positions),
        lambda kept, cotangents: backward(kept, cotangents, positions),
    )
    return attention(q, k, v)


def keep(q, k, v, positions):
    """Return ((out, lse), what the backward needs)."""
    # BEGIN SOLUTION the results of the forward, and what the backward needs
    out, lse = ring_forward(q, k, v, positions)
    return (out, lse), (q, k, v, out, lse)
    # END SOLUTION


def backward(kept, cotangents, positions):
    """Return (dq, dk, dv) of this device's q, k and v."""
    # BEGIN SOLUTION the gradients of this device's q, k and v
    (q, k, v, out, lse), (dout, dlse) = kept, cotangents
    delta = (dout * out).sum(-1) - dlse

    def body(carry, step):
        dq, k, v, dk, dv = carry[0], *shift(*carry[1:])
        more = attend_backward(dout, q, k, v, lse, delta, sees(positions, step))
        return (dq + more[0], k, v, dk + more[1], dv + more[2]), None

    dq, dk, dv = attend_backward(dout, q, k, v, lse, delta, sees(positions, 0))
    (dq, _, _, dk, dv), _ = lax.scan(body, (dq, k, v, dk, dv), jnp.arange(1, len(positions)))
    return tuple(x.astype(q.dtype) for x in (dq, *shift(dk, dv)))
    # END SOLUTION


# %%
check("17.couriers")

# %% [markdown]
# Stuck? `hint("17.couriers")` in a new cell helps.

# %% [markdown]
# ## On real text
#
# When all stages pass, run `on_real_text()` in a new cell: forward and backward on the corpus, on 2 to 8 devices, always
# with 64 tokens on each.


# %%
def on_real_text():
    """Print what a device sends and holds in a training step, by program and number of devices."""
    for program in (ring_forward, courier_ring):
        for P in (2, 4, 8):
            layout = zigzag(64 * P, P)
            positions = np.stack([layout.positions(rank) for rank in range(P)])
            whole = corpus.qkv(layout.S, heads=2, head_dim=16)
            q, k, v = (x.numpy()[:, :, positions.ravel()] for x in whole)
            cotangents = np.ones_like(q), np.zeros_like(q[..., 0])
            found = examine(program, positions, (q, k, v), cotangents)
            held = f"{found.scratch / 1e3:,.0f} kB of scratch"
            print(f"{program.__name__:12} on {P} devices: {found.messages:2} messages, {held}")


# %% tags=["solution-only"]
on_real_text()

# %% [markdown]
# `ringlab grade exercises/17_ring_in_jax.ipynb` also runs the hidden checks, on new inputs.
