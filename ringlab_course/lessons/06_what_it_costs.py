# %% [markdown]
# # 06 · What it costs
#
# **Afterwards you can** work out how many tokens each rank needs before a hop is hidden, count what a rank sends and holds,
# and size a cluster for a model and a context.
#
# **You need first** [lesson 05](05_emulated_ring.ipynb): the ring, its hops, and `post` before `wait`.
#
# **Minutes** 75 to read and run; the exercise takes another 60.
#
# Lesson 05 made a claim: hops are hidden behind the computation, as long as a hop takes no longer than a block's
# attention. Whether that holds on *your* machines decides whether ring attention is practical.

# %%
import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from ringlab import Partial, VirtualCluster, contiguous, zigzag
from ringlab.comm.virtual import Costs
from ringlab.cost.flops import attention_flops
from ringlab.cost.hardware import hardware
from ringlab.cost.memory import attention_bytes, attention_work, kv_cache_bytes
from ringlab.cost.models import model
from ringlab.cost.papers import striped_speedup
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
# ## 1 · One step: FLOPs and bytes
#
# In a step, a rank with c tokens attends to a block of c keys. Meanwhile one block leaves and one arrives. So a step is a
# race between the FLOPs of one block pair and the bytes of one block. We count the FLOPs first, for a size that suits paper:
# 64 tokens per rank, one head of head dim D = 32.

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


q = k = v = torch.ones(1, 1, 64, 32)
print("scores alone:", f"{counted(torch.matmul, q, k.mT):,}", "  64·64·32 =", f"{64 * 64 * 32:,}")
compare("06.flops", counted(attend, q, k, v))

# %% [markdown]
# **4 · c² · D** per head. There are *two* products, q·kᵀ and weights·V, and each of their c²·D multiply-adds is *two*
# FLOPs.
#
# Now the bytes. We measure them on the emulated ring: lesson 05's `my_ring` on four ranks of c tokens, with 4 query
# heads on one K/V head.

# %%
def my_ring(ring, q, k, v):
    """Lesson 05's first ring: compute, then shift."""
    state = Partial.identity(q)
    for step in range(ring.world_size):
        state = merge(state, ring.compute(f"attend {step}", attend, q, k, v))
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v)
    return state.out


def on_ranks(program, c, P=4, H=4, K=1, D=32, costs=None):
    """Run `program` on P virtual ranks of c tokens each."""
    shards = [torch.ones(1, heads, c, D) for heads in (H, K, K)]
    cluster = VirtualCluster(P, costs=costs)
    return cluster.run(lambda ring: program(ring, *(x.clone() for x in shards)))

# %%
print("  c   FLOPs of a block pair   bytes of a hop   FLOPs per byte")
for c in (32, 64, 128, 256):
    flops = counted(attend, torch.ones(1, 4, c, 32), *[torch.ones(1, 1, c, 32)] * 2)
    sent = on_ranks(my_ring, c).trace.exchanges(0)[0].bytes_sent
    print(f"{c:3}   {flops:21,}   {sent:14,}   {flops / sent:14.0f}")
print(f"by hand, c = 256: 4·c²·D·H = {4 * 256**2 * 32 * 4:,}, 2·c·D·K·e = {2 * 256 * 32 * 4:,}")

# %% [markdown]
# Twice the tokens make four times the FLOPs, but only twice the bytes. **The computation grows like c², the message like
# c.** So on every machine there is a c from which the computation takes longer, and the hop can be hidden. In letters, with
# H query heads, K key/value heads and e bytes per element (here there is one sequence, so B is free to mean bandwidth; c is
# lesson 00's L = S/P):
#
# | | one step | in seconds |
# |---|---|---|
# | FLOPs of a block pair | 4 · c² · D · H | divided by F, FLOP/s |
# | bytes of a hop | 2 · c · D · K · e | divided by B, bytes/s in one direction |
#
# ## 2 · The threshold
#
# Take an NVIDIA A100 and bfloat16, so e = 2, with as many K/V heads as query heads and no mask. NVLink, a fast link, joins
# the GPUs of one machine (a *node*). InfiniBand, a slower network, joins the nodes.

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
# A block takes 4·c²·D·H/F seconds, a hop 2·c·D·K·e/B seconds. The hop is hidden if the block takes at least as long;
# otherwise the rest of it is *exposed*, and the rank waits. D and one c cancel, and what remains is
#
# $$c \;\ge\; \frac{e\,F}{2\,B}\cdot\frac{K}{H}.$$
#
# We check this against the package. Its `Attention` holds the sizes of a layer, here 32 query heads and as many K/V heads.

# %%
def threshold(F, B, e=2, group=1):
    """Return the tokens per rank that hide a hop; `group` query heads share a K/V head."""
    return e * F / (2 * B) / group


mha = Attention(H=32, K=32, D=128, causal=False)
for c in (256, 1024, 4096, 16384):
    fast, slow = (hop_s(mha, c, B) * 1e6 for B in (nvlink, infiniband))
    block = block_s(mha, c, F) * 1e6
    print(f"c = {c:6,}: block {block:6,.0f} µs, NVLink {fast:3,.0f} µs, InfiniBand {slow:6,.0f} µs")
for name, B in (("NVLink", nvlink), ("InfiniBand", infiniband)):
    print(f"{name}: {least_tokens_hidden(F, B, mha):,.0f} tokens per rank by ringlab.cost, "
          f"{8 * threshold(F, B):,.0f} on 8 such ranks")
compare("06.nvlink", threshold(F, nvlink))
compare("06.infiniband", threshold(F, infiniband))

# %% [markdown]
# **1,040 tokens** per rank over NVLink, **12,480** over InfiniBand. With 8 ranks that is a context of 8,320 and of
# 99,840 tokens. At 8,320 tokens one GPU is enough; at 99,840 you begin to *want* a ring. So where a ring is wanted, its
# hops are usually hidden. With more ranks the context must grow too: section 5.
#
# The upper panel shows what rank 0 computes and what travels meanwhile, the lower one how both grow with c. In a live
# notebook, drag c past the threshold. Then choose another machine, or your own F and B.

# %% tags=["nbval-ignore-output"]
overlap_view.play(c=512)

# %% [markdown]
# Two things shift the threshold. **Grouped heads** lower it: the work stays the same, and the message shrinks by a factor of
# H/K. **A causal mask** doubles it, in a layout that balances the work (lessons 07 and 08): half the work, the same message.

# %%
cases = {"8 / 8 heads, no mask": (1, False), "64 / 8 heads, no mask": (8, False),
         "64 / 8 heads, causal": (8, True)}
for name, (group, causal) in cases.items():
    sizes = Attention(H=8 * group, K=8, causal=causal)
    times = 2 if causal else 1
    yours = [times * threshold(F, B, 2, group) for B in (nvlink, infiniband)]
    theirs = [least_tokens_hidden(F, B, sizes) for B in (nvlink, infiniband)]
    same = all(map(math.isclose, yours, theirs))
    print(f"{name:22}  NVLink {yours[0]:5,.0f}  InfiniBand {yours[1]:6,.0f}   by ringlab: {same}")

# %% [markdown]
# Llama 3 70B's 64 query heads on 8 K/V heads need only 260 tokens per rank to hide a hop over the A100's NVLink under a
# causal mask.
#
# You may read "1,024 tokens, at 600 GB/s". That is our 1,040, rounded to a power of two, but its derivation has two
# mistakes: NVLink 3's 600 GB/s count *both directions together*, and the FLOPs were counted as 2·c²·D. The first mistake
# halves the threshold, the second doubles it. The last two lines printed below show another slip: a network's data sheet
# counts bits, eight to a byte.

# %%
print(f"right, 300 GB/s one way, 4·c²·D:      {threshold(F, 300e9):8,.0f}")
print(f"600 GB/s taken for one direction:     {threshold(F, 600e9):8,.0f}")
print(f"the same, and 2·c²·D FLOPs:           {2 * threshold(F, 600e9):8,.0f}")
print(f"InfiniBand's 200 Gb/s taken for GB/s: {threshold(F, 200e9):8,.0f}")
print(f"InfiniBand's 200 Gb/s, 25 GB/s:       {threshold(F, 200e9 / 8):8,.0f}")

# %% [markdown]
# The mistakes cancel, so the figure looks right for the wrong reason.
#
# ## 3 · With a clock
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


# The cluster calls compute() for every ring.compute and message() for every tensor that is sent.
class Machine(Costs):
    """Virtual seconds by FLOPs and bytes: F FLOP/s on a rank, B bytes/s on a link."""

    def __init__(self, F, B):
        self.F, self.B = F, B

    def compute(self, rank, label, args):
        return counted(attend, *args) / self.F

    def message(self, source, to, nbytes):
        return 2 * nbytes / self.B  # nbytes of K or of V: both travel, each gets half the link

# %% [markdown]
# Our machine is slow enough for mental arithmetic: 2,304 FLOP/s and 192 bytes/s, so its threshold in float32 is 24 tokens.
# We give each of 4 ranks 12 tokens, one head and D = 8. Then a block takes 2 s and a hop 4 s.

# %% tags=["nbval-ignore-output"]
predict("06.makespan", "Block 2 s, hop 4 s, 4 ranks, double buffered: when does the last rank end?",
        unit="s")

# %%
slow_machine = Machine(F=2304, B=192)
print("threshold:", threshold(2304, 192, e=4), "tokens")
runs = {}
for c in (12, 36):
    for name, program in (("one buffer", my_ring), ("double buffered", overlapped_ring)):
        runs[f"{c} tokens, {name}"] = on_ranks(program, c, H=1, K=1, D=8, costs=slow_machine).trace
for name, trace in runs.items():
    end = max(event.end for event in trace.computes())
    print(f"{name:26} ends at {end:3.0f} s, rank 0 waits {trace.exposed(0):2.0f} s")
double = runs["12 tokens, double buffered"]
compare("06.makespan", max(event.end for event in double.computes()))

# %% [markdown]
# With one buffer the times add up: P blocks and P − 1 hops, 4·2 + 3·4 = 20 s. Double buffered, each of the P − 1 steps with
# a hop takes the *longer* of the two, and the last block comes on top: **(P − 1) · max(block, hop) + block** = 3·4 + 2 = 14
# s. (Not P · max, 16 s, nor the hops alone, 12 s.) The time from the start until the last rank ends is the *makespan*.

# %%
def pair(c):
    """Return the traces and the names of both rings with c tokens per rank."""
    names = [name for name in runs if name.startswith(str(c))]
    return [runs[name] for name in names], names


picture = gantt.compare(*pair(12))
picture.axes[-1].set_xticks(range(0, 21, 2))
show(picture, gantt.describe_all(*pair(12)))

# %% [markdown]
# Each row shows what a rank computes and, hatched, when it waits. The narrow lane below it shows its exchange, sent and
# received: solid orange in transit, pale (in the next picture) while it is posted but does not travel. At 12 tokens,
# below the threshold, double buffering helps, but 2 s of each hop stay exposed. At 36 tokens, above the threshold:

# %%
show(gantt.compare(*pair(36)), gantt.describe_all(*pair(36)))

# %% [markdown]
# Not a second is lost: 72 s are four blocks of 18 s. Here the pale part of each lane is the slack: a hop of 12 s has arrived
# 6 s before the rank needs it. The price is `shift` split into `post` and `wait`; memory is the same, for a shift needs both
# buffers, too.
#
# ## 4 · What is sent, what is held
#
# Over all steps a rank sends P − 1 blocks. An all-gather, where each rank sends its own block to the P − 1 others, sends as
# much. The trace and the formulas agree:

# %%
sizes, layout = Attention(H=4, K=1, D=32, dtype="float32", causal=False), contiguous(8 * 64, 8)
print("trace      ", on_ranks(overlapped_ring, c=64, P=8).trace.bytes_sent(0))
ring, gathered = ring_traffic(sizes, layout), allgather_traffic(sizes, layout)
print("ring       ", ring.total_bytes, "in", ring.steps, "steps")
print("all-gather ", gathered.total_bytes, "in", gathered.steps, "step")
print("FLOPs by ringlab.cost:", attention_flops(sizes, 64 * 64))
print("FLOPs counted:        ", counted(attend, *[torch.ones(1, 4, 64, 32)] * 3))

# %% [markdown]
# Ring attention saves neither bytes nor FLOPs. It cuts the bytes into blocks small enough to hide, and it keeps **memory**
# flat. Whatever P is, a rank holds c tokens of q, k, v and out, and a few K/V blocks of others. Let us count in heads: one
# head of one token is D numbers. Per token, q and out together are 2·H heads, and one K/V block 2·K. The Ring Attention
# paper counts two K/V blocks, the one in use and the one that arrives: 2·H + 4·K. Here is that count for one layer of Llama
# 3 70B, with 16,384 tokens per rank:

# %%
llama = model("llama3-70b")
layer = llama.attention()
for P in (8, 64, 512):
    here, whole = (attention_bytes(layer, 16384, P, kind) / 1e9 for kind in ("ring", "allgather"))
    print(f"{P:3} ranks, {16384 * P:9,} tokens: "
          f"ring (paper's count) {here:.2f} GB, all-gather {whole:5.2f} GB")
head = llama.D * 16384 * 2
print(f"the paper's count, 2·H + 4·K heads: {(2 * llama.H + 4 * llama.K) * head / 1e9:.2f} GB")
for P in (2, 3, 8):
    held = attention_work(layer, 16384, P).slots  # bytes of K/V of other ranks
    blocks = held / (2 * llama.K * head)
    print(f"our ring on {P} ranks: K/V blocks of others on a rank at once: {blocks:.0f}")
print(f"our ring, 2·H + 6·K heads:          {(2 * llama.H + 6 * llama.K) * head / 1e9:.2f} GB")

# %% [markdown]
# Our ring also keeps its own block, because the caller needs it for the backward. So from 3 ranks on it holds three
# blocks: its own, the one in use and the one that arrives. That makes 2·H + 6·K. In the exercise you get most of the
# third block back. (Neither count has the float32 accumulator of out: H heads at 4 bytes a number take the room
# of 2·H heads in bfloat16.)
#
# Shards also divide what *generating* text has to keep, lesson 01's KV cache of all layers:

# %%
cache = kv_cache_bytes(llama, 1_000_000) / 1e9
print(f"K and V of a million tokens: {cache:.0f} GB (K alone {cache / 2:.2f} GB), "
      f"so at least {math.ceil(cache / 80)} GPUs of 80 GB")

# %% [markdown]
# ## 5 · Many ranks: the simulator
#
# So far all ranks and all links were alike. A real ring crosses nodes, and some of its ranks are slow. `simulate` runs
# the *real* ring program on tensors that have a shape and no data. It charges blocks by their FLOPs, at the rate that
# published kernels reach, and messages by the bytes and the latency of their link.
#
# We simulate H100s, 8 in a node, with section 4's `layer` (Llama 3 70B's heads and a causal mask) and the balanced *zig-zag*
# layout of lesson 08. First the thresholds. Now *latency* counts too: the time that a message takes besides its bytes.

# %%
h100 = hardware("h100")
reached = h100.peak("bfloat16") * h100.reached.attention_forward
for link in (h100.inside, h100.between):
    tokens = least_tokens_hidden(reached, link.bytes_per_s, layer, latency_s=link.latency_s)
    print(f"{link.name}: hidden from {math.ceil(tokens):,} tokens per rank, at "
          f"{reached / 1e12:.0f} TFLOP/s, {link.bytes_per_s / 1e9:g} GB/s and "
          f"{link.latency_s * 1e6:g} µs a message")

# %% [markdown]
# Now the ring in one node, and over two. *Hops cost 25%* means: with free hops the ring would take 25% less time.

# %% tags=["nbval-ignore-output"]
predict("06.border", "Two nodes, 2,048 tokens per rank: what percentage of the ring's time do "
        "hops cost?", unit="%")

# %%
for c in (256, 512, 1024, 2048, 4096, 8192):
    one, two = (simulate(layer, zigzag(c * P, P), h100) for P in (8, 16))
    inside, across = (run.exposed_s / run.makespan_s for run in (one, two))
    print(f"c = {c:5,}: hops cost {inside:4.0%} of the time in one node, {across:4.0%} over two")
    if c == 2048:
        measured = 100 * across
compare("06.border", measured)
link = h100.between
share = block_s(layer, 2048, reached) / (hop_s(layer, 2048, link.bytes_per_s) + link.latency_s)
lost = 1 - 16 * share / (15 + share)
print(f"by hand, c = 2,048: block / hop = {share:.0%}; lost in 15 hops and a block: {lost:.0%}")

# %% [markdown]
# Over two nodes InfiniBand's threshold decides, although only two of the 16 links are InfiniBand, 7 → 8 and 15 → 0: with
# 2,048 of 3,404 tokens, a rank computes for 58% of each hop's time. The last block has no hop, so 40% of the whole is lost.
# Look at the ranks beside the first of these links:

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
# Rank 7 sends over InfiniBand to rank 8, and both wait. A message begins only when both its ends have posted it, so the
# delay spreads in both directions. Rank 6, for example, posts its third message to rank 7 when its block 2 begins. Rank 7 is
# ready to receive it only after two hops over InfiniBand, so rank 6 waits, too: its first hatching. Here the delay moves one
# rank further every other step, and in the end all ranks keep InfiniBand's pace. Each lane shows both directions of an
# exchange. If the sent and the received block travel at different times, you see two orange pieces. A rank that is done
# counts as idle until the last one ends.
#
# What about a slow *rank*?

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
# So far more ranks meant more tokens. Now keep the *sequence*, 131,072 tokens, and add ranks. Then c = S/P shrinks, and with it
# the computation that hides a hop.

# %% tags=["nbval-ignore-output"]
predict("06.more", "131,072 tokens on 128 ranks in place of 64: the ring is …",
        ["about twice as fast", "a little faster", "slower"])

# %%
ended = {}
for P in (8, 16, 32, 64, 128):
    run = simulate(layer, zigzag(131072, P), h100)
    ended[P], share = run.makespan_s, run.exposed_s / run.makespan_s
    print(f"{P:3} ranks, {131072 // P:6,} tokens each: {ended[P] * 1e3:5.2f} ms, "
          f"an even share would be {ended[8] * 8 / P * 1e3:5.2f} ms, hops cost {share:.0%}")
gain = ended[64] / ended[128]
verdict = "slower" if gain < 1 else "a little faster" if gain < 1.5 else "about twice as fast"
compare("06.more", verdict)

# %% [markdown]
# Down to the threshold, twice the ranks halve the time. Below it they gain little, and soon they lose: every rank still
# has to see the whole sequence, and more hops add latency. **From there on, add ranks when the context grows, not to speed
# up a context you already have.**
#
# ## 6 · Size a cluster
#
# How many machines? You want to *train* Llama 3 70B on sequences of 1,000,000 tokens. Besides attention, memory has to hold
# what training needs:
#
# | name | what it is |
# |---|---|
# | weights and optimizer | the weights in bfloat16; in float32 their gradients, Adam's copy of the weights and its two running means. Every GPU keeps an equal share (FSDP, *fully sharded data parallel*); besides, it holds the *gathered* weights of the layer at work and the next, and one layer's gradient, on its way to the other GPUs |
# | activations | what a forward keeps for the backward; under *full recomputation* this is each layer's input, and the backward computes the rest of a layer again |
# | logits | a score of every word of the vocabulary, for every token |
# | attention's own | the ring's K/V blocks; dK, dV and float32 results in between, which lesson 09's backward needs (until then, take the size on trust) |
#
# The rest is the layer whose backward is at work: its results, computed again, and their gradients. (Two sums below are
# equal by chance.)
#
# The planner counts these. Here they are for one node, summed over its 8 GPUs. With more GPUs in the ring these sums stay
# the same, so each GPU's part shrinks. Only what a GPU gathers costs each the same, 5.1 GB. An "80 GB" H100 shows 85.5 GB to
# programs.

# %%
def one_ring(nodes):
    """Return the plan for one ring of all GPUs; tp=1: no GPUs that share the work of a rank."""
    return plan(Request("llama3-70b", 1_000_000, "h100", nodes=nodes, tp=1))


alone = one_ring(1)
sums = {entry.name: 8 * entry.bytes / 1e9 for entry in alone.best.ledger.entries}
total, gathered = sum(sums.values()), sums["gathered weights"]
rows = {
    "weights and optimizer": ("parameters", "gradients", "optimizer", "gathered weights"),
    "activations": ("activations",),
    "logits": ("logits",),
    "attention's own": ("K/V in flight", "dK and dV in float32", "float32 accumulators"),
}
shown = {name: sum(sums[part] for part in parts) for name, parts in rows.items()}
for name, size in (shown | {"the rest": total - sum(shown.values()), "together": total}).items():
    print(f"{size:7,.0f} GB  {name}")
print(f"{gathered:7,.0f} GB  of this is gathered, {gathered / 8:.1f} GB on each GPU")
print(f"So each of n GPUs holds ({total:,.0f} − {gathered:.0f}) / n + {gathered / 8:.1f} GB.")
usable, reserve = alone.request.usable_bytes / 1e9, alone.request.reserve
print(f"It has {h100.memory_bytes / 1e9:.1f} GB and may use {usable:.1f}; {reserve:.0%} is reserve")

# %% tags=["nbval-ignore-output"]
predict("06.nodes", "How many nodes of 8 such GPUs does one ring of all GPUs need?", unit="nodes")

# %%
fewest = next(nodes for nodes in range(1, 65) if one_ring(nodes).fits)
for nodes in sorted({1, 2, 4, fewest - 1, fewest, 16}):
    best = one_ring(nodes).best
    verdict = "fits" if best.fits else "too much"
    print(f"nodes: {nodes:2}, ring of {best.degrees.ring:3}: "
          f"{best.ledger.total_bytes / 1e9:5.1f} GB on each GPU, {verdict}")
compare("06.nodes", fewest)

# %% [markdown]
# We take 16 nodes, not the fewest, to shorten the training step; the planner chooses the rest:

# %%
chosen = plan(Request("llama3-70b", 1_000_000, "h100", nodes=16))
print(chosen.answer)
for hop in chosen.hidden:
    print(f"{hop.name:18}: {hop.tokens:,} tokens per rank over {hop.link}, "
          f"hidden from {hop.least_tokens:,.0f}")

# %% [markdown]
# One node is far too small, and not because of attention. With 16 nodes the planner takes one ring of all GPUs. Most of its
# hops go over NVLink, but the slowest link decides, so InfiniBand's threshold counts. In every pass a rank has more tokens
# than the threshold, so the ring's hops cost almost no time here. (The backward sends more bytes for each FLOP, but its
# kernels reach a lower rate, so its threshold is hardly higher.)
#
# How long is a training step, and what would shorten it?

# %%
print(f"a training step takes {chosen.best.step_s:.0f} s")
print(chosen.limit.sentence)

# %% [markdown]
# With 193 GB one could keep what full recomputation computes again, about a fifth of the step. Memory sets the least number
# of GPUs, and arithmetic the time of a training step. The same plan in a terminal:

# %%
print(chosen.request.command())

# %% [markdown]
# ## 7 · Optional: what balance is worth
#
# You need this section only for stage 06.table of the exercise. Under a causal mask, contiguous shards give the last rank
# most to compute, a balanced layout gives all ranks the same (lessons 07 and 08). The Striped Attention paper (arXiv
# 2311.09431, table 3) bounds the gain on 4 A100: the time of a forward with contiguous shards, divided by that with a
# balanced layout.

# %% tags=["nbval-ignore-output"]
predict("06.gain", "A model on 16 times as many tokens: what becomes of the gain by balance?",
        ["it grows", "it stays the same", "it shrinks"])

# %% [markdown]
# The slowest rank of a contiguous layout computes P − ½ blocks, a rank of a balanced one P/2: with 4 ranks, attention takes
# 1.75 times as long. Linear layers, at 2 FLOPs per weight and token, take as long under either layout. So if attention
# is a share *a* of the balanced forward, the gain is 1 + 0.75·a. On these A100 attention ran at half the rate of the linear
# layers, so it counts twice. The paper's 1B model:

# %%
printed, gains = {16384: 1.46, 32768: 1.57, 65536: 1.65, 131072: 1.70, 262144: 1.72}, []
for tokens, theirs in printed.items():
    gain = striped_speedup(model("striped-1b"), ranks=4, tokens=tokens, attention_weight=2)
    gains.append(gain)
    print(f"{tokens:7,} tokens: gain {gain:.3f} by ringlab, {theirs:.2f} in the paper, "
          f"so attention takes {(gain - 1) / 0.75:.0%}")
compare("06.gain", "it grows" if gains[-1] > gains[0] else "it shrinks")

# %% [markdown]
# All agree to the last printed digit. Longer contexts are more and more attention, so the gain grows towards 1.75.

# %% [markdown]
# ## Recap
#
# - A step computes 4·c²·D·H FLOPs and sends 2·c·D·K·e bytes. The first grows like c², the second like c.
# - A hop is hidden from c = e·F/(2·B) · K/H tokens per rank, and from twice that under a balanced causal mask. B is one
#   direction of the link, in bytes per second.
# - Double buffered, a uniform ring takes (P − 1) · max(block, hop) + block; with one buffer P · block + (P − 1) · hop.
# - Traffic is an all-gather's. Memory is c tokens and two K/V blocks of others (from 3 ranks on). A KV cache holds K *and* V.
# - One slow link or one slow rank sets the pace of all.
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
