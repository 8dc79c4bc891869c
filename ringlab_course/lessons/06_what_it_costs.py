# %% [markdown]
# # 06 · What it costs
#
# **Afterwards you can** work out how many tokens each rank needs before a hop is hidden, say how long a ring takes, and
# name the link, the rank or the length that slows it down.
#
# **You need first** [lesson 05](05_emulated_ring.ipynb): the ring, its hops, and `post` before `wait`.
#
# **Minutes** 60 to read and run, in two parts of 40 and 20; the exercise takes another 60.
#
# Lesson 05 made a claim: hops are hidden behind the computation, as long as a hop takes no longer than a block's
# attention. Whether that holds on *your* machines decides whether ring attention is practical. Part 1 follows a single hop
# and finds the number of tokens that hides it. Part 2 takes that number to rings of real size.

# %%
import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from ringlab import Partial, VirtualCluster, zigzag
from ringlab.comm.virtual import Costs
from ringlab.cost.hardware import hardware
from ringlab.cost.memory import attention_work
from ringlab.cost.models import model
from ringlab.cost.planner import Request, plan
from ringlab.cost.simulate import simulate
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import (
    allgather_traffic, block_s, hop_s, least_tokens_hidden, ring_traffic
)
from ringlab_course import compare, predict
from ringlab.merge import merge
from ringlab_course.figures import overlap_view
from ringlab.viz import gantt
from ringlab.viz.style import INK, show

# %% [markdown]
# ## Part 1 · One hop
#
# ## 1 · A step is a race
#
# In a step, a rank with c tokens attends to a block of c keys. Meanwhile one block leaves and one arrives. If the
# computation ends last, the hop has cost nothing. So we count both: the FLOPs of one block pair, and the bytes of one
# block.
#
# The FLOPs come first, for a size that suits paper: 64 tokens per rank, one head of head dim D = 32.

# %% tags=["nbval-ignore-output"]
predict("06.flops", "64 queries and 64 keys, D = 32, one head, no mask: FLOPs of the products?",
        unit="FLOPs")

# %%
def attend(q, k, v):
    """Attention of q on one block, as a Partial; query head h reads K/V head h // (H // K)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return Partial(scores.softmax(-1) @ v, scores.logsumexp(-1))


def counted(function, *args):
    """Return the FLOPs of the matrix products in function(*args), as PyTorch counts them."""
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops()

# %%
q = k = v = torch.ones(1, 1, 64, 32)
print("scores alone:", f"{counted(torch.matmul, q, k.mT):,}", "  64·64·32 =", f"{64 * 64 * 32:,}")
compare("06.flops", counted(attend, q, k, v))

# %% [markdown]
# **4 · c² · D** per head. There are *two* products, q·kᵀ and weights·V, and each of their c²·D multiply-adds is *two*
# FLOPs.
#
# Now the bytes. We measure them on lesson 05's ring.

# %%
def my_ring(ring, q, k, v):
    """Lesson 05's first ring: compute, then shift."""
    state = Partial.identity(q)
    for step in range(ring.world_size):
        state = merge(state, ring.compute(f"attend {step}", attend, q, k, v))
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v)
    return state.out

# %% [markdown]
# Four ranks hold 64 tokens each, with 4 query heads on one K/V head, in float32. The trace knows what a hop sends:

# %%
def on_ranks(program, c, P=4, H=4, K=1, D=32, costs=None):
    """Return the trace of `program` on P virtual ranks of c tokens each."""
    shards = [torch.ones(1, heads, c, D) for heads in (H, K, K)]
    cluster = VirtualCluster(P, costs=costs)
    return cluster.run(lambda ring: program(ring, *(x.clone() for x in shards))).trace


print("bytes of a hop:", on_ranks(my_ring, c=64).exchanges(0)[0].bytes_sent)
print("K and V, 64 tokens, D = 32, 4 bytes a number:", 2 * 64 * 32 * 4)

# %% [markdown]
# The race depends on c. Double it, and double it again:

# %%
print("  c   FLOPs of a block pair   bytes of a hop   FLOPs per byte")
for c in (32, 64, 128, 256):
    flops = counted(attend, torch.ones(1, 4, c, 32), *[torch.ones(1, 1, c, 32)] * 2)
    sent = on_ranks(my_ring, c).exchanges(0)[0].bytes_sent
    print(f"{c:3}   {flops:21,}   {sent:14,}   {flops / sent:14.0f}")

# %% [markdown]
# Twice the tokens make four times the FLOPs, but only twice the bytes. **The computation grows like c², the message like
# c.** So on every machine there is a c from which the computation takes longer, and the hop can be hidden.
#
# In letters, with H query heads, K key/value heads and e bytes per element (c is lesson 00's L = S/P, and B, here without
# batches, means bandwidth):
#
# | | one step | in seconds |
# |---|---|---|
# | FLOPs of a block pair | 4 · c² · D · H | divided by F, FLOP/s |
# | bytes of a hop | 2 · c · D · K · e | divided by B, bytes/s in one direction |
#
# ## 2 · The threshold
#
# From which c is the hop hidden? That depends on F and B, so on the machine. Take an NVIDIA A100 and bfloat16, so e = 2,
# with as many K/V heads as query heads and no mask. NVLink, a fast link, joins the GPUs of one machine (a *node*).
# InfiniBand, a slower network, joins the nodes.

# %%
a100 = hardware("a100")
F, nvlink, infiniband = a100.peak("bfloat16"), a100.inside.bytes_per_s, a100.between.bytes_per_s
print(f"{a100.title}: {F / 1e12:g} TFLOP/s")
for place, link in (("inside a node", a100.inside), ("between nodes", a100.between)):
    print(f"{place}: {link.name}, {link.bytes_per_s / 1e9:g} GB/s in each direction")

# %% tags=["nbval-ignore-output"]
predict("06.nvlink", "How many tokens must a rank hold to hide a hop over NVLink?", unit="tokens")

# %% tags=["nbval-ignore-output"]
predict("06.infiniband", "And how many to hide a hop over InfiniBand?", unit="tokens")

# %% [markdown]
# A block takes 4·c²·D·H/F seconds, a hop 2·c·D·K·e/B seconds. The hop is hidden if the block takes at least as long. D and
# one c cancel, and what remains is
#
# $$c \;\ge\; \frac{e\,F}{2\,B}\cdot\frac{K}{H}.$$

# %%
def threshold(F, B, e=2, group=1):
    """Return the tokens per rank that hide a hop; `group` query heads share a K/V head."""
    return e * F / (2 * B) / group


compare("06.nvlink", threshold(F, nvlink))
compare("06.infiniband", threshold(F, infiniband))

# %% [markdown]
# **1,040 tokens** per rank over NVLink, **12,480** over InfiniBand. Now the times of the block and the hop, as the package
# computes them. Its `Attention` holds the sizes of a layer, here 32 query heads and as many K/V heads. In which lines does
# the block take longer?

# %%
mha = Attention(H=32, K=32, D=128, causal=False)
for c in (256, 1024, 4096, 16384):
    fast, slow = (hop_s(mha, c, B) * 1e6 for B in (nvlink, infiniband))
    block = block_s(mha, c, F) * 1e6
    print(f"c = {c:6,}: block {block:6,.0f} µs, NVLink {fast:3,.0f} µs, InfiniBand {slow:6,.0f} µs")
for name, B in (("NVLink", nvlink), ("InfiniBand", infiniband)):
    least = least_tokens_hidden(F, B, mha)
    print(f"{name}: {least:,.0f} tokens per rank by ringlab.cost, {8 * least:,.0f} on 8 such ranks")

# %% [markdown]
# At 8,320 tokens one GPU is enough; at 99,840 you begin to *want* a ring. So where a ring of 8 is wanted, its hops are
# usually hidden.
#
# The upper panel shows what rank 0 computes and what travels meanwhile, the lower one how both grow with c. The part of a
# hop that outlasts its block is *exposed*: the rank waits. In a live notebook, drag c past the threshold.

# %% tags=["nbval-ignore-output"]
overlap_view.play(c=512)

# %% [markdown]
# Two things shift the threshold. **Grouped heads** lower it: the work stays the same, and the message shrinks by a factor of
# H/K. **A causal mask** doubles it, in a layout that balances the work (lessons 07 and 08): half the work, the same message.

# %%
cases = {"8 / 8 heads, no mask": (1, False), "64 / 8 heads, no mask": (8, False),
         "64 / 8 heads, causal": (8, True)}
for name, (group, causal) in cases.items():
    yours = threshold(F, nvlink, group=group) * (2 if causal else 1)
    sizes = Attention(H=8 * group, K=8, causal=causal)
    theirs = least_tokens_hidden(F, nvlink, sizes)
    print(f"{name:22} NVLink: {yours:5,.0f} tokens per rank, by ringlab {theirs:5,.0f}")

# %% [markdown]
# The last line has the heads of Llama 3 70B: there, 260 tokens are enough over NVLink.
#
# Before you use your own B, read the data sheet twice. NVLink 3 is sold as 600 GB/s, but these count *both directions
# together*. The InfiniBand above is sold as 200 Gb/s, and these are *bits*, eight to a byte.

# %%
print(f"NVLink, 600 GB/s taken for one direction: {threshold(F, 600e9):7,.0f}")
print(f"NVLink, 300 GB/s one way:                 {threshold(F, 600e9 / 2):7,.0f}")
print(f"InfiniBand, 200 Gb/s taken for GB/s:      {threshold(F, 200e9):7,.0f}")
print(f"InfiniBand, 25 GB/s:                      {threshold(F, 200e9 / 8):7,.0f}")

# %% [markdown]
# ## 3 · Hide it
#
# The threshold says whether a hop *can* be hidden. The program must also hide it: post, compute, wait.

# %%
def overlapped_ring(ring, q, k, v):
    """Post, compute, wait: double buffered."""
    state = Partial.identity(q)
    for step in range(ring.world_size):
        work = ring.post(k, v) if step < ring.world_size - 1 else None
        state = merge(state, ring.compute(f"attend {step}", attend, q, k, v))
        if work:
            k, v = work.wait()
    return state.out

# %% [markdown]
# We run both rings on a clock, on a machine slow enough for mental arithmetic. The cluster asks `compute` how long a
# computation takes, and `message` how long a tensor travels.

# %%
class Machine(Costs):
    """Virtual seconds by FLOPs and bytes: F FLOP/s on a rank, B bytes/s on a link."""

    def __init__(self, F, B):
        self.F, self.B = F, B

    def compute(self, rank, label, args):
        return counted(attend, *args) / self.F

    def message(self, source, to, nbytes):
        return 2 * nbytes / self.B  # nbytes of K or of V: both travel, each gets half the link


slow_machine = Machine(F=2304, B=192)
print("threshold in float32:", threshold(2304, 192, e=4), "tokens")
print("12 tokens, D = 8: block", 4 * 12**2 * 8 / 2304, "s, hop", 2 * 12 * 8 * 4 / 192, "s")

# %% [markdown]
# We give each of 4 ranks 12 tokens, half of the threshold. The time from the start until the last rank ends is the
# *makespan*.

# %% tags=["nbval-ignore-output"]
predict("06.makespan", "Block 2 s, hop 4 s, 4 ranks, double buffered: when does the last rank end?",
        unit="s")

# %%
def both(c):
    """Return the traces of both rings with c tokens per rank, and their names."""
    programs = {"one buffer": my_ring, "double buffered": overlapped_ring}
    traces = [on_ranks(each, c, H=1, K=1, D=8, costs=slow_machine) for each in programs.values()]
    return traces, [f"{c} tokens, {name}" for name in programs]


def makespan(trace):
    """Return the seconds until the last rank has ended."""
    return max(event.end for event in trace.computes())


few = both(12)
for trace, name in zip(*few, strict=True):
    print(f"{name:26} ends at {makespan(trace):.0f} s, rank 0 waits {trace.exposed(0):2.0f} s")
compare("06.makespan", makespan(few[0][1]))

# %% [markdown]
# With one buffer the times add up: P blocks and P − 1 hops, 4·2 + 3·4 = 20 s. Double buffered, each of the P − 1 steps with
# a hop takes the *longer* of the two, and the last block comes on top: **(P − 1) · max(block, hop) + block** = 3·4 + 2 = 14
# s.

# %%
picture = gantt.compare(*few)
picture.axes[-1].set_xticks(range(0, 21, 2))
show(picture, gantt.describe_all(*few))

# %% [markdown]
# Each row shows what a rank computes and, hatched, when it waits. The narrow lane below it shows its exchange: solid orange
# in transit, pale (in the next picture) while it is posted but does not travel. Double buffering helps here, but 2 s of each
# hop stay exposed.
#
# Now 36 tokens, above the threshold: a block takes 18 s, a hop 12 s.

# %%
many = both(36)
for trace, name in zip(*many, strict=True):
    print(f"{name:26} ends at {makespan(trace):3.0f} s, rank 0 waits {trace.exposed(0):2.0f} s")
print("36 tokens: block", 4 * 36**2 * 8 / 2304, "s, hop", 2 * 36 * 8 * 4 / 192, "s")
show(gantt.compare(*many), gantt.describe_all(*many))

# %% [markdown]
# Double buffered, not a second is lost: 72 s are four blocks of 18 s. The pale part of each lane is the slack: a hop has
# arrived 6 s before the rank needs its block.

# %% [markdown]
# ---
# **End of part 1. This is a good place to stop.** You know now how many tokens hide a hop, and how a program hides it. That
# is enough for the stages 06.threshold and 06.overlap of [the exercise](../exercises/06_what_it_costs.ipynb). If you return
# in a fresh kernel, run all cells up to here first.
#
# ---

# %% [markdown]
# ## Part 2 · The whole ring
#
# So far all ranks and all links were alike. What if one link is slow, or one rank, or the ranks are many? We ask a
# simulator. `simulate` runs the *real* ring program on tensors that have a shape and no data, and charges it the time that
# the hardware would take.
#
# ## 4 · One slow link
#
# We simulate H100s, 8 in a node, with the heads of Llama 3 70B, a causal mask and the balanced *zig-zag* layout of lesson
# 08. First the two thresholds. They now count *latency*, too: the time that a message takes besides its bytes. F is the rate
# that published kernels reach.

# %%
h100, layer = hardware("h100"), model("llama3-70b").attention()
reached = h100.peak("bfloat16") * h100.reached.attention_forward
print(f"{reached / 1e12:.0f} TFLOP/s")
for link in (h100.inside, h100.between):
    least = least_tokens_hidden(reached, link.bytes_per_s, layer, latency_s=link.latency_s)
    print(f"{link.name}: {link.bytes_per_s / 1e9:g} GB/s, {link.latency_s * 1e6:g} µs a message, "
          f"hidden from {math.ceil(least):,} tokens per rank")

# %% [markdown]
# A ring over two nodes has 16 links, and only two of them are InfiniBand: 7 → 8 and 15 → 0. With 2,048 tokens per rank, hops
# over NVLink are hidden, and those over InfiniBand are not. *Hops cost 25%* would mean: with free hops the ring takes 25%
# less time.

# %% tags=["nbval-ignore-output"]
predict("06.border", "Two nodes, 2,048 tokens per rank: what percentage of the ring's time do "
        "hops cost?", unit="%")

# %%
lost = {}
for c in (256, 512, 1024, 2048, 4096, 8192):
    one, two = (simulate(layer, zigzag(c * P, P), h100) for P in (8, 16))
    inside, lost[c] = (run.exposed_s / run.makespan_s for run in (one, two))
    print(f"c = {c:5,}: hops cost {inside:4.0%} of the time in one node, {lost[c]:4.0%} over two")
compare("06.border", 100 * lost[2048])
print(f"2,048 tokens are {2048 / least:.0%} of InfiniBand's threshold")

# %% [markdown]
# Over two nodes InfiniBand's threshold decides for *all* ranks. At 60% of it a block lasts about 60% of a hop, so the whole
# ring waits for the other 40%. Beyond it, at 4,096 tokens, hops cost nothing. Look at the ranks beside the link 7 → 8:

# %%
crossing = simulate(layer, zigzag(2048 * 16, 16), h100).trace()
title, ranks = "Two nodes", range(5, 11)
picture = gantt.figure(crossing, title, ranks=ranks)
ax = picture.axes[0]
ax.axhline(3, color=INK, linewidth=1.2)
names = [f"node {rank // 8}, rank {rank}" for rank in ranks]
ax.set_yticks([0.5, 1.5, 2.5, 3, 3.5, 4.5, 5.5], [*names[:3], "InfiniBand, 7 → 8", *names[3:]])
show(picture, gantt.describe(crossing, title) + " A line between ranks 7 and 8 parts the nodes.")

# %% [markdown]
# Rank 7 sends over InfiniBand to rank 8, and both wait. A message begins only when both its ends have posted it. So while
# rank 7 waits, rank 6 cannot send to it, and soon waits, too. The delay moves on, here one rank further every other step,
# and in the end all ranks keep InfiniBand's pace.
#
# ## 5 · One slow rank
#
# A slow link slows all. Does a slow rank?

# %% tags=["nbval-ignore-output"]
predict("06.slow", "One of 64 ranks takes 1.5 times as long to compute. The whole ring takes …",
        unit="times as long")

# %%
even, late = (simulate(layer, zigzag(8192 * 64, 64), h100, slow=slow) for slow in ({}, {5: 1.5}))
print(f"ranks compute {even.busy_fraction:.0%} of the time")
print(f"with one slow rank: {late.busy_fraction:.0%}")
compare("06.slow", late.makespan_s / even.makespan_s)

# %% [markdown]
# A ring is as slow as its slowest rank, not as the average one. That rank's own 64 blocks take 1.5 times as long, and
# the ring has ended only when it has.
#
# ## 6 · More ranks
#
# Above, more ranks meant more tokens. Now keep the *sequence*, 131,072 tokens, and add ranks, to be done sooner. Then
# c = S/P shrinks, and with it the computation that hides a hop.

# %% tags=["nbval-ignore-output"]
predict("06.more", "131,072 tokens on 128 ranks in place of 64: the ring is …",
        ["about twice as fast", "a little faster", "slower"])

# %%
ended = {}
for P in (8, 16, 32, 64, 128):
    run = simulate(layer, zigzag(131072, P), h100)
    ended[P], share = run.makespan_s, run.exposed_s / run.makespan_s
    print(f"{P:3} ranks, {131072 // P:6,} tokens each: "
          f"{ended[P] * 1e3:5.2f} ms, hops cost {share:.0%}")
gain = ended[64] / ended[128]
verdict = "slower" if gain < 1 else "a little faster" if gain < 1.5 else "about twice as fast"
compare("06.more", verdict)

# %% [markdown]
# Down to the threshold, twice the ranks halve the time. Below it they gain little, and soon they lose: every rank still
# has to see the whole sequence, and more hops add latency. **From there on, add ranks when the context grows, not to speed
# up a context you already have.**
#
# ## 7 · What a ring is for
#
# A ring computes no FLOP less. Does it at least send less than an *all-gather*, in which each rank sends its block to all
# others at once? Here are both, for one layer and 16,384 tokens per rank:

# %%
block = layer.block_bytes_per_token * 16384
print("ranks      tokens   GB sent: ring  all-gather   GB of others held: ring  all-gather")
for P in (8, 64, 512):
    layout = zigzag(16384 * P, P)
    sent = [traffic(layer, layout).total_bytes for traffic in (ring_traffic, allgather_traffic)]
    held = [attention_work(layer, 16384, P).slots, (P - 1) * block]
    ring, gathered, slots, whole = (nbytes / 1e9 for nbytes in sent + held)
    print(f"{P:5} {16384 * P:11,} {ring:15.2f} {gathered:11.2f} {slots:25.2f} {whole:11.2f}")

# %% [markdown]
# No: both send P − 1 blocks. But an all-gather holds the blocks of all others at once, and a ring only two, the one in use
# and the one that arrives. **A ring saves memory, neither bytes nor FLOPs.** So the context can grow with the number of
# ranks, and the threshold tells you that its hops need not cost time.
#
# Does that hold for a whole model? `plan` knows the threshold, and also what else training keeps in memory (lesson 14).
# Take a sequence of 1,000,000 tokens on 16 nodes:

# %%
chosen = plan(Request("llama3-70b", 1_000_000, "h100", nodes=16))
print(chosen.request.command())
print(chosen.answer)
for hop in chosen.hidden:
    print(f"{hop.name:18}: {hop.tokens:,} tokens per rank over {hop.link}, "
          f"hidden from {hop.least_tokens:,.0f}")

# %% [markdown]
# It fits, and in every pass a rank has more tokens than InfiniBand's threshold, so the ring's hops cost almost no time. (In
# *full recomputation* the backward computes the forward again. The backward itself sends more bytes for each FLOP, but its
# kernels reach a lower rate, so its threshold is hardly higher.) The first line printed is the command that asks the same in
# a terminal. Ask it about your own cluster.

# %% [markdown]
# ## Recap
#
# - A step computes 4·c²·D·H FLOPs and sends 2·c·D·K·e bytes. The first grows like c², the second like c.
# - A hop is hidden from c = e·F/(2·B) · K/H tokens per rank, and from twice that under a balanced causal mask. B is one
#   direction of the link, in bytes per second.
# - Double buffered, a uniform ring takes (P − 1) · max(block, hop) + block; with one buffer P · block + (P − 1) · hop.
# - One slow link or one slow rank sets the pace of all.
# - A ring sends what an all-gather sends, but holds only two blocks of others.
#
# ## Self-check
#
# Answer first, then open the answer.
#
# <details><summary>1. You double the tokens per rank. What happens to block, hop and their ratio?</summary>The block takes
# four times as long, the hop twice, so the ratio of block to hop doubles.</details>
#
# <details><summary>2. Elements become one byte instead of two, and F doubles. What happens to the threshold?</summary>e·F
# stays the same, and so does the threshold.</details>
#
# <details><summary>3. A hop takes 3 times as long as a block, P = 5, double buffered. How many blocks long is the
# run?</summary>4 · 3 + 1 = 13.</details>
#
# <details><summary>4. Why can more ranks on a fixed sequence expose communication that was hidden?</summary>c = S/P falls
# below the threshold.</details>
#
# <details><summary>5. A colleague's link does "400 gigabit". Which B do you use?</summary>50 GB/s, if 400 gigabit per second
# is the rate of one direction.</details>
#
# Now build it: [exercise 06](../exercises/06_what_it_costs.ipynb), the threshold, a makespan, a ring that hides its hops in
# less memory, a table.
