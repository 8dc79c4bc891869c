# %% [markdown]
# # Exercise 17 · The same ring in JAX
#
# **You build** the ring as a program of one device: forward with any layout, with a window that saves hops, and with couriers for the gradients.
# **You need** [lesson 17](../notebooks/17_ring_in_jax.ipynb), and the extra `jax`. **Minutes** 60.
#
# | stage | function | what is looked at |
# |---|---|---|
# | 17.forward | `ring_forward` | out and lse in any layout, 2(P − 1) messages in the *compiled* program, types |
# | 17.window | `window_ring` | a window in global positions, no hop that nobody needs |
# | 17.couriers | `courier_ring` | all gradients, that of lse too; messages, float32 couriers, what a device holds |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded.

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
# Each function that you write is a program of *one device*: the checks put it into `shard_map` on P simulated devices, on a mesh with one axis `"ring"`, compile it,
# read what the compiled program sends, and run it. `q`, `k`, `v` are the device's parts, (B, H, L, D). `positions` is a **NumPy** array (P, L): row r says which global
# positions device r owns, in the order of its tokens, which need not be sorted. It is known while your program is written down; the device's number,
# `lax.axis_index("ring")`, is not.
#
# Of lesson 17 you have
#
# - `attend(q, k, v, mask)` → (out, lse) over one block; a row that sees nothing gives 0 and −inf;
# - `merge(a, b)` → the state over the keys of both; `identity(q)` → the state of nobody seen;
# - `attend_backward(dout, q, k, v, lse, delta, mask)` → what a block adds to (dq, dk, dv), float32.
#
# ## 17.forward · The ring in shard_map
#
# Causal attention over the blocks of all devices: a query sees a key whose *global* position is not after its own. Return `(out, lse)` in float32. Blocks go to
# the next device, rank + 1, with `lax.ppermute`, in the type that they have. Each device sends K and V P − 1 times: what counts is what the compiler makes of
# it. Beware of a loop whose body ends in a shift.
#
# A message must not stand in a branch, as of `lax.cond`, nor in a loop whose turns nobody knows beforehand: devices that do not send let others wait for ever. The
# checks compile such a program and do not run it, also where all devices would take the same branch.
#
# With q, k and v in bfloat16 K and V travel in bfloat16, and all that is *computed* is float32, as in `attend` and `merge`: scores, weights, state. So out and lse are as exact as
# with the same numbers in float32.


# %% grade="17.forward"
def ring_forward(q, k, v, positions):
    """Return (out, lse) of this device's queries over the keys of all devices."""

    # BEGIN SOLUTION the own block first; then shift and meet, P − 1 times
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
# The same, and a query sees itself and the `window` − 1 keys before it, in global positions. All devices run the same hops: make as many as *some* device needs, and no
# more, in any layout. For most devices a hop may be for nothing; a hop that *no* device needs is one too many. How many are needed Python finds out beforehand: ask `positions`,
# with NumPy, for all devices. Asked about the own device alone, by its number, JAX stops: there is no number yet.
#
# A message must not stand in a branch here either; Python's `if`, with what NumPy found, is none.


# %% grade="17.window"
def window_ring(q, k, v, positions, window):
    """Return (out, lse) with a sliding window of `window` tokens."""
    # BEGIN SOLUTION NumPy says how far blocks have to go; the rest is ring_forward with another mask
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
# `courier_ring` returns what `ring_forward` does. Its gradient is not what JAX would make of it, but a ring of its own: K and V come around again, P − 1 hops, and dK and
# dV travel with them in **float32**, whatever q, k and v are, P hops. From the forward a device keeps q, k, v, out and lse of its own, and nothing that grows
# with P. lse is a result like out: it has a cotangent, too. With q, k and v in bfloat16 K and V travel as they came, and out and lse, the sums and whatever else is
# computed are float32; the gradients have the types of q, k and v, and are rounded *once*, at the very end.
#
# What a device needs is read in the *compiled* step, forward and backward: on 8 devices it is at most a quarter more than on 4 with as many tokens on each, and at most half a
# block of K more for each further device. Remember the trap of lesson 17, section 8: of turns that Python's `for` writes out the compiler may
# hold many at once. That goes for your `ring_forward` as well: 17.forward takes a `for`, here it may cost points.
#
# `jax.custom_vjp` is wired already: `keep` is run in place of the forward where a gradient is wanted, and returns the results and what is kept; `backward` gets what was
# kept and the cotangents, and returns (dq, dk, dv). Write both.


# %% grade="17.couriers"
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
    # BEGIN SOLUTION the forward's results, and what of its own a device needs again
    out, lse = ring_forward(q, k, v, positions)
    return (out, lse), (q, k, v, out, lse)
    # END SOLUTION


def backward(kept, cotangents, positions):
    """Return (dq, dk, dv) of this device's q, k and v."""
    # BEGIN SOLUTION the own pair; then all four travel; then the couriers alone
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
# When all stages hold, run `on_real_text()` in a new cell: forward and backward on the corpus, on 2 to 8 devices, always 64 tokens on each.


# %%
def on_real_text():
    """Print what a device sends and holds in a training step, by program and number of devices."""
    for program in (ring_forward, courier_ring):
        for P in (2, 4, 8):
            layout = zigzag(64 * P, P)
            positions = np.stack([layout.positions(rank) for rank in range(P)])
            q, k, v = (x.numpy()[:, :, positions.ravel()] for x in corpus.qkv(layout.S, heads=2, head_dim=16))
            found = examine(program, positions, (q, k, v), (np.ones_like(q), np.zeros_like(q[..., 0])))
            held = f"{found.scratch / 1e3:,.0f} kB of scratch"
            print(f"{program.__name__:12} on {P} devices: {found.messages:2} messages, {held}")


# %% tags=["solution-only"]
on_real_text()

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/17_ring_in_jax.ipynb` runs the hidden ones, on inputs of its own.
