# %% [markdown]
# # 09 · The backward ring
#
# **Afterwards you can** write the backward of ring attention, say where each gradient is at each step and which ranks
# have added to it, and count its hops and bytes before it runs.
#
# **You need first** [lesson 03](03_tiled_attention.ipynb), part 2, the backward of a tile; [lesson
# 05](05_emulated_ring.ipynb), the forward ring and its causal mask; for section 7, [lesson 06](06_what_it_costs.ipynb), and
# for the zig-zag layout there, [lesson 08](08_striped_and_zigzag.ipynb).
#
# **Minutes** 75 to read and run; the exercise takes another 75.
#
# The forward ring was easy: queries stayed at home, and so did their results. Only K and V travelled, and no rank
# changed them. In the backward, something *grows while it travels*. It is easy to go wrong at exactly this point.

# %%
import math
from functools import partial

import torch

from ringlab import VirtualCluster, contiguous, launch, oracle, ring_attention, zigzag
from ringlab.comm.ring import Ring
from ringlab.comm.wrappers.strict import Strict
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import least_tokens_hidden
from ringlab_course import compare, corpus, predict
from ringlab.errors import RinglabError
from ringlab_course.figures import courier_view
from ringlab.viz.style import new_figure, show, styled

# %% [markdown]
# ## 1 · What a pair of blocks needs
#
# We take 4 ranks, 32 tokens of real text, two heads and a causal mask. `dout` is the gradient of some loss with
# respect to the output. It comes from the layers above, and each rank holds the rows of `dout` for its own queries.
# The forward is over.

# %%
layout = contiguous(S=32, P=4)
q, k, v = corpus.qkv(32, heads=2, head_dim=16)
dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(0))
out, lse = (torch.from_numpy(x).float() for x in oracle.attention(q, k, v, causal=True))
truth = oracle.gradients(q, k, v, dout, causal=True)


def sees(layout, rank, origin):
    """True where a query of `rank` sees a key of `origin`. Without a layout: None, no mask."""
    if layout is None:
        return None
    return layout.positions(rank)[:, None] >= layout.positions(origin)[None, :]

# %% [markdown]
# At the end of the forward ring, rank 3 has met all keys. Suppose that it wants the gradients that *its* queries and
# *rank 1's* keys give. Lesson 03 has the recipe for one tile. Two names: lesson 03's weights P are $W = e^{S-\mathrm{lse}}$
# here, because P counts ranks, and S in a formula is the scaled scores. As before, $\delta = \mathrm{rowsum}(dO \circ O)$:
#
# $$dS = W\circ(dO\,V^\top - \delta),\qquad dQ = \mathrm{scale}\cdot dS\,K,\qquad dK = \mathrm{scale}\cdot dS^\top Q,\qquad dV = W^\top dO.$$
#
# Nothing in it depends on the size of the tile. It works for any block of queries and any block of keys.

# %%
def attend_backward(dout, q, k, v, lse, delta, mask=None):
    """What these queries and keys add to (dq, dk, dv); lse and delta are those of whole rows."""
    scale = q.shape[-1] ** -0.5
    scores = scale * (q @ k.mT)
    if mask is not None:
        scores = scores.masked_fill(~torch.as_tensor(mask), -math.inf)
    weights = torch.exp(scores - lse[..., None])
    dscores = weights * (dout @ v.mT - delta[..., None])
    return scale * (dscores @ k), scale * (dscores.mT @ q), weights.mT @ dout

# %%
def cut(layout, *whole):
    """The shards of every rank; the last of `whole` is lse, with one number per row."""
    ranks = range(layout.P)
    return [(*layout.shard(whole[:-1], r), layout.shard(whole[-1], r, dim=-1)) for r in ranks]


def term(rank, origin):
    """What the rows of `rank` and the keys of `origin` add to (dq, dk, dv)."""
    dout, q, _, _, out, lse = shards[rank]
    _, _, k, v, _, _ = shards[origin]
    delta = (dout * out).sum(-1)
    return attend_backward(dout, q, k, v, lse, delta, sees(layout, rank, origin))


shards = cut(layout, dout, q, k, v, out, lse)
parts = [[term(rank, origin) for origin in range(4)] for rank in range(4)]
dq3 = sum(parts[3][origin][0] for origin in range(4))
right = torch.from_numpy(truth.dq[..., 24:, :])
enough = bool((dq3 - right).abs().max() < 1e-5)
print("rank 3's dQ, from its own rows and one K/V block at a time, is right:", enough)

# %% [markdown]
# `parts[r][o]` is what rank r's queries and rank o's keys give. Row 3 of it adds up to rank 3's dQ. Each pair was
# computed alone, from rank r's own rows and one K/V block. The weights were not kept but computed again, and the
# blocks were not kept either: they come around once more.
#
# Two numbers per row stand in for all the other blocks. **lse** knows how much weight the row gave elsewhere, so
# $e^{S-\mathrm{lse}}$ is this block's share of the *whole* row. **delta** knows what the weights elsewhere were worth:
# a softmax weight grows only at the cost of the others, and delta is the sum of $W \circ dO\,V^\top$ over *all* keys of
# the row. It needs only out and dout, so each rank has it before the first message. Both numbers must be final. What if
# a rank uses the lse of the block that is here?

# %%
def own_lse(q, k, mask=None):
    """The lse over the keys of this block alone; +inf, so weight 0, where a row sees none."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~torch.as_tensor(mask), -math.inf)
    total = scores.logsumexp(-1)
    return total.masked_fill(total == -math.inf, math.inf)


_, q3, _, _, _, lse3 = shards[3]
_, _, k1, *_ = shards[1]
scores = q3 @ k1.mT * q3.shape[-1] ** -0.5
print("weights of rank 3's rows on rank 1's keys add up to")
for name, total in (("final", lse3), ("the block's own", own_lse(q3, k1))):
    rows = torch.exp(scores - total[..., None]).sum(-1)
    print(f"{name:15} lse: {rows.min():.2f} to {rows.max():.2f}")

# %% [markdown]
# With its own lse, each block claims the whole row: the weights of four blocks would add up to 4, not to 1.
#
# ## 2 · dK and dV have several authors
#
# dQ of a rank is a sum over *blocks*, and all its terms are computed at home. For dK and dV it is the other way round:
# a key matters to every query that sees it, and those queries live on other ranks.

# %%
print("size of what each rank (row) adds to dK of each block (column):")
size = [[parts[rank][owner][1].norm() for owner in range(4)] for rank in range(4)]
for rank in range(4):
    print(f"rank {rank} ", "  ".join(f"{x:5.2f}" for x in size[rank]))
adds = [sum(bool(size[rank][owner] > 0) for rank in range(4)) for owner in range(4)]
print("ranks that add to each block:", adds)

# %% [markdown]
# Read the table by columns. Block 0 is seen by all ranks, so its gradient is a **sum over all of them**, and each
# rank holds one term of it. (It is a sum, not a mean: a key matters through all its queries.) The terms must
# meet somewhere. There are three ways:
#
# - Every rank keeps a dK and dV for the whole sequence, and they are added at the end. That is a tensor of length S on
#   every rank, which is what the ring was built to avoid.
# - Every rank sends each term straight to the block's owner. On a ring of wires such a message crosses up to P/2 of
#   them.
# - The terms are added **on the way**. A block visits every rank, and so every rank that has a term for it. So let
#   the sum of these terms travel with the block.
#
# We call this travelling sum of one block, its dK and dV in float32, its *courier*.

# %% tags=["nbval-ignore-output"]
predict(
    "09.hops",
    "4 ranks; K/V make 3 hops. A courier starts at its owner, with the owner's term. "
    "How many hops does it make until it is complete and at home?",
    unit="hops",
)

# %% [markdown]
# ## 3 · The backward ring in ten lines
#
# This is the loop of lesson 05 plus a courier. Attend to the block that is here, add your term to the courier that is
# here, and send both on. The argument `carry` says how a courier is sent on, because section 5 tries another way. A
# `tag` names a message in the trace, so that we can count.

# %%
def ring_backward(ring, dout, q, k, v, out, lse, layout, carry=Ring.shift):
    """This rank's (dq, dk, dv); `carry` sends couriers on."""
    delta = (dout * out).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    for step in range(ring.world_size):
        inputs = dout, q, k, v, lse, delta, sees(layout, ring.rank, ring.origin(step))
        part = ring.compute(f"attend backward {step}", attend_backward, *inputs)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        dk, dv = carry(ring, dk, dv, tag=f"dkv {step}")
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v, tag=f"kv {step}")
    return dq, dk, dv


def run(program, layout, shards, **how):
    """The outcome of a backward program on these shards."""
    return VirtualCluster(layout.P).run(
        lambda ring: program(ring, *shards[ring.rank], layout=layout, **how)
    )

# %%
def errors(outcome, layout, truth):
    """Relative errors of dQ, dK and dV against the float64 oracle."""
    found = [layout.unshard(list(grads)).float() for grads in zip(*outcome.results, strict=True)]
    pairs = zip(found, map(torch.from_numpy, truth), strict=True)
    return [((x - t).abs().max() / t.abs().max()).item() for x, t in pairs]


def hops(trace, rank=0):
    """How many messages of blocks, and of couriers, a rank sent."""
    tags = [event.tag.split()[0] for event in trace.exchanges(rank)]
    return tags.count("kv"), tags.count("dkv")


straight = run(ring_backward, layout, shards)
small = [error < 1e-5 for error in errors(straight, layout, truth)]
print("dQ, dK, dV: relative errors below 1e-5:", small)
blocks, couriers = hops(straight.trace)
print(f"K/V {blocks} hops, dK/dV {couriers} hops; rank 0 sends to rank", *straight.trace.peers(0))
compare("09.hops", couriers)

# %% [markdown]
# **P − 1 and P.** The last K/V block to arrive is used and dropped, because its owner has it. A courier is different.
# After P − 1 hops it has been on every rank, and it is on the rank *before* its owner: complete, but in the wrong
# place. The P-th hop brings it home.
#
# Two remarks. One rank alone would send its courier to itself, which adds nothing to it. The package leaves this hop out,
# and so will you in the exercise. Alternatively the owner keeps its own term and adds it at the end. The courier then starts
# at the next rank and needs only P − 1 hops, but the kept term takes memory for the whole pass. We count P, as the package
# does.
#
# ## 4 · Watch it grow
#
# The next picture is read off the messages of a real run without a mask. Its inputs are chosen so that every sum shows
# which terms are in it. Each box is one courier. Each rank has a colour and a place in the box, which is filled when
# the rank has added its term. The number in that place says *whose* block the term belongs to. Press Play, or move the
# slider with the arrow keys.

# %% tags=["nbval-ignore-output"]
everything = partial(ring_backward, layout=None)
journey = courier_view.follow(everything, contiguous(8, 4))
courier_view.play(journey)

# %%
title = "Couriers travel with their block, one term richer at every stop"
show(courier_view.figure(journey, title), courier_view.describe(journey))

# %% [markdown]
# Follow the zeros. Courier 0 starts on rank 0 with rank 0's term, meets rank 1 in step 1, then 2 and 3. On every rank,
# the courier that arrives belongs to *the block that is there*. This is the invariant, and it is why each box holds
# only one number. In step 3 all boxes are full, each one rank before its home. The last column is what the ranks
# return.
#
# ## 5 · "The gradients go back the other way"
#
# It sounds right: backpropagation runs a program in reverse, so should the messages not run in reverse, too? Another
# `carry` tries it:

# %%
def backwards(ring, *sums, tag):
    """Send sums to the previous rank; return those of the next one."""
    into = tuple(torch.empty_like(x) for x in sums)
    way = {"to": ring.previous, "source": ring.next}
    return ring.comm.exchange(send=sums, receive=into, tag=tag, **way).wait()

# %% tags=["nbval-ignore-output"]
predict(
    "09.way",
    "We run it on 1, 2, 3, 4 and 6 ranks. On which of them is dK still right?",
    choices=["only 1", "1 and 2", "1, 2, 4 and 6", "all"],
)

# %%
fits = []
for P in (1, 2, 3, 4, 6):
    even = contiguous(24, P)
    pieces = [x[..., :24, :] for x in (dout, q, k, v, out)]
    reverse = run(ring_backward, even, cut(even, *pieces, lse[..., :24]), carry=backwards)
    wrong = errors(reverse, even, oracle.gradients(*pieces[1:4], pieces[0], causal=True))
    shown = ["below 1e-5" if error < 1e-5 else f"{error:10.2f}" for error in wrong]
    print(f"P = {P}: relative error of dQ {shown[0]}, dK {shown[1]}, dV {shown[2]}")
    fits += [P] if wrong[1] < 1e-5 else []
names = {(1,): "only 1", (1, 2): "1 and 2", (1, 2, 4, 6): "1, 2, 4 and 6"}
compare("09.way", names.get(tuple(fits), "all"))

# %%
against = partial(ring_backward, layout=None, carry=backwards)
reverse = courier_view.follow(against, contiguous(8, 4))
title = "Couriers against the blocks: terms of different blocks in one sum"
show(courier_view.figure(reverse, title), courier_view.describe(reverse))

# %% [markdown]
# Blocks and couriers run past each other. In steps 1 and 3 a courier meets a rank that holds *another* block, so its sum
# mixes terms of several blocks (dashed boxes). In step 2 courier and block belong together again, but the sums already
# hold foreign terms, so the boxes stay dashed. Shapes fit, nothing crashes, and dQ is right. **With two ranks
# everything is right**: next and previous are the same rank, so a test on two ranks finds nothing.
#
# Where does the idea of "reverse" come from? The backward of *send* is *receive*. Autograd through a ring of sends
# would indeed run every message backwards. It would have to keep all blocks, or fetch them again, in reverse order too.
# Our backward is another program: it goes around once more, forwards, and takes the sums along.
#
# ## 6 · Hide the hops
#
# `ring_backward` computes, then sends. The virtual clock charges 1 second for a computation and ½ for a hop. K and V
# can be posted before the computation, as in lesson 05. The courier cannot: it needs the term that is being computed.
# But **when is the courier needed?** The next rank adds to it only when *its* term for that block is ready, a whole
# step later. So the courier may travel while the next block is computed, one step behind.

# %%
def hidden_backward(ring, dout, q, k, v, out, lse, layout):
    """As ring_backward; blocks travel ahead, couriers one step behind."""
    P, delta, courier = ring.world_size, (dout * out).sum(-1), None
    dq = torch.zeros(q.shape)
    for step in range(P):
        blocks = ring.post(k, v, tag=f"kv {step}") if step < P - 1 else None
        inputs = dout, q, k, v, lse, delta, sees(layout, ring.rank, ring.origin(step))
        part, dk, dv = ring.compute(f"attend backward {step}", attend_backward, *inputs)
        dq += part
        if courier is not None:
            before = courier.wait()
            dk, dv = dk + before[0], dv + before[1]
        courier = ring.post(dk, dv, tag=f"dkv {step}")
        if blocks is not None:
            k, v = blocks.wait()
    return (dq, *courier.wait())

# %% tags=["nbval-ignore-output"]
predict(
    "09.clock", "4 ranks, 1 s for a block, ½ s for a hop. When is hidden_backward done?", unit="s"
)

# %%
hidden = run(hidden_backward, layout, shards)
small = [error < 1e-5 for error in errors(hidden, layout, truth)]
print("errors below 1e-5:", small, " hops:", hops(hidden.trace))
ends = [max(event.done for event in each.trace.exchanges()) for each in (straight, hidden)]
print("compute, then send:", ends[0], "s")
compare("09.clock", ends[1])

# %%
traces = {"Compute, then send": straight.trace, "Couriers one step behind": hidden.trace}
show(courier_view.lanes(traces), courier_view.describe_lanes(traces))

# %% [markdown]
# All ranks have the same timeline, so rank 0's is enough. Above, 4 computations and 7 hops take turns. Below, both travel
# while the rank computes: K/V in the step that posted them, a courier in the step after its own. Solid: in transit.
# Pale: arrived, and not yet needed; that is slack. Every hop is hidden but one: when the last courier leaves, nothing is
# left to compute. However fast the rest is, the last sum still has to come home. This clock charges ½ s for every
# message, even for two at once; section 7 counts their bytes.
#
# ## 7 · What it costs
#
# In bfloat16 training, K and V are bfloat16. Couriers are sums, and stay in float32.

# %% tags=["nbval-ignore-output"]
predict(
    "09.bytes",
    "8 ranks, bfloat16: how many times the bytes of the forward does a rank send in the backward?",
)

# %%
S, P, H, K, D = 4096, 8, 8, 2, 64  # H query heads, K heads of keys and values
even = zigzag(S, P)
text = tuple(x.bfloat16() for x in corpus.qkv(S, heads=H, kv_heads=K, head_dim=D))


def trained(layout, whole):
    """The outcome of a forward and a backward of the package's ring attention."""
    shards = [layout.shard(whole, rank) for rank in range(layout.P)]

    def train(ring):
        own = [x.requires_grad_() for x in shards[ring.rank]]
        ring_attention(*own, ring=ring, layout=layout, causal=True).sum().backward()

    return VirtualCluster(layout.P).run(train)


sent = [event.bytes_sent for event in trained(even, text).trace.exchanges(0)]
forward, backward = sum(sent[: P - 1]), sum(sent[P - 1 :])
block = 2 * (S // P) * K * D  # elements of K and V, or of dK and dV
print(f"forward  {forward:>9,} bytes: (P − 1) blocks, 2 bytes an element: {(P - 1) * block * 2:,}")
both = (P - 1) * block * 2 + P * block * 4
print(f"backward {backward:>9,} bytes: the same, and P couriers, 4 bytes an element: {both:,}")
compare("09.bytes", backward / forward)

# %% [markdown]
# **In all.** With e bytes an element (sums are at least float32, so max(e, 4) for a courier), the backward sends
# $1 + \frac{P}{P-1}\cdot\frac{\max(e, 4)}{e}$ times the bytes of the forward.
#
# **At once.** Whether hops are *hidden* depends on what travels behind one computation. Here that is at most one block
# and one courier, $\frac{e + \max(e, 4)}{e}$ times the bytes of the forward, for every P from 3 on. (The couriers' last
# hop is left out: no computation runs beside it.) Arithmetic grows as well: the forward makes two matrix products per
# block, the backward five. FLOPs per byte grow with the shard (lesson 06), so twice the bytes per FLOP need a shard
# twice as long.

# %%
for name, e in (("bfloat16", 2), ("float32", 4)):
    total, busiest = 1 + P / (P - 1) * max(e, 4) / e, (e + max(e, 4)) / e
    print(f"{name}: {total:.2f} times the bytes in all; behind a computation ", end="")
    print(f"{busiest:g} times the bytes, {5 / 2} times the FLOPs")
    sizes = Attention(H=H, K=K, D=D, dtype=name)
    least = [least_tokens_hidden(1e12, 1e9, sizes, backward=back) for back in (True, False)]
    print(f"{'':9} hidden from {busiest / 2.5:.2f} times the tokens per rank", end="")
    print(f" (ringlab.cost: {least[0] / least[1]:.2f})")
print(f"heads repeated before sending, {H} in place of {K}: {H // K} times the bytes")

# %% [markdown]
# If both passes reach the same FLOPs per second, the backward needs longer shards than the forward to hide its traffic in
# bfloat16, and shorter ones in float32. (Real backward kernels are slower, so lesson 06's plan asks for hardly longer
# shards.) Note the last line. Here 8 query heads share 2 K/V heads. Each of the four heads of a group gives a term for the
# shared dK: **add them up first**, then send.
#
# And what does a rank hold, beside its shard? In float32, we keep 64 tokens on every rank and take more ranks:

# %%
for ranks in (4, 8, 16):
    wider = zigzag(64 * ranks, ranks)
    longer = corpus.qkv(64 * ranks, heads=H, kv_heads=K, head_dim=D)
    peak = trained(wider, longer).memory[0].peak_bytes
    print(f"{ranks:2} ranks, peak in couriers: {peak / (2 * 64 * K * D * 4):4.1f}")

# %% [markdown]
# The peak does not grow with P. Gradients of the whole sequence would take P couriers on every rank.
#
# ## 8 · Why float32
#
# What would bfloat16 couriers cost in accuracy? Every stop adds a term *and rounds the whole sum*. A third `carry`:

# %%
def rounded(ring, *sums, tag):
    """Shift sums as a ring does that sends them in bfloat16."""
    return tuple(x.float() for x in ring.shift(*(x.bfloat16() for x in sums), tag=tag))

# %% tags=["nbval-ignore-output"]
predict(
    "09.rounded",
    "bfloat16 couriers: from 2 to 32 ranks, the error of dV …",
    choices=["stays about the same", "grows a few times", "grows like the hops, 16 times"],
)

# %%
ranks, curves = (2, 4, 8, 16, 32), {"float32 couriers": [], "bfloat16 couriers": []}
long = corpus.qkv(128, heads=2, head_dim=16)
long_dout = torch.randn(long[0].shape, generator=torch.Generator().manual_seed(1))
long_state = [torch.from_numpy(x).float() for x in oracle.attention(*long, causal=True)]
long_truth = oracle.gradients(*long, long_dout, causal=True)
for P in ranks:
    folded = zigzag(128, P)
    pieces = cut(folded, long_dout, *long, *long_state)
    for curve, carry in zip(curves.values(), (Ring.shift, rounded), strict=True):
        outcome = run(ring_backward, folded, pieces, carry=carry)
        curve.append(errors(outcome, folded, long_truth)[2])
growth = curves["bfloat16 couriers"][-1] / curves["bfloat16 couriers"][0]
print(f"bfloat16 couriers: error of dV at {ranks[-1]} ranks over that at {ranks[0]}: {growth:.0f}")
print(f"float32 couriers: below 1e-5 at every P: {max(curves['float32 couriers']) < 1e-5}")
words = ("stays about the same", "grows a few times", "grows like the hops, 16 times")
compare("09.rounded", words[(growth >= 1.5) + (growth >= 10)])

# %%
with styled():
    figure = new_figure((6.4, 3.2))
    axes = figure.subplots()
    for (label, curve), marker in zip(curves.items(), "os", strict=True):
        axes.loglog(ranks, curve, marker=marker, label=label, base=2)
    axes.set_yscale("log", base=10)
    axes.set(xlabel="ranks P", ylabel="relative error of dV", xticks=ranks, ylim=(1e-8, 1e-1))
    axes.hlines(curve[0], *ranks[:: len(ranks) - 1], linestyles=":", colors="C1")
    axes.text(ranks[-1], 2 * max(curve), f"× {growth:.0f} from 2 to 32", ha="right")
    axes.set_title("Only bfloat16 couriers get worse with more ranks")
    axes.set_xticklabels(ranks)
    axes.legend(loc="center right")
words = (
    "Relative error of dV against the number of ranks, both axes logarithmic. float32 couriers "
    "stay near 1e-7 from 2 to 32 ranks. bfloat16 couriers begin thousands of times higher and "
    "rise with the ranks, except for the last; a dotted line continues their value at 2 ranks."
)
show(figure, words)

# %% [markdown]
# With float32 the number of stops makes no difference. With bfloat16 it does: from 2 to 32 ranks the error grows 4
# times, so couriers that pass a tolerance on two devices need not pass it on 32. (It does not grow at every point,
# because roundings may cancel.) Lesson 10 shows why it grows.
#
# ## 9 · What else goes wrong, and which test notices
#
# Seven faults, each only a line or two away from the right program:

# %%
FAULTS = ("none", "dQ scaled twice", "own block left out", "the block's own lse",
          "K/V of the first step", "no last hop", "bfloat16 couriers", "couriers go back")
CARRIES = {"bfloat16 couriers": rounded, "couriers go back": backwards}


def faulty(ring, dout, q, k, v, out, lse, layout, fault):
    """ring_backward with one fault."""
    P, delta, carry = ring.world_size, (dout * out).sum(-1), CARRIES.get(fault, Ring.shift)
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    for step in range(P):
        mask = sees(layout, ring.rank, ring.origin(step))
        total = own_lse(q, k, mask) if fault == "the block's own lse" else lse
        part = attend_backward(dout, q, k, v, total, delta, mask)
        if step > 0 or fault != "own block left out":
            dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        if step < P - 1 or fault != "no last hop":
            dk, dv = carry(ring, dk, dv, tag="dkv")
        if step < P - 1:
            arrived = ring.shift(k, v)
            k, v = (k, v) if fault == "K/V of the first step" else arrived
    return (dq * q.shape[-1] ** -0.5 if fault == "dQ scaled twice" else dq), dk, dv

# %%
print(f"{'':21}   1 rank: dQ, dK, dV       2 ranks                  4 ranks")
seen = {1: 0, 2: 0, 4: 0}
for fault in FAULTS:
    cells = []
    for P in (1, 2, 4):
        even = contiguous(32, P)
        outcome = run(faulty, even, cut(even, dout, q, k, v, out, lse), fault=fault)
        found = errors(outcome, even, truth)
        seen[P] += max(found) >= 1e-5
        cells.append("  ".join("  ok  " if error < 1e-5 else f"{error:6.3f}" for error in found))
    print(f"{fault:21}   {'   '.join(cells)}")
print("faults found:", ", ".join(f"{count} with P = {P}" for P, count in seen.items()))

# %% [markdown]
# One rank shows three faults, two ranks show all but one. Read each line as a set of symptoms. *Scaled twice*: dQ alone
# is wrong. *Own block left out*: nothing is right, not even on one rank. *The block's own lse*, *K/V of the first
# step*: nothing is right, yet on one rank everything is. *No last hop*: dQ is right, dK and dV are the neighbour's.
# *bfloat16*: errors of some thousandths, which a tolerance of 1e-2 accepts. (One rank alone shows them too: in this
# program, unlike the package, it sends its courier to itself.) *Couriers go back*: only 4 ranks show it. So check **all
# three** gradients, on **three ranks or more**, to **1e-5** in float32.
#
# Two more faults depend on timing, and may or may not show on a given day. A tensor that has been posted belongs to
# the transport until `wait`: you may read it, but not write it. And a receive buffer (you may bring your own, by
# `into=`) holds nothing yet. `Strict`, which wraps the transport in the exercise, fills receive buffers with NaN until
# `wait`, and refuses a sent tensor that has changed. So both faults show at once:

# %%
def adds_to_what_is_sent(ring):
    ring, total = Ring(Strict(ring.comm)), torch.ones(2)
    work = ring.post(total)
    total += 1  # my term, into the very tensor that is being sent
    return work.wait()


def adds_before_it_arrives(ring):
    ring, buffer = Ring(Strict(ring.comm)), torch.zeros(2)
    work = ring.post(torch.ones(2), into=(buffer,))
    early = buffer + 1
    work.wait()
    return early.tolist()


try:
    VirtualCluster(2).run(adds_to_what_is_sent)
except RinglabError as error:
    print(error)
print("added before it arrived:", VirtualCluster(2).run(adds_before_it_arrives).results[0])

# %% [markdown]
# ## 10 · The package, and real processes
#
# `ring_attention` is differentiable: `backward()` runs the ring of this lesson, with blocks ahead and couriers behind.
# Here are its gradients against the oracle, and those of `hidden_backward` on four processes connected by gloo:

# %%
def package(ring, dout, q, k, v, out, lse, layout):
    own = [x.clone().requires_grad_() for x in (q, k, v)]
    ring_attention(*own, ring=ring, layout=layout, causal=True).backward(dout)
    return tuple(x.grad for x in own)


def on_process(ring):
    return hidden_backward(ring, *shards[ring.rank], layout=layout)


found = errors(run(package, layout, shards), layout, truth)
print("the package: errors below 1e-5:", [error < 1e-5 for error in found])
real = launch(on_process, 4)
pairs = zip(real.results, hidden.results, strict=True)
same = all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))
print("4 processes, bit for bit the virtual ranks:", same, "  hops:", hops(real.trace))

# %% [markdown]
# ## Recap
#
# - The backward of a pair of blocks needs q, k, v, dout, and the **final** lse and delta of its rows. Weights are
#   computed again, and blocks come around again.
# - dQ is a sum over blocks and stays at home. dK and dV are sums over *ranks*: they travel **with their block**, in the
#   same direction, one term richer at every stop.
# - K/V make P − 1 hops, dK/dV make P. With one courier hop less, every dK and dV ends on the neighbour; dQ is right. In
#   the other direction, terms of different blocks mix, and two ranks do not show it.
# - Couriers run one step behind and are hidden, except for the last hop. In bfloat16 a step sends 3 times the forward's
#   bytes behind 2.5 times its FLOPs.
# - Bytes in all: those of the forward plus P couriers in float32, with K/V heads only. Memory does not grow with P.
#
# [ringlab/plain_ring.py](../ringlab/plain_ring.py) has both rings in one file, forward and backward. You can now read
# it from top to bottom.
#
# ## Self-check
#
# Answer without scrolling up, then open.
#
# <details><summary>1. 5 ranks, step 2: whose courier does rank 0 send on, and which ranks have added to
# it?</summary>Rank 3's, because (0 − 2) mod 5 is 3. Ranks 3, 4 and 0 have added.</details>
#
# <details><summary>2. dQ is right; dK and dV are wrong on 4 ranks and right on 2. What do you suspect
# first?</summary>The direction of the couriers.</details>
#
# <details><summary>3. Why must rank 0 take part even in a step in which it sees nothing of the block?</summary>The courier
# passes through it, even if it adds nothing. Only the computation may be skipped.</details>
#
# <details><summary>4. What would you have to keep to run the backward without sending K and V
# again?</summary>Every block that came by: the whole sequence.</details>
#
# <details><summary>5. The trace of somebody's ring shows P − 1 hops of dK and dV. Is it a bug?</summary>No, if the
# owner adds its own term at home. Otherwise every rank holds the gradients of its neighbour's block.</details>
#
# Now build it, with a sliding window: [exercise 09](../exercises/09_backward_ring.ipynb).
