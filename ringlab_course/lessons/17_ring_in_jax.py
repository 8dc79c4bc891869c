# %% [markdown]
# # 17 · The same ring in JAX
#
# **Afterwards you can** read and write ring attention with `shard_map` and `ppermute`, count the messages of the
# compiled program, say what automatic differentiation keeps and sends, and write a backward that keeps less.
#
# **You need first** [lesson 08](08_striped_and_zigzag.ipynb), layouts, and [lesson 09](09_backward_ring.ipynb), couriers.
# You need no JAX: if you know NumPy, you can read this lesson. JAX is an extra of this course; if you do not have it, the
# first cell says how to install it.
#
# **Minutes** 60 to read and run; [exercise 17](../exercises/17_ring_in_jax.ipynb) takes another 60.
#
# Ring attention was first published in JAX, and many beliefs about it come from there: that a ring needs no `send`, and
# that its gradients come for free. This lesson writes the rings of lessons 05 and 09 in JAX, on eight *simulated* devices,
# and measures them by the same rules.

# %%
import inspect
import math
from functools import partial

import numpy as np
import torch

from ringlab import VirtualCluster, contiguous, oracle, zigzag
from ringlab.conformance import tolerance
from ringlab.cost.flops import layout_work
from ringlab_course import compare, corpus, needs_extra, predict
from ringlab_course.figures import layout_view, side_by_side
from ringlab_course.mesh.compiled import traffic
from ringlab_course.mesh.message_ring import message_ring
from ringlab.viz.style import new_figure, show, styled

needs_extra("jax")
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

jax.config.update("jax_platforms", "cpu")  # also where there is a GPU
jax.config.update("jax_num_cpu_devices", 8)  # before the first computation

# %% [markdown]
# ## 1 · Two dialects
#
# So far we wrote *ranks with messages*: P programs, each with its own memory. JAX starts from the other end, with *one
# array* that is spread over many devices. Two tables have the words of the forward. The first is about arrays:
#
# | in JAX | what it is |
# |---|---|
# | mesh | the devices, arranged along named axes; ours has one axis, `"ring"` |
# | `PartitionSpec(None, None, "ring")` | says which axes of an array are cut: here the third, along `"ring"` |
# | `NamedSharding(mesh, spec)` | such a cut on a mesh; `jax.device_put(x, sharding)` cuts x and puts the parts in place |
# | `x.addressable_shards` | the parts of x, one on each device |

# %%
def mesh_of(P):
    axis = {"axis_types": (AxisType.Auto,), "devices": jax.devices()[:P]}
    return jax.make_mesh((P,), ("ring",), **axis)


P = 8
tokens = PartitionSpec(None, None, "ring")  # (B, H, S, …): the token axis is cut into P parts
text = corpus.qkv(64, heads=2, head_dim=16)
q, k, v = (jax.device_put(x.numpy(), NamedSharding(mesh_of(P), tokens)) for x in text)
print("q is", q.shape, "on", len(q.addressable_shards), "devices")
print("each of them holds", q.addressable_shards[0].data.shape)

# %% [markdown]
# The second is about programs:
#
# | in JAX | what it is |
# |---|---|
# | `jax.jit` | calls a function **once** with placeholders (*tracing*), records the operations and compiles them; later calls with the same shapes run the compiled program |
# | `jax.shard_map` | turns a function of *one device's part* into a function of whole arrays; `in_specs` and `out_specs` say how arguments and results are cut |
# | `lax.axis_index("ring")` | the rank: a placeholder while tracing, a number on each device |
# | `lax.ppermute` | an exchange: device a sends to device b for each pair (a, b) in a list |
# | `lax.scan` | a loop whose body is traced and compiled once; section 5 shows it |
# | `lax.cond` | a branch, decided on each device; section 6 shows it |

# %%
def on_ring(program, P=8):
    """`program`, which P devices run on their parts, as a compiled function of whole arrays."""
    mapped = jax.shard_map(program, mesh=mesh_of(P), in_specs=tokens, out_specs=tokens)
    return jax.jit(mapped)

# %% tags=["nbval-ignore-output"]
predict(
    "17.traced",
    "A program notes its rank in a Python list. Eight devices run it, and we call it twice. "
    "How many notes are in the list?",
    unit="notes",
)

# %%
notes = []


def program(x):
    notes.append(f"rank {lax.axis_index('ring')}, x is {x.shape}")
    return x


on_all = on_ring(program)
for _ in range(2):
    print("outside, x is", on_all(q).shape)
print("inside:", *notes)
compare("17.traced", len(notes))

# %% [markdown]
# **One.** Inside `shard_map` you are a rank again, and x is your part. But JAX called the function only once, with a
# placeholder in place of the rank. (`int32[]{V:ring}` means: one integer, which varies along `"ring"`.) The compiler, XLA,
# made one program of the recorded operations, and every device runs it. So you cannot write `if rank == 0:`, because the
# rank has no value while Python runs. Whatever differs between devices must be *computed* from `axis_index`.
#
# ## 2 · `ppermute` is `ring.shift`
#
# The messages are a list of (source, destination) pairs, the same list on all devices.

# %%
def shift(*block):
    """Hand the block to the next device; return what came from the previous one."""
    P = lax.axis_size("ring")
    return lax.ppermute(block, "ring", [(rank, (rank + 1) % P) for rank in range(P)])


def follow(block):
    seen = [block]
    for _ in range(P - 1):
        (block,) = shift(seen[-1])
        seen.append(block)
    return jnp.stack(seen, axis=-1)


def follow_messages(ring):
    seen = [torch.tensor([ring.rank])]
    for _ in range(P - 1):
        seen.append(ring.shift(seen[-1]))
    return torch.cat(seen).tolist()


ranks = jnp.arange(P)[None, None]
journeys = on_ring(follow)(ranks)[0, 0].tolist()
print("device 0 sees the blocks of", journeys[0])
print("same as on virtual ranks:", journeys == VirtualCluster(P).run(follow_messages).results)

# %% [markdown]
# The origin is (rank − step) mod P, as before. Now we leave out the pair (7, 0) and so break the circle. On a virtual
# cluster, rank 0 would wait for a message that nobody sends, and the cluster would report it.

# %% tags=["nbval-ignore-output"]
predict("17.missing", "ppermute without the pair (7, 0): what does device 0 get?",
        choices=["an error", "its own block", "zeros", "nothing: it hangs"])

# %%
def broken(block):
    return lax.ppermute(block, "ring", [(rank, rank + 1) for rank in range(P - 1)])


sent = ranks + 10
got = on_ring(broken)(sent)[0, 0].tolist()
print("sent:", sent[0, 0].tolist(), "  got:", got)
compare("17.missing", {0: "zeros", 10: "its own block"}[got[0]])

# %% [markdown]
# **Zeros**, without any warning. A block of zero keys is not an empty block: each of its keys has score 0 and takes part
# in the softmax.
#
# The two dialects fail in different ways. With messages, a send without its receive hangs. One `ppermute` is both the send
# and the receive. It hangs only if some devices do not reach it; section 6 comes back to this.
#
# ## 3 · Block and merge
#
# These are lesson 02's functions in `jnp`. Scores and state are float32, whatever the type of q, k and v. The mask compares
# *global* positions: `deal` lists which positions each rank owns, and a device picks two rows, its own and that of the
# block's owner.

# %%
def attend(q, k, v, mask):
    """Attention of q on one block: (out, lse); a row that sees nothing gives 0 and −inf."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(q.shape[-1])
    lse = jax.nn.logsumexp(scores, axis=-1, where=mask)
    finite = jnp.where(lse == -jnp.inf, 0, lse)[..., None]
    weights = jnp.exp(jnp.where(mask, scores, -jnp.inf) - finite)
    return weights @ v.astype(jnp.float32), lse


def merge(a, b):
    """The state over the keys of both; the weights are e^(lse_a − lse) and e^(lse_b − lse)."""
    lse = jnp.logaddexp(a[1], b[1])
    finite = jnp.where(lse == -jnp.inf, 0, lse)
    weights = (jnp.exp(part - finite)[..., None] for part in (a[1], b[1]))
    return sum(w * out for w, (out, _) in zip(weights, (a, b), strict=True)), lse


def sees(layout, step):
    """True where this device's queries see the keys that are here after `step` shifts."""
    deal = jnp.array([layout.positions(rank) for rank in range(layout.P)])
    rank = lax.axis_index("ring")
    return deal[rank][:, None] >= deal[(rank - step) % layout.P]

# %%
block = [x[:, :, :8].numpy() for x in text]
nothing = attend(*block, jnp.zeros((8, 8), bool))
state = attend(*block, jnp.tril(jnp.ones((8, 8), bool)))
both = merge(state, nothing)
same = all(bool((a == b).all()) for a, b in zip(state, both, strict=True))
print("sees nothing: out", float(jnp.abs(nothing[0]).max()), " lse", float(nothing[1].max()))
print("merging it in changes nothing:", same)

# %% [markdown]
# ## 4 · The ring, twice
#
# Lesson 05 wrote the ring with messages. This one does the same jobs in the same order on the mesh:

# %%
def identity(q):
    return jnp.zeros_like(q, jnp.float32), jnp.full_like(q[..., 0], -jnp.inf, jnp.float32)


def mesh_ring(q, k, v, layout):
    state = identity(q)
    for step in range(layout.P):
        mask = sees(layout, step)
        here = attend(q, k, v, mask)
        state = merge(state, here)
        if step < layout.P - 1:
            k, v = shift(k, v)
    return state

# %% [markdown]
# Both run, and both are right. `message_ring` is imported; the picture shows it beside our own ring.

# %%
even = contiguous(64, P)
ran = VirtualCluster(P).run(lambda ring: message_ring(ring, *even.shard(text, ring.rank), even))
out_messages = even.unshard([out for out, _ in ran.results]).numpy()
out, lse = on_ring(partial(mesh_ring, layout=even))(q, k, v)
truth = oracle.attention(*text, causal=True)
for name, found in (("messages", out_messages), ("mesh", np.asarray(out))):
    print(f"{name:8} error below 1e-6: {abs(found - truth.out).max() < 1e-6}")

# %%
names = ("message_ring, on each rank", "mesh_ring, on each device")
sources = tuple(inspect.getsource(each).split(":\n", 1)[1] for each in (message_ring, mesh_ring))
jobs = [side_by_side.Job(*job) for job in (
    ("begin with no key seen", ("identity",), ("identity",)),
    ("mask: who sees whom in this step", ("mask =",), ("mask =",)),
    ("attend to the block that is here", ("here =",), ("here =",)),
    ("merge it into the state", ("state = merge",), ("state = merge",)),
    ("the last block need not travel", ("if step",), ("if step",)),
    ("hand the block on", ("ring.shift",), ("shift(",)),
    ("return this rank's rows", ("return",), ("return",)),
)]
drawn = side_by_side.figure(names, sources, jobs, title="The same ring, line by line")
show(drawn, side_by_side.describe(names, sources, jobs))

# %% [markdown]
# The programs agree line by line, but not in how they run. On the left every rank runs the loop. On the right Python runs it
# once, while JAX records, and the compiled program has P copies of its body in a row. That has a consequence.
#
# ## 5 · What the compiler sends
#
# In lesson 05 the messages of a ring were those that its source wrote down. Here the compiler has the last word. So we
# count in the compiled program. It is a text, a list of functions with one operation a line, and a `ppermute` has
# become a `collective-permute`:

# %%
def compiled(program, *arrays):
    return jax.jit(program).lower(*arrays).compile()


ring_of_copies = compiled(on_ring(partial(mesh_ring, layout=even)), q, k, v)
lines = ring_of_copies.as_text().splitlines()
sends = [line for line in lines if " collective-permute(" in line]
print(f"{len(sends)} lines of the program hold a collective-permute; the pairs of one are")
print(sends[0].partition("source_target_pairs=")[2].partition(", ")[0])

# %% [markdown]
# The pairs are those of our list. A hop is two such messages, K and V. `traffic` counts them. A message in a
# loop counts once per turn; the text states the number of turns.

# %%
def messages(machine_code):
    """Messages that each device sends, loops included."""
    return traffic(machine_code.as_text()).messages


print("mesh_ring:", messages(ring_of_copies), "messages")

# %% [markdown]
# `careless_ring` shifts after every step, the last one included.

# %%
def careless_ring(q, k, v, layout):
    state = identity(q)
    for step in range(layout.P):
        state = merge(state, attend(q, k, v, sees(layout, step)))
        k, v = shift(k, v)
    return state

# %% tags=["nbval-ignore-output"]
predict("17.loop", "careless_ring shifts 8 times. How many messages does a device send?",
        unit="messages")

# %%
compare("17.loop", messages(compiled(on_ring(partial(careless_ring, layout=even)), q, k, v)))

# %% [markdown]
# **14.** Nothing uses the result of the eighth shift, so the compiler removed it. But P copies of the body make a program
# that grows with P and takes ever longer to compile. `lax.scan` compiles the body once. The body takes two
# things: the value that the previous turn handed on, and one entry of an array. It returns two things: the value for the
# next turn, and one entry of the output.

# %%
def add(total, number):
    return total + number, total  # for the next turn; for the output


total, before_each = lax.scan(add, 0, jnp.array([3, 1, 4, 1, 5]))
print("total", int(total), "  before each turn", before_each.tolist())

# %% [markdown]
# Many published JAX rings use it like this. Each turn hands the state and the block to the next:

# %%
def scan_ring(q, k, v, layout):
    def body(carry, step):
        state, k, v = carry
        state = merge(state, attend(q, k, v, sees(layout, step)))
        return (state, *shift(k, v)), None

    (state, _, _), _ = lax.scan(body, (identity(q), k, v), jnp.arange(layout.P))
    return state

# %% tags=["nbval-ignore-output"]
predict(
    "17.operations",
    "In the compiled mesh_ring, the operation collective-permute appears 14 times. "
    "How many times does it appear in the compiled scan_ring?",
    unit="times",
)

# %%
scanned = compiled(on_ring(partial(scan_ring, layout=even)), q, k, v)
print("messages that a device sends:", messages(scanned))
compare("17.operations", scanned.as_text().count(" collective-permute("))

# %% [markdown]
# **Twice**, one for K and one for V, and each runs 8 times: 16 messages, P hops. The last hop is wasted again, but now the
# compiler cannot remove it, because all turns share the same code and the other turns need the shift.
#
# The remedy: your own block needs no hop, so meet it *before* the loop. Each turn is then *shift, then meet*, and P − 1
# turns are enough. (How a block is met is an argument, because sections 6 and 7 will replace it.)

# %%
def meet(state, q, k, v, mask):
    return merge(state, attend(q, k, v, mask))


def ring(q, k, v, layout, meet=meet):
    def body(carry, step):
        state, k, v = carry
        k, v = shift(k, v)
        return (meet(state, q, k, v, sees(layout, step)), k, v), None

    state = meet(identity(q), q, k, v, sees(layout, 0))
    (state, _, _), _ = lax.scan(body, (state, k, v), jnp.arange(1, layout.P))
    return state


mended = compiled(on_ring(partial(ring, layout=even)), q, k, v)
print("messages:", messages(mended))

# %% [markdown]
# ## 6 · Layouts, and one program for all
#
# JAX cuts an axis into consecutive pieces, which is the contiguous layout. For a zig-zag, reorder the *array* before it is
# cut. The masks go by positions, so the ring stays as it is.

# %%
def dealt(layout, x):
    """The whole array x in the order in which `layout` deals its tokens, cut up on the mesh."""
    order = np.concatenate([layout.positions(rank) for rank in range(layout.P)])
    return jax.device_put(np.asarray(x)[..., order, :], NamedSharding(mesh_of(layout.P), tokens))


def in_order(layout, x):
    """The inverse, as a NumPy array in float32."""
    return layout.unshard(np.split(np.asarray(x, np.float32), layout.P, axis=2), dim=2)


folded = zigzag(64, P)
out, lse = on_ring(partial(ring, layout=folded))(*(dealt(folded, x) for x in text))
print("zig-zag, error below 1e-6:", abs(in_order(folded, out) - truth.out).max() < 1e-6)

# %% [markdown]
# In lesson 07, rank 0 of a contiguous layout saw one block of eight. Does device 0 compute only that one?

# %%
print("branches in the compiled program:", mended.as_text().count(" conditional("))

# %% [markdown]
# No. A mask hides scores that have been computed, and the one program that all devices run has no branch: every device
# computes all eight blocks. `lax.cond` adds a branch. Each device decides at run time which of two functions to call:

# %%
def meet_if_seen(state, q, k, v, mask):
    """The state after this block, which is not computed where the mask hides all of it."""

    def compute(state):
        return meet(state, q, k, v, mask)

    def leave(state):
        return state

    return lax.cond(mask.any(), compute, leave, state)


thrifty = on_ring(partial(ring, layout=folded, meet=meet_if_seen))
arrays = [dealt(folded, x) for x in text]
right = abs(in_order(folded, thrifty(*arrays)[0]) - truth.out).max() < 1e-6
print("zig-zag, error below 1e-6:", right)
print("branches:", compiled(thrifty, *arrays).as_text().count(" conditional("))

# %% tags=["nbval-ignore-output"]
predict("17.skipped", "This zig-zag ring skips a block that is hidden entirely. "
        "How many of the 8 blocks does each device compute?",
        choices=["1 to 8, by rank", "half of them, or one more", "all 8"])

# %%
def computed(layout, tile):
    """How many tiles each device computes if it skips those that the mask hides entirely."""
    return (layout_work(layout, tile=(tile, tile)).sum(1) // tile**2).tolist()


print("contiguous, blocks:", computed(even, 8))
print("zig-zag,    blocks:", computed(folded, 8))
print("zig-zag,    quarters of blocks:", computed(folded, 4), "of", P * 4)
most = computed(folded, 8)
compare("17.skipped", "all 8" if min(most) == P else "half of them, or one more"
        if max(most) < 6 else "1 to 8, by rank")

# %%
show(layout_view.figure([even, folded], tile=4), layout_view.describe([even, folded], tile=4))

# %% [markdown]
# **All 8.** With a zig-zag, no square between the dark lines is white: in every block some query sees some key. So the
# branch saves nothing. (The program has two: one for a device's own block, one in the loop.) It has to decide about smaller tiles: of quarters of blocks, every device computes 17 of 32. With the
# contiguous layout the branch does skip blocks, but device 7 computes all of them, and the ring finishes no sooner.
#
# What *all* devices can skip needs no branch: work it out in NumPy while JAX traces, and Python's `if` leaves it out of the program.
#
# Put only computation into a branch. If a branch holds a `shift`, some devices send and others do not: the program compiles,
# and then it hangs.
#
# The forward is complete: a good place for a break. The rest is about the backward.
#
# ## 7 · Gradients that nobody wrote
#
# `jax.vjp(f, x)` returns f(x) and a function, the backward. The backward turns the loss's gradient for f(x) into the
# one for x. JAX derives it from the recorded operations, `ppermute` included. The backward of a message is the message
# back:

# %%
hop = on_ring(lambda x: shift(x)[0])
numbers = jnp.arange(8.0)[None, None]
there, backward_of_hop = jax.vjp(hop, numbers)
(back,) = backward_of_hop(numbers)
print("a hop          ", there[0, 0].astype(int).tolist())
print("its backward   ", back[0, 0].astype(int).tolist())

# %% [markdown]
# But in lesson 09, couriers that were sent backwards made dK and dV wrong. Here all five results are checked against the
# measured bounds of lesson 10.

# %% tags=["nbval-ignore-output"]
predict("17.autodiff", "Autodiff sends the gradients of K and V against the blocks. "
        "Are dK and dV right?", choices=["yes", "no"])

# %%
dout = torch.randn(text[0].shape, generator=torch.Generator().manual_seed(0))
true = tolerance.truth(*text, dout, causal=True)
bounds = tolerance.bounds(*text, dout, causal=True)


def results(program, layout, whole, dout):
    """out, lse, dQ, dK and dV of a program on this layout, in the order of the text."""
    (out, lse), back = jax.vjp(on_ring(program, layout.P), *(dealt(layout, x) for x in whole))
    grads = back((dealt(layout, dout), jnp.zeros_like(lse)))
    return tolerance.Results(*(in_order(layout, x) for x in (out, lse, *grads)))


def within(found):
    return {name: error <= bounds[name] for name, error in tolerance.errors(found, true).items()}


right = within(results(partial(ring, layout=folded), folded, text, dout))
print(right)
compare("17.autodiff", "yes" if right["dk"] and right["dv"] else "no")

# %% [markdown]
# **Yes.** Autodiff and lesson 09's ring are two different programs. The picture follows the gradient of one block:

# %%
show(side_by_side.two_ways(4), side_by_side.describe_two_ways(4))

# %% [markdown]
# Autodiff undoes the forward step by step, the last step first. Each device **kept** block 0 when it came by. So the
# gradient sum for block 0, as it travels back, finds a copy of the block on every device. Lesson 09's backward kept no copies. There the block goes around
# once more, *forwards*, and a sum that travels backwards would meet other blocks.
#
# The price of autodiff is the word *kept*. The backward function that `jax.vjp` returns holds the kept arrays. We add up
# their bytes on one device, in units of a K/V block (K and V of one shard).

# %% tags=["nbval-ignore-output"]
predict("17.kept", "From 4 devices to 8, 64 tokens on each: the memory one device keeps …",
        choices=["stays the same", "about doubles", "about quadruples"])

# %%
def kept(program, P, D=64):
    """What a device keeps for the backward, in K/V blocks."""
    layout = zigzag(64 * P, P)
    arrays = [dealt(layout, x) for x in corpus.qkv(layout.S, heads=1, head_dim=D)]
    _, back = jax.vjp(on_ring(partial(program, layout=layout), P), *arrays)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(back))
    return held / (2 * 64 * D * 4)


def remat_ring(q, k, v, layout):
    return ring(q, k, v, layout, meet=jax.checkpoint(meet))


SIZES = (2, 4, 8)
curves = {program.__name__: [kept(program, P) for P in SIZES] for program in (ring, remat_ring)}
for name, curve in curves.items():
    print(f"{name:10} on {SIZES} devices keeps", [round(float(x), 1) for x in curve], "K/V blocks")
growth = curves["ring"][-1] / curves["ring"][-2]
grown = "about doubles" if growth < 2.5 else "about quadruples"
compare("17.kept", "stays the same" if growth < 1.1 else grown)

# %% [markdown]
# `ring` keeps several arrays of the size of the weights (scores, weights, steps between them) for every pair of blocks.
# Over all devices that is several times the full S × S matrix of lesson 01. With `jax.checkpoint` the backward
# recomputes each step, and the weights are not kept. But the *blocks that came by* still are, and so is the state after
# each step. An all-gather would keep P blocks; this keeps more. Under autodiff, a ring saves no memory over an all-gather.
#
# ## 8 · Couriers
#
# So we decide ourselves which arrays are kept and which are sent. `jax.custom_vjp` takes a backward of our own in place of
# the derived one. We build it in three parts.
#
# First the terms. They are lesson 09's formulas: the weights W again, from scores and lse, then dS = W ⊙ (dO Vᵀ −
# delta). A row that sees nothing has lse = −∞; with +∞ in its place, all its weights become 0.
#
# One thing is new: our ring returns lse too, and a loss may use it. Its gradient dlse adds W ⊙ dlse to dS, because
# ∂lse/∂s = W. So we pass delta − dlse where lesson 09 passed delta.

# %%
def attend_backward(dout, q, k, v, lse, delta, mask):
    scale = q.shape[-1] ** -0.5
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    total = jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None]
    weights = jnp.exp(jnp.where(mask, scale * (q @ k.mT), -jnp.inf) - total)
    dscores = weights * (dout @ v.mT - delta[..., None])
    return scale * (dscores @ k), scale * (dscores.mT @ q), weights.mT @ dout

# %% [markdown]
# Then the ring. The forward keeps q, k, v, out and lse (`saved`), none larger than a shard. In the backward, the blocks come
# around again, and dK and dV travel with them. The plainest loop has P turns: add my terms, then shift all four.
#
# The sums travel in float32 and are rounded once, at the end. Autodiff gives a gradient the type of its variable: with K and
# V in bfloat16, its sums would be bfloat16 too, and rounded at every stop.

# %%
def backward(layout, unroll, saved, gradients):
    (q, k, v, out, lse), (dout, dlse) = saved, gradients  # gradients of the results: they come in
    delta = (dout * out).sum(-1) - dlse

    def body(carry, step):
        dq, k, v, dk, dv = carry
        more = attend_backward(dout, q, k, v, lse, delta, sees(layout, step))
        dq, dk, dv = dq + more[0], dk + more[1], dv + more[2]
        return (dq, *shift(k, v, dk, dv)), None

    # zeros_like also takes over q's type {V:ring}; jnp.zeros lacks it, and scan would refuse.
    zero = jnp.zeros_like(q, jnp.float32)
    turns = jnp.arange(layout.P)
    (dq, _, _, dk, dv), _ = lax.scan(body, (zero, k, v, zero, zero), turns, unroll=unroll)
    return tuple(x.astype(q.dtype) for x in (dq, dk, dv))

# %% [markdown]
# Last the registration. `custom_vjp` takes the plain function. `defvjp` adds two: a forward that also returns what to keep,
# and the backward. (`forward_ring` and `unroll` are for section 9.)

# %%
def courier_ring(q, k, v, layout, forward_ring=ring, unroll=1):
    def keep(q, k, v):
        out, lse = forward_ring(q, k, v, layout)
        return (out, lse), (q, k, v, out, lse)

    attention = jax.custom_vjp(lambda q, k, v: forward_ring(q, k, v, layout))
    attention.defvjp(keep, partial(backward, layout, unroll))
    return attention(q, k, v)


print(within(results(partial(courier_ring, layout=folded), folded, text, dout)))
curves["courier_ring"] = [kept(courier_ring, P) for P in SIZES]
held = [round(float(x), 1) for x in curves["courier_ring"]]
print(f"on {SIZES} devices keeps", held, "K/V blocks")

# %%
HELD = ("weights, blocks and states", "blocks and states", "its own shard")
with styled():
    figure = new_figure((6.8, 3.4))
    axes = figure.subplots()
    for (name, curve), marker, held in zip(curves.items(), "os^", HELD, strict=True):
        axes.plot(SIZES, curve, marker=marker, label=f"{name}: {held}")
    axes.set(xlabel="devices, with 64 tokens on each", xticks=SIZES, ylim=(0, None))
    axes.set_ylabel("kept on one device, in K/V blocks")
    axes.set_title("Kept for the backward, by one device")
    axes.legend()
show(figure, "With couriers, what one device keeps does not depend on the number of devices. "
     "Horizontal: 2, 4 and 8 devices. Vertical: kept bytes in K/V blocks. ring rises steepest, in "
     "a straight line; remat_ring rises less than half as steeply; courier_ring is flat, at two.")

# %% [markdown]
# The curve of `courier_ring` is flat: about two blocks, whatever P is (q, k, v and out are four shards, and a K/V block is
# two). The price is messages, because now K and V travel twice.

# %% tags=["nbval-ignore-output"]
predict("17.messages", "Forward and backward on 8 devices: how many messages does a device send in "
        "courier_ring? (K, V, dK and dV are one message each per hop.)", unit="messages")

# %%
def training_step(program, P):
    """Forward and backward in one compiled program: the gradients of a loss."""
    layout = zigzag(64 * P, P)
    arrays = [dealt(layout, x) for x in corpus.qkv(layout.S, heads=1, head_dim=64)]
    whole = on_ring(partial(program, layout=layout), P)
    # jax.grad: the gradients of a number, here the sum of out, for the arguments 0, 1 and 2
    return compiled(jax.grad(lambda *qkv: whole(*qkv)[0].sum(), argnums=(0, 1, 2)), *arrays)


both_rings = (ring, courier_ring)
steps = {program.__name__: [training_step(program, P) for P in (4, 8)] for program in both_rings}
for name, (_, on_8) in steps.items():
    print(f"{name:12} on 8 devices: {messages(on_8)} messages")
compare("17.messages", messages(steps["courier_ring"][1]))

# %% [markdown]
# 28 with autodiff, **46** with couriers: 2 · 7 forward, and 4 · 8 backward. Lesson 09's ring needs two fewer, 44: K and V have
# been everywhere after 7 hops, and only dK and dV have one more to go. Here they share a loop, as in `scan_ring`, and the
# last hop of K and V is wasted. In the exercise you will write the loop that sends 44.
#
# ## 9 · What the compiler undoes
#
# Now the same program with its turns written out one after the other, as Python's `for` does it: `mesh_ring` of section 4
# forwards, and `unroll=True`, which makes `scan` do the same, backwards. Nothing else changes.

# %%
def unrolled_couriers(q, k, v, layout):
    return courier_ring(q, k, v, layout, forward_ring=mesh_ring, unroll=True)


steps["unrolled_couriers"] = [training_step(unrolled_couriers, P) for P in (4, 8)]
for name, (on_4, on_8) in steps.items():
    small, large = (code.memory_analysis().temp_size_in_bytes for code in (on_4, on_8))
    grows = "the same" if large < 1.1 * small else "grows"
    print(f"{name:17} {messages(on_8)} messages; memory in use from 4 devices to 8: {grows}")

# %% [markdown]
# 30 messages: forward and backward are one program, so the compiler sees each block sent to the same device twice,
# sends it once and **keeps it**. It merges repeats in straight-line code, not across two loops. Our ring has become an
# all-gather: its memory grows with P again. So measure the *compiled step*, not the source, and not only what `vjp` keeps.
# (This program was compiled for CPUs. Measure again for another target.)
#
# ## Recap
#
# - `shard_map` makes you a rank, and `ppermute` is `ring.shift`. Compute with the rank; never branch on it with Python's `if`. A missing
#   pair brings zeros.
# - All devices run one program. A mask hides scores that were computed; `lax.cond` avoids computing them. Messages stay outside branches.
# - A scan whose body ends in a shift sends P times. Meet your own block before the loop, and P − 1 hops are enough.
# - Autodiff's gradients retrace every hop, backwards. That is right because every block was kept where it was met, so memory
#   grows with P.
# - Couriers in a `custom_vjp` keep one shard and send more. A compiler that sees the same hop twice may undo that, so count
#   in the compiled step.
#
# ## Self-check
#
# <details><summary>1. Why does the compiler remove the last shift of a <code>for</code>, but not that of a <code>scan</code>?</summary>In the
# unrolled program each shift is an operation of its own, and nothing uses the last one. In a loop's body one operation
# serves all turns.</details>
#
# <details><summary>2. Autodiff sends gradients against the blocks. Why is that no evidence for "dK/dV go the other
# way"?</summary>It retraces the hops to where each block was kept. Where the blocks go around again, the sums must go with
# them.</details>
#
# <details><summary>3. Couriers on 4 devices, forward and backward: how many messages are enough?</summary>2 · 3 + 2 · 3 + 2 · 4 =
# 20.</details>
#
# <details><summary>4. A colleague's <code>custom_vjp</code> keeps one shard, and training still runs out of memory as P grows. Where do
# you look?</summary>In the compiled step: is each hop sent as often as it is written?</details>
#
# Now [exercise 17](../exercises/17_ring_in_jax.ipynb).
