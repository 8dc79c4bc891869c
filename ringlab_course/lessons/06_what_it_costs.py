# %% [markdown]
# # 06 · What it costs
#
# **Afterwards you can** work out how many tokens each rank needs before a hop is hidden, say how long a ring takes, and
# name the link, the rank or the length that slows it down.
#
# **You need first** [lesson 05](05_emulated_ring.ipynb): the ring, its hops, and `post` before `wait`.
#
# **Minutes** 70 to read and run, in two parts of 40 and 30; the exercise takes another 75.
#
# Lesson 05 made a claim: hops are hidden behind the computation, as long as a hop takes no longer than a block's
# attention. Where this is so, a ring's messages cost no time. Part 1 finds the number of tokens that hides a hop. Part 2 takes it to
# real machines, where kernels miss the peak, some links are slow, and so are some ranks.

# %%
import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from ringlab import Partial, VirtualCluster, zigzag
from ringlab.comm.virtual import Costs
from ringlab.cost.hardware import hardware
from ringlab.cost.models import model
from ringlab.cost.simulate import simulate
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import block_s, hop_s, least_tokens_hidden
from ringlab_course import compare, predict
from ringlab.merge import merge
from ringlab_course.figures import overlap_view
from ringlab.viz import gantt
from ringlab.viz.style import show

# %% [markdown]
# # Part 1 · Hiding a hop
#
# ## 1 · A step is a race
#
# In a step, a rank with L tokens attends to a block of L keys. Meanwhile one block leaves and one arrives. The step ends
# when computation and messages are done, so a hop costs no time if it is shorter than the computation.
#
# The computation is two products, q·kᵀ and weights · V. In each of them a head makes L²·D multiply-adds, and PyTorch
# counts a multiply-add as two FLOPs. Together a head needs **4 · L² · D** FLOPs. The message is one block, K and V. We
# count both on lesson 05's ring:

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
def my_ring(ring, q, k, v):
    """Lesson 05's first ring: compute, then shift."""
    state = Partial.identity(q)
    for step in range(ring.world_size):
        state = merge(state, ring.compute(f"attend {step}", attend, q, k, v))
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v)
    return state.out

# %%
def on_ranks(program, L, P=4, H=4, K=1, D=32, costs=None):
    """Return the trace of `program` on P virtual ranks of L tokens each."""
    shards = [torch.ones(1, heads, L, D) for heads in (H, K, K)]
    cluster = VirtualCluster(P, costs=costs)
    return cluster.run(lambda ring: program(ring, *(x.clone() for x in shards))).trace

# %% [markdown]
# Four ranks have 4 query heads on one K/V head, in float32. Double L, and double it again:

# %%
print("  L   FLOPs of a block pair   bytes of a hop   FLOPs per byte")
for L in (32, 64, 128, 256):
    flops = counted(attend, torch.ones(1, 4, L, 32), *[torch.ones(1, 1, L, 32)] * 2)
    sent = on_ranks(my_ring, L).exchanges(0)[0].bytes_sent
    print(f"{L:3}   {flops:21,}   {sent:14,}   {flops / sent:14.0f}")

# %% [markdown]
# **The computation grows like L², the message like L.** So on every machine there is an L from which the computation takes
# longer, and the hop can be hidden. Three more letters say when: a number has **e** bytes, a rank computes **F** FLOP/s,
# and a link carries **β** bytes/s in one direction.
#
# | | one step | in seconds |
# |---|---|---|
# | FLOPs of a block pair | 4 · L² · D · H | divided by F |
# | bytes of a hop | 2 · L · D · K · e | divided by β |
#
# ## 2 · The threshold
#
# From which L is the hop hidden? That depends on F and β, so on the machine. Take an NVIDIA A100 and bfloat16, so e = 2,
# with as many K/V heads as query heads and no mask. NVLink, a fast link, joins the GPUs of one machine (a *node*).
# InfiniBand, a slower network, joins the nodes. The cell prints each link with its generation: NVLink 3, InfiniBand HDR.
# For now F is the *peak*, the rate of the data sheet. Section 4 replaces it by the rate that kernels reach.

# %%
a100 = hardware("a100")
F, nvlink, infiniband = a100.peak("bfloat16"), a100.inside.bytes_per_s, a100.between.bytes_per_s
print(f"A100, peak: {F / 1e12:g} TFLOP/s")
for place, link in (("inside a node", a100.inside), ("between nodes", a100.between)):
    print(f"{place}: {link.name}, {link.bytes_per_s / 1e9:g} GB/s in each direction")

# %% [markdown]
# First one case by hand: 1,000 tokens, 32 heads, D = 128, over NVLink.
#
# - The block takes 4 · 1,000² · 128 · 32 / 312·10¹² s = 52.5 µs.
# - The hop takes 2 · 1,000 · 128 · 32 · 2 / 300·10⁹ s = 54.6 µs. The rank waits 2.1 µs for it.

# %% tags=["nbval-ignore-output"]
predict("06.infiniband", "1,000 tokens nearly hide a hop over NVLink. How many tokens must a rank "
        "hold to hide one over InfiniBand?", unit="tokens")

# %% [markdown]
# In letters, the hop is hidden if 4·L²·D·H/F is at least 2·L·D·K·e/β. D and one L cancel:
#
# $$L \;\ge\; \frac{e\,F}{2\,\beta}\cdot\frac{K}{H}.$$

# %%
def threshold(F, beta, e=2, group=1, pairs=1):
    """Return the tokens per rank that hide a hop.

    `group` query heads share a K/V head; a rank computes the share `pairs` of a block's pairs.
    """
    return e * F / (2 * beta) / group / pairs


print(f"over NVLink: {threshold(F, nvlink):,.0f} tokens")
compare("06.infiniband", threshold(F, infiniband))

# %% [markdown]
# **1,040 tokens** per rank over NVLink, **12,480** over InfiniBand: a link that is 12 times as slow needs 12 times the
# tokens.
#
# The upper panel shows what rank 0 computes and what travels meanwhile, the lower one how both grow with L. The part of a
# hop that outlasts its block is *exposed*: the rank waits. In a live notebook, drag L past the threshold.

# %% tags=["nbval-ignore-output"]
overlap_view.play(L=512)

# %% [markdown]
# Two things shift the threshold. **Grouped heads** lower it: the work stays the same, and the message shrinks to K/H of
# its size. **A causal mask** raises it: the message stays the same, and the work shrinks. In a layout that balances the
# work, such as lesson 08's *zig-zag*, every rank computes half of the query–key pairs of each block. Lesson 08 shows
# why; here we only use the half, as `least_tokens_hidden` does.

# %%
cases = {"8 / 8 heads, no mask": (1, 1), "64 / 8 heads, no mask": (8, 1),
         "64 / 8 heads, causal": (8, 1 / 2)}
for name, (group, pairs) in cases.items():
    yours = threshold(F, nvlink, group=group, pairs=pairs)
    sizes = Attention(H=8 * group, K=8, causal=pairs < 1)
    theirs = least_tokens_hidden(F, nvlink, sizes)
    print(f"{name:22} NVLink: {yours:5,.0f} tokens per rank, by ringlab {theirs:5,.0f}")

# %% [markdown]
# The last line has the heads and the mask of Llama 3 70B.
#
# Before you use your own β, read the data sheet twice. NVLink 3 is sold as 600 GB/s, but these count *both directions
# together*, so β is 300 GB/s. The InfiniBand above is sold as 200 Gb/s, and these are *bits*, so β is 25 GB/s.

# %% [markdown]
# ## 3 · Hide it
#
# The threshold says whether a hop *can* be hidden. The program must also hide it: post, compute, wait.

# %%
def overlapped_ring(ring, q, k, v):
    """Lesson 05's second ring: post, then compute."""
    state = Partial.identity(q)
    for step in range(ring.world_size):
        work = ring.post(k, v) if step < ring.world_size - 1 else None
        state = merge(state, ring.compute(f"attend {step}", attend, q, k, v))
        if work:
            k, v = work.wait()
    return state.out

# %% [markdown]
# We run both rings on a clock, on a machine slow enough for mental arithmetic. Two methods set the clock: `compute` returns
# the seconds of a computation, `message` the seconds that one tensor travels. K and V travel together, so each gets half
# of the bandwidth, β/2. The clock keeps two rules:
#
# - A message begins when both its sender and its receiver have posted the exchange.
# - A rank's exchange is over when its own block has been delivered and the next one has arrived.

# %%
class Machine(Costs):
    """Virtual seconds by FLOPs and bytes: F FLOP/s on a rank, β bytes/s on a link."""

    def __init__(self, F, beta):
        self.F, self.beta = F, beta

    def compute(self, rank, label, args):
        return counted(attend, *args) / self.F

    def message(self, source, to, nbytes):
        return nbytes / (self.beta / 2)


slow_machine = Machine(F=2304, beta=192)
print("threshold in float32:", threshold(2304, 192, e=4), "tokens")
print("12 tokens, D = 8: block", 4 * 12**2 * 8 / 2304, "s, hop", 2 * 12 * 8 * 4 / 192, "s")

# %% [markdown]
# We give each of 4 ranks 12 tokens, half of the threshold. The time from the start until the last rank ends is the
# *makespan*.

# %% tags=["nbval-ignore-output"]
predict("06.makespan", "Block 2 s, hop 4 s, 4 ranks; post, then compute. When does the last "
        "rank end?", unit="s")

# %%
def both(L):
    """Return the traces of both rings with L tokens per rank, and their names."""
    programs = {"Compute, then shift": my_ring, "Post, then compute": overlapped_ring}
    traces = [on_ranks(each, L, H=1, K=1, D=8, costs=slow_machine) for each in programs.values()]
    return traces, list(programs)


def makespan(trace):
    """Return the seconds until the last rank has ended."""
    return max(event.end for event in trace.computes())


few = both(12)
for trace, name in zip(*few, strict=True):
    print(f"{name:19} ends at {makespan(trace):.0f} s, rank 0 waits {trace.exposed(0):2.0f} s")
compare("06.makespan", makespan(few[0][1]))

# %% [markdown]
# If a rank computes, then shifts, the times add up: P blocks and P − 1 hops, 4·2 + 3·4 = 20 s. If it posts first, each of
# the P − 1 steps with a hop takes the *longer* of the two; then the last block follows: **(P − 1) · max(block, hop) +
# block** = 3·4 + 2 = 14 s.

# %%
picture = gantt.compare(*few, ranks=(0, 1))  # ranks 2 and 3 look the same
picture.axes[-1].set_xticks(range(0, 21, 2))
show(picture, gantt.describe_all(*few))

# %% [markdown]
# A row belongs to one rank, the narrow lane below it to the rank's messages. The title gives the share of all ranks' time
# spent computing. Posting first helps here, but 2 s of each hop stay exposed.
#
# Now 36 tokens, above the threshold: a block takes 18 s, a hop 12 s.

# %%
many = both(36)
for trace, name in zip(*many, strict=True):
    print(f"{name:19} ends at {makespan(trace):3.0f} s, rank 0 waits {trace.exposed(0):2.0f} s")
print("36 tokens: block", 4 * 36**2 * 8 / 2304, "s, hop", 2 * 36 * 8 * 4 / 192, "s")

# %% [markdown]
# If the ranks post first, not a second is lost: 72 s are four blocks of 18 s. Each block arrives after 12 s and lies
# unused for the other 6 s, because the rank is still computing.

# %% [markdown]
# ---
# **End of part 1. This is a good place to stop.** You know now how many tokens hide a hop, and how a program hides it. That
# is enough for the stages 06.threshold and 06.overlap of [the exercise](../exercises/06_what_it_costs.ipynb). If you return
# in a fresh kernel, run all cells up to here first.
#
# ---

# %% [markdown]
# # Part 2 · Real rings
#
# So far all ranks and all links were alike, and a hop's time was its bytes divided by β. On a real machine none of this holds.
#
# ## 4 · The threshold you really get
#
# Kernels do not reach the peak. On an A100 the best published rate of FlashAttention-2, a widely used attention kernel, is
# this share of it:

# %%
share = a100.reached.attention_forward
reached = share * F
print(f"attention reaches {share:.0%} of the peak: {reached / 1e12:.0f} TFLOP/s")

# %%
layer = model("llama3-70b").attention()
print(f"Llama 3 70B: {layer.H} query heads, {layer.K} K/V heads, causal: {layer.causal}")
for link in (a100.inside, a100.between):
    at_peak = threshold(F, link.bytes_per_s, group=8, pairs=1 / 2)
    by_bytes = threshold(reached, link.bytes_per_s, group=8, pairs=1 / 2)
    print(f"{link.name:14}: {at_peak:5,.0f} tokens at the peak, "
          f"{by_bytes:5,.0f} at the reached rate")

# %% [markdown]
# A slower block leaves the hop more time. So the peak overstates the threshold.
#
# A part of a hop's time does not depend on its bytes: the *latency*. So a hop over NVLink takes longer than we said:

# %%
link = a100.inside
for L in (190, 333):
    bytes_us, t_us = hop_s(layer, L, link.bytes_per_s) * 1e6, link.latency_s * 1e6
    print(f"{L} tokens: block {block_s(layer, L, reached) * 1e6:.1f} µs, "
          f"hop {t_us:.1f} + {bytes_us:.1f} = {t_us + bytes_us:.1f} µs")

# %% [markdown]
# 190 tokens no longer suffice; 333 do. Where does 333 come from? A block takes a·L² seconds, a hop t + b·L with latency t.
# Set them equal and solve for L. `least_tokens_hidden` does that:

# %%
for link in (a100.inside, a100.between):
    least = least_tokens_hidden(reached, link.bytes_per_s, layer, latency_s=link.latency_s)
    print(f"{link.name:14}: latency {link.latency_s * 1e6:4g} µs, hidden from "
          f"{math.ceil(least):5,} tokens")

# %% [markdown]
# Latency matters most over the fast link, where the bytes take little time.
#
# ## 5 · Two slow links
#
# Take two nodes of 8 GPUs, with 1,024 tokens per rank. The ring has 16 links, and only two of them are InfiniBand: 7 → 8
# and 15 → 0.

# %%
def microseconds(L):
    """Return the µs of a block, of a hop over NVLink and of a hop over InfiniBand."""
    times = [block_s(layer, L, reached)]
    for link in (a100.inside, a100.between):
        times.append(hop_s(layer, L, link.bytes_per_s, link.latency_s))
    return [1e6 * seconds for seconds in times]


block, fast, slow = microseconds(1024)
print(f"block {block:.0f} µs, hop over NVLink {fast:.0f} µs, over InfiniBand {slow:.0f} µs")

# %% [markdown]
# `simulate` runs the package's *real* ring program on tensors that have a shape and no data, and charges it the
# hardware's time. `.free` is the same run with free links; T is its makespan.

# %%
def ring_of(P, L, **options):
    """Return the simulated ring of P ranks with L tokens each."""
    return simulate(layer, zigzag(L * P, P), a100, **options)


two_nodes = ring_of(16, 1024)
print(f"T = {two_nodes.free.makespan_s * 1e6:,.0f} µs, about 16 blocks")

# %% tags=["nbval-ignore-output"]
predict("06.border", "Two nodes, 1,024 tokens per rank. On links that take no time the ring "
        "takes T. With InfiniBand on two of its links and NVLink on 14 it takes …",
        unit="times T")

# %%
def stretch(run):
    """Return how many times longer the run takes than on links that take no time."""
    return run.makespan_s / run.free.makespan_s


for L in (256, 512, 1024, 2048, 4096):
    print(f"L = {L:5,}: {stretch(ring_of(8, L)):5.2f} times its T in one node, "
          f"{stretch(ring_of(16, L)):5.2f} times over two")
compare("06.border", stretch(two_nodes))

# %% [markdown]
# At 1,024 tokens two slow links slow down all 16 ranks. Section 3's formula, with InfiniBand's hop, gives the makespan:

# %%
print(f"formula 15 · {slow:.1f} + {block:.1f} = {15 * slow + block:,.0f} µs, "
      f"simulated {two_nodes.makespan_s * 1e6:,.0f} µs")

# %% [markdown]
# Above InfiniBand's threshold, at 4,096 tokens, the same links cost nothing.
#
# How do two slow links hold up all 16 ranks? Here are ranks 4 to 8 in the first 800 µs. Only the messages from
# rank 7 to rank 8 cross the border of the nodes. Follow the arrows from one rank's first wait to the next rank's:

# %%
trace = two_nodes.trace()
overlap_view.spreading_wait(trace)

# %% [markdown]
# The receiver posts late: rank 7 still waits for InfiniBand, and a message begins only when both its ends have posted.
# So rank 6 waits too, although it sends only over NVLink. A hop of 17 µs stays hidden in a step of 75 µs if it begins
# at most 58 µs late:

# %%
begins, later = (trace.computes(rank)[1].start * 1e6 for rank in (6, 7))
waits = trace.exchanges(6)[1].exposed * 1e6
print(f"in step 1 rank 7 begins {later - begins:.0f} µs after rank 6")
print(f"so rank 6 waits {later - begins:.0f} − ({block:.0f} − {fast:.0f}) = {waits:.0f} µs")

# %% [markdown]
# Now rank 6 is late itself, by more in each step. After step 3 rank 5 waits for it, and then rank 4 for rank 5. Rank 9
# waits for the blocks of rank 8 in the same way. In the end all ranks keep InfiniBand's pace.
#
# ## 6 · One slow rank
#
# Now one *rank* of these 16 is slow: rank 5 takes twice as long to compute.

# %% tags=["nbval-ignore-output"]
predict("06.slow", "1,024 tokens per rank, rank 5 computes at half speed. How much longer than "
        "in section 5 does the whole ring take?", unit="% longer")

# %%
slower = {}
for L in (1024, 2048, 4096):
    even, late = ring_of(16, L), ring_of(16, L, slow={5: 2.0})
    slower[L] = round(100 * (late.makespan_s / even.makespan_s - 1))
    block, _, hop = microseconds(L)
    print(f"L = {L:5,}: rank 5's block {2 * block:5,.0f} µs, InfiniBand's hop {hop:3,.0f} µs: "
          f"{slower[L]}% longer")
compare("06.slow", slower[1024])

# %% [markdown]
# At 1,024 tokens slow rank 5 costs **nothing**. Its block takes 151 µs, still less than InfiniBand's hop: it computes
# during the time for which it would have waited. At 4,096 tokens the hops were hidden, so there was no such time, and the
# ring takes twice as long, like rank 5.
#
# In a long ring **every step ends up as long as the slowest block or the slowest hop, whichever is longer.** Speed up the
# longer one first. Speeding up the other gains next to nothing.
#
# ## 7 · More ranks
#
# So far each new rank brought its own tokens. Now fix the *sequence* at 131,072 tokens, and add ranks to finish sooner. Then
# L = S/P shrinks, and with it the computation that hides a hop.

# %% tags=["nbval-ignore-output"]
predict("06.more", "131,072 tokens on 128 ranks in place of 64: the ring is …",
        ["about twice as fast", "a little faster", "slower"])

# %%
ended = {}
for P in (8, 16, 32, 64, 128):
    run = ring_of(P, 131072 // P)
    ended[P] = run.makespan_s
    print(f"{P:3} ranks, {131072 // P:6,} tokens each: {1e3 * ended[P]:6.2f} ms, "
          f"{stretch(run):.2f} times its T")
gain = ended[64] / ended[128]
verdict = "slower" if gain < 1 else "a little faster" if gain < 1.5 else "about twice as fast"
compare("06.more", verdict)

# %% [markdown]
# Down to InfiniBand's threshold, about 2,400 tokens, twice the ranks halve the time. Below it the ring takes as long as
# P − 1 hops and one block. Twice the ranks send as many bytes each, but pay twice as many latencies. **From there on,
# add ranks when the context grows, not to speed up a context you already have.**
#
# `ringlab plan --model llama3-70b --tokens 1M --hardware a100 --nodes 16`, in a terminal, asks the same of a whole model,
# with the memory of its training. Ask it about your own cluster.

# %% [markdown]
# ## Recap
#
# - A step computes 4·L²·D·H FLOPs and sends 2·L·D·K·e bytes. The first grows like L², the second like L.
# - By bytes alone a hop is hidden from e·F/(2·β) · K/H tokens per rank. Under a causal mask and a balanced layout it is twice that.
# - For F, take the rate that kernels really reach, not the peak of the data sheet. β is one direction of the link, in bytes
#   per second.
# - Latency raises the threshold, most over a fast link.
# - If all ranks and links are alike, a ring that posts first takes (P − 1) · max(block, hop) + block. One that computes,
#   then shifts, takes P · block + (P − 1) · hop.
# - If they differ, a long ring ends at the pace of the slowest block or of the slowest hop, whichever takes longer.
# - On a fixed sequence more ranks stop helping once L falls below the threshold.
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
# <details><summary>3. A hop takes 3 times as long as a block, P = 5; post, then compute. How many blocks long is
# the run?</summary>4 · 3 + 1 = 13.</details>
#
# <details><summary>4. A colleague's link does "400 gigabit". Which β do you use?</summary>50 GB/s, if 400 gigabit per second
# is the rate of one direction.</details>
#
# Now build it: [exercise 06](../exercises/06_what_it_costs.ipynb), the threshold, a makespan, a ring that hides its hops in
# less memory, a table.
