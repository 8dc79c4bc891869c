# %% [markdown]
# # 06 · What it costs
#
# **Afterwards you can** derive from how many tokens per rank a hop hides behind the computation, count what a rank sends
# and holds, and size a cluster for a model and a context.
#
# **You need first** [lesson 05](05_emulated_ring.ipynb): the ring, its hops, and `post` before `wait`.
#
# **Minutes** 75 to read and run; the exercise takes another 60.
#
# Lesson 05 ended with a claim: hops vanish behind the computation, as long as a hop takes no longer than a block's
# attention. Whether that holds on *your* machines decides if ring attention is practical. "All that communication makes it
# slow", one hears. Let us count.

# %%
import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from ringlab import Partial, VirtualCluster, contiguous, zigzag
from ringlab.comm.virtual import Costs
from ringlab.cost.flops import attention_flops
from ringlab.cost.hardware import hardware
from ringlab.cost.memory import attention_bytes, kv_cache_bytes
from ringlab.cost.models import model
from ringlab.cost.traffic import block_s, hop_s, least_tokens_hidden
from ringlab.cost.papers import ring_minimum, striped_speedup
from ringlab.cost.planner import Request, plan
from ringlab.cost.simulate import simulate
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import allgather_traffic, ring_traffic
from ringlab_course import compare, predict
from ringlab.merge import merge
from ringlab_course.figures import decision_map, overlap_view
from ringlab.viz import gantt
from ringlab.viz.style import show

# %% [markdown]
# ## 1 · One step: FLOPs and bytes
#
# In a step, a rank with c tokens attends to a block of c keys. Meanwhile one block leaves and one arrives. So a step is a
# race between the FLOPs of one block pair and the bytes of one block. First the FLOPs, on a size for paper: 64 tokens per
# rank, one head of head dim D = 32.

# %% tags=["nbval-ignore-output"]
predict("06.flops", "64 queries attend to 64 keys, D = 32, one head, no mask. How many FLOPs?", unit="FLOPs")

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
# FLOPs. Both twos get lost easily; write-ups that count 2·c²·D are off by a factor of two in all that follows.
#
# Now the bytes. We meter a real ring: the trace of lesson 05's `my_ring`, four ranks, c tokens each, 4 query heads on one
# K/V head.

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
    return VirtualCluster(P, costs=costs).run(lambda ring: program(ring, *(x.clone() for x in shards)))

# %%
print("  c   FLOPs of a block pair   bytes of a hop   FLOPs per byte")
for c in (32, 64, 128, 256):
    flops = counted(attend, torch.ones(1, 4, c, 32), *[torch.ones(1, 1, c, 32)] * 2)
    sent = on_ranks(my_ring, c).trace.exchanges(0)[0].bytes_sent
    print(f"{c:3}   {flops:21,}   {sent:14,}   {flops / sent:14.0f}")
print(f"by hand, c = 256: 4·c²·D·H = {4 * 256**2 * 32 * 4:,}, and 2·c·D·K·e = {2 * 256 * 32 * 1 * 4:,}")

# %% [markdown]
# Twice the tokens: four times the FLOPs, but only twice the bytes. **The computation grows like c², the message like c.**
# So whatever the machine, from some c on the computation takes longer, and the hop can hide. In letters, with H query
# heads, K key/value heads and e bytes per element:
#
# | | one step | in seconds |
# |---|---|---|
# | FLOPs of a block pair | 4 · c² · D · H | divided by F, FLOP/s |
# | bytes of a hop | 2 · c · D · K · e | divided by B, bytes/s in one direction |
#
# ## 2 · The threshold
#
# Take an NVIDIA A100 and bfloat16, so e = 2, as many K/V heads as query heads, and no mask. Its GPUs are joined by NVLink, a
# fast link between the GPUs of one machine (a *node*), and nodes by InfiniBand, a slower network between machines.

# %%
a100 = hardware("a100")
F, nvlink, infiniband = a100.peak("bfloat16"), a100.inside.bytes_per_s, a100.between.bytes_per_s
print(f"{a100.title}: {F / 1e12:g} TFLOP/s")
for place, link in (("inside a node", a100.inside), ("between nodes", a100.between)):
    print(f"{place}: {link.name}, {link.bytes_per_s / 1e9:g} GB/s in each direction")

# %% tags=["nbval-ignore-output"]
predict("06.nvlink", "How many tokens must a rank hold for a hop over NVLink to hide?", unit="tokens")

# %% tags=["nbval-ignore-output"]
predict("06.infiniband", "And for a hop over InfiniBand?", unit="tokens")

# %% [markdown]
# A block takes 4·c²·D·H/F seconds, a hop 2·c·D·K·e/B. The hop hides when the first is not smaller; D falls out, one c
# falls out, and what is left is
#
# $$c \;\ge\; \frac{e\,F}{2\,B}\cdot\frac{K}{H}.$$

# %%
def threshold(F, B, e=2, group=1, causal=False):
    """Return the tokens per rank from which a hop hides; `group` query heads share a K/V head."""
    return e * F / (2 * B) / group * (2 if causal else 1)


mha = Attention(H=32, K=32, D=128, causal=False)
for c in (256, 1024, 4096, 16384):
    block, fast, slow = block_s(mha, c, F) * 1e6, hop_s(mha, c, nvlink) * 1e6, hop_s(mha, c, infiniband) * 1e6
    print(f"c = {c:6,}: block {block:6,.0f} µs, NVLink {fast:3,.0f} µs, InfiniBand {slow:6,.0f} µs")
print("as ringlab.cost has it:", [round(least_tokens_hidden(F, B, mha)) for B in (nvlink, infiniband)], "tokens per rank")
print("context of 8 such ranks:", [round(8 * threshold(F, B)) for B in (nvlink, infiniband)], "tokens")
compare("06.nvlink", threshold(F, nvlink))
compare("06.infiniband", threshold(F, infiniband))

# %% [markdown]
# **1,040 tokens** per rank over NVLink, **12,480** over InfiniBand. With 8 ranks that is a context of 8,320 and of 99,840
# tokens: lengths at which one begins to *want* a ring. The longer the sequence, the better its communication hides. It is
# short sequences on many ranks for which a ring is impractical, and they do not need one.
#
# Now with your hands. Above you see what rank 0 computes and what travels meanwhile, below how both grow with c. Hatched
# is what cannot hide. Drag c past the threshold; then choose another machine, or your own F and B.

# %% tags=["nbval-ignore-output"]
overlap_view.play(c=512)

# %% [markdown]
# Two things shift the threshold. **Grouped heads** lower it: the work stays, and the message shrinks by H/K. **A causal
# mask**, in a layout that balances it (lessons 07 and 08), doubles it: half the work, the same message.

# %%
cases = {"8 / 8 heads, no mask": (1, False), "64 / 8 heads, no mask": (8, False), "64 / 8 heads, causal": (8, True)}
for name, (group, causal) in cases.items():
    yours = [threshold(F, B, 2, group, causal) for B in (nvlink, infiniband)]
    theirs = [least_tokens_hidden(F, B, Attention(H=8 * group, K=8, causal=causal)) for B in (nvlink, infiniband)]
    same = all(map(math.isclose, yours, theirs))
    print(f"{name:22}  NVLink {yours[0]:5,.0f}  InfiniBand {yours[1]:6,.0f}   as ringlab says: {same}")

# %% [markdown]
# Llama 3's 64 / 8 heads need 260 causal tokens per rank to hide NVLink. Eight-fold sharing matters more than a mask.
#
# Read data sheets with care. A circulating figure is 1,024 tokens "at 600 GB/s". Two mistakes meet in it: NVLink 3's
# 600 GB/s count *both directions together*, and the FLOPs were counted as 2·c²·D. The first halves the threshold, the
# second doubles it:

# %%
print("right, 300 GB/s one way, 4·c²·D:       ", threshold(F, 300e9))
print("600 GB/s taken for one direction:      ", threshold(F, 600e9))
print("the same, and 2·c²·D FLOPs:            ", 2 * threshold(F, 600e9))
print("InfiniBand's 200 Gb/s taken for GB/s:  ", threshold(F, 200e9), "instead of", threshold(F, 200e9 / 8))
print(f"a hop of 16,384 tokens at 600 GB/s:       {hop_s(mha, 16384, 600e9) * 1e3:.3f} ms")

# %% [markdown]
# The errors cancel, and the figure looks right for the wrong reason: with one of them noticed, it is 520. Another write-up
# takes the last row of our table, c = 16,384, at 600 GB/s, and prints 8.59 ms for the block and 0.22 ms for the hop. By our
# count they take 14.1 ms and, even at that rate, 0.447 ms. A number without its derivation is worth checking.
#
# ## 3 · With a clock
#
# A threshold says whether a hop *can* hide. The program must also let it: post, compute, wait.

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


class Machine(Costs):
    """Virtual seconds by FLOPs and bytes: F FLOP/s on a rank, B bytes/s on a link."""

    def __init__(self, F, B):
        self.F, self.B = F, B

    def compute(self, rank, label, args):
        return counted(attend, *args) / self.F

    def message(self, source, to, nbytes):
        return 2 * nbytes / self.B  # called for K and for V, which travel side by side: each has half of B

# %% [markdown]
# Our machine is slow enough for mental arithmetic: 2,304 FLOP/s and 192 bytes/s, so its threshold in float32 is 24 tokens.
# We give each of 4 ranks 12 tokens, one head, D = 8. Then a block takes 2 s and a hop 4 s.

# %% tags=["nbval-ignore-output"]
predict("06.makespan", "Block 2 s, hop 4 s, 4 ranks, double buffered: when has the last rank ended?", unit="s")

# %%
slow_machine = Machine(F=2304, B=192)
print("threshold:", threshold(2304, 192, e=4), "tokens")
runs = {}
for c in (12, 36):
    for name, program in (("one buffer", my_ring), ("double buffered", overlapped_ring)):
        runs[f"{c} tokens, {name}"] = on_ranks(program, c, H=1, K=1, D=8, costs=slow_machine).trace
for name, trace in runs.items():
    print(f"{name:26} ends at {max(event.end for event in trace.computes()):3.0f} s, rank 0 waits {trace.exposed(0):2.0f} s")
compare("06.makespan", max(event.end for event in runs["12 tokens, double buffered"].computes()))

# %% [markdown]
# With one buffer times add up: P blocks and P − 1 hops, 4·2 + 3·4 = 20 s. Double buffered, each of the P − 1 steps with a
# hop takes the *longer* of the two, and the last block comes on top: **(P − 1) · max(block, hop) + block** = 3·4 + 2 =
# 14 s. Not P · max, which would be 16 s, nor the longer of all hops and all blocks, 12 s.

# %%
def pair(c):
    """Return the traces and the names of both rings with c tokens per rank."""
    names = [name for name in runs if name.startswith(str(c))]
    return [runs[name] for name in names], names


show(gantt.compare(*pair(12)), gantt.describe_all(*pair(12)))

# %% [markdown]
# Under each row stands what is under way. At 12 tokens, below the threshold, double buffering helps, but 2 s of each hop
# stay exposed. At 36, above the threshold:

# %%
show(gantt.compare(*pair(36)), gantt.describe_all(*pair(36)))

# %% [markdown]
# Not a second is lost: 72 s are four blocks of 18 s. Note what the price was: one more K/V block in memory, and two lines of
# code in another order. In the exercise you predict such makespans for ranks that are *not* alike.
#
# ## 4 · What is sent, what is held
#
# Over all steps a rank sends P − 1 blocks. An all-gather, where each rank hands its own block to the P − 1 others, sends as
# much. The trace and the formulas agree:

# %%
sizes, layout = Attention(H=4, K=1, D=32, dtype="float32", causal=False), contiguous(8 * 64, 8)
print("trace      ", on_ranks(overlapped_ring, c=64, P=8).trace.bytes_sent(0))
print("ring       ", ring_traffic(sizes, layout).total_bytes, "in", ring_traffic(sizes, layout).steps, "steps")
print("all-gather ", allgather_traffic(sizes, layout).total_bytes, "in", allgather_traffic(sizes, layout).steps, "step")
print("FLOPs by ringlab.cost:", attention_flops(sizes, 64 * 64), "counted:", counted(attend, *[torch.ones(1, 4, 64, 32)] * 3))

# %% [markdown]
# Ring attention saves neither bytes nor FLOPs. It makes the bytes small enough, one block at a time, to hide, and keeps
# **memory** flat: c tokens of q, k, v and out, and one K/V block in flight, whatever P. In heads per token, q and out are 2·H; the rank's own K and V are 2·K, and
# the K and V that arrive another 2·K. One layer of Llama 3 70B with 16,384 tokens per rank:

# %%
llama = model("llama3-70b")
layer = llama.attention()
for P in (8, 64, 512):
    ring, gathered = (attention_bytes(layer, 16384, P, kind) / 1e9 for kind in ("ring", "allgather"))
    print(f"{P:3} ranks, {16384 * P:9,} tokens: ring {ring:.2f} GB, all-gather {gathered:5.2f} GB")
by_hand = (2 * llama.H + 4 * llama.K) * llama.D * 16384 * 2
print("by hand, (2·H + 4·K) · D · c · e:", by_hand / 1e9, "GB")

# %% [markdown]
# To *generate* text, one keeps K and V of all tokens in all layers: the KV cache. Llama 3 70B has 80 layers and 8 K/V heads
# of 128.

# %% tags=["nbval-ignore-output"]
predict("06.cache", "How large is its KV cache at 1,000,000 tokens, in bfloat16?", unit="GB")

# %%
tokens = 1_000_000
print(f"by hand: 2 · {llama.layers} layers · {llama.K} heads · {llama.D} · 2 bytes =",
      2 * llama.layers * llama.K * llama.D * 2, "bytes per token")
print("K alone:", llama.layers * llama.K * llama.D * 2 * tokens / 1e9, "GB")
compare("06.cache", kv_cache_bytes(llama, tokens) / 1e9)

# %% [markdown]
# A published figure of 163 GB is K alone: it forgets V. The cache of one request, 328 GB, fits no GPU, and that is
# a reason to shard the sequence in inference too.
#
# ## 5 · Published tables, recomputed
#
# A count that you trust lets you check others'. The Ring Attention paper (arXiv 2310.01889, table 2) gives the smallest
# block, F/B, in thousands of tokens. That is our threshold with e = 2 and K = H. To hold the sequence a host then needs 6
# such blocks at once by the paper's count: one each of q, k and v, the two that arrive, and out.

# %%
PRINTED = {"A100 NVLink": (312, 300, 1.0, 6.2), "A100 InfiniBand": (312, 12.5, 24.5, 149.5), "TPU v3": (123, 112, 1.1, 6.6),
           "TPU v4": (275, 268, 1.0, 6.2), "TPU v5e": (196, 186, 1.1, 6.3)}
for name, (tflops, gbytes, block, sequence) in PRINTED.items():
    c, whole = ring_minimum(tflops * 1e12, gbytes * 1e9)
    print(f"{name:16} {tflops} TFLOP/s, {gbytes:5} GB/s: block {c / 1e3:5.2f} (printed {block}), "
          f"sequence {whole / 1e3:6.2f} (printed {sequence})")

# %% [markdown]
# It agrees within 2%; the paper's InfiniBand is half as fast as ours. And the Striped Attention paper (arXiv 2311.09431, table 3) bounds what a
# balanced layout can gain on 4 A100, for its 1B model:

# %%
printed = {16384: 1.46, 32768: 1.57, 65536: 1.65, 131072: 1.70, 262144: 1.72}
one_b = model("striped-1b")
for tokens, theirs in printed.items():
    ours = striped_speedup(one_b, ranks=4, tokens=tokens, attention_weight=2)
    print(f"{tokens:7,} tokens: {ours:.3f} (printed {theirs:.2f})")
print("attention alone, (P - 1/2) / (P / 2):", (4 - 0.5) / (4 / 2))

# %% [markdown]
# All to the last printed digit. You will rebuild this table in the exercise. Why does it climb towards 1.75? The slowest
# rank of a contiguous layout computes P − ½ blocks, a balanced one P/2; the linear layers, the same for both, dilute
# the gain where contexts are short.
#
# ## 6 · Many ranks: the simulator
#
# A real ring crosses nodes, and some ranks are slow. `simulate` runs the *real* ring program on tensors that have a shape
# and no data. Blocks are charged by their FLOPs, at the rate that published kernels reach, and messages by the link they
# take. H100s, 8 in a node, Llama 3 70B's heads, causal, the balanced zig-zag layout. The thresholds differ from section 2's:
# those took an A100's peak, these an H100's links and the rate that its attention kernels reach.

# %%
h100 = hardware("h100")
reached = h100.peak("bfloat16") * h100.reached.attention_forward
for link in (h100.inside, h100.between):
    print(f"{link.name}: hidden from {least_tokens_hidden(reached, link.bytes_per_s, layer):,.0f} tokens per rank, "
          f"at {reached / 1e12:.0f} TFLOP/s and {link.bytes_per_s / 1e9:g} GB/s")
for c in (256, 512, 1024, 2048, 4096, 8192):
    one, two = (simulate(layer, zigzag(c * P, P), h100) for P in (8, 16))
    shares = [f"{run.exposed_s / run.makespan_s:4.0%}" for run in (one, two)]
    print(f"c = {c:5,}: exposed {shares[0]} of the time in one node, {shares[1]} over two")

# %% [markdown]
# A chain is as fast as its slowest link: two of the 16 hops go over InfiniBand, 7 → 8 and 15 → 0, and every rank
# soon waits for them in every step. Look at the ranks beside the first of these two boundaries, at 2,048 tokens per rank:

# %%
crossing = simulate(layer, zigzag(2048 * 16, 16), h100).trace()
show(gantt.figure(crossing, "16 ranks, 2 nodes", ranks=range(5, 11)), gantt.describe(crossing, "16 ranks, 2 nodes"))

# %% [markdown]
# Rank 7 sends over InfiniBand, rank 8 receives, and both wait. Their neighbours start on time; then the delay reaches them,
# a rank further every other step, and in the end everybody keeps InfiniBand's pace. And a slow *rank*? Say rank 5 of 64 takes 1.5 times as long to compute, for
# instance because it is hot.

# %% tags=["nbval-ignore-output"]
predict("06.slow", "One of 64 ranks takes 1.5 times as long to compute. The whole ring takes … times as long?", unit="times")

# %%
even, hot = (simulate(layer, zigzag(8192 * 64, 64), h100, slow=slow) for slow in ({}, {5: 1.5}))
print(f"ranks compute {even.busy_fraction:.0%} of the time; with one hot rank {hot.busy_fraction:.0%}")
compare("06.slow", hot.makespan_s / even.makespan_s)

# %% [markdown]
# 63 fast ranks wait for one: everybody needs the block that it holds up. A ring has no slack, and "the average rank" means
# nothing in it. That is why balance gets two lessons of its own.
#
# One more experiment, the one most often forgotten. Keep the *sequence*, 131,072 tokens, and add ranks. Then c = S/P
# shrinks, and with it what hides a hop:

# %%
eight = simulate(layer, zigzag(131072, 8), h100).makespan_s
for P in (8, 16, 32, 64, 128):
    run = simulate(layer, zigzag(131072, P), h100)
    print(f"{P:3} ranks, {131072 // P:6,} tokens each: {run.makespan_s * 1e3:5.2f} ms, "
          f"an even share would be {eight * 8 / P * 1e3:5.2f} ms, exposed {run.exposed_s / run.makespan_s:.0%}")

# %% [markdown]
# Down to the threshold the time halves with twice the ranks. Beyond it ranks gain nothing: every rank still has to see the
# whole sequence, so the bytes that it receives do not shrink, and more hops pay more latency. 128 ranks are slower than 64. **Scale ranks with the context, not against it.**
#
# ## 7 · Size a cluster
#
# Last, the question that all of this is for. You want to *train* Llama 3 70B on sequences of 1,000,000 tokens. Besides
# attention, memory has to hold what training needs:
#
# | name | what it is |
# |---|---|
# | parameters, gradients, optimizer | the weights, their gradients, and what Adam keeps of both; each GPU has its share, as in FSDP |
# | gathered weights | the weights of the layer at work, whole, collected from all shares just before they are used |
# | activations | what a forward keeps for the backward; under *full recomputation* only each layer's input, and the backward computes the rest of a layer again |
# | logits | a score of every word of the vocabulary, for every token |
#
# The planner counts these, and some smaller ones, each by a formula in `ringlab.cost.memory`. Here they are for one node, all
# its 8 GPUs together. Most of it does not depend on the number of GPUs; that is what has to be shared.

# %%
def asked(nodes):
    return plan(Request("llama3-70b", 1_000_000, "h100", nodes=nodes))


alone = asked(1)
for entry in alone.best.ledger.entries:
    print(f"{8 * entry.bytes / 1e9:7,.0f} GB  {entry.name}")
print(f"{8 * alone.best.ledger.total_bytes / 1e9:7,.0f} GB  together")
print(f"{alone.request.usable_bytes / 1e9:7.1f} GB  may be used of each GPU; {alone.request.reserve:.0%} stay in reserve")

# %% tags=["nbval-ignore-output"]
predict("06.nodes", "How many nodes of 8 such GPUs does it take at least?", unit="nodes")

# %%
fewest = next(nodes for nodes in range(1, 65) if asked(nodes).fits)
for nodes in sorted({1, 2, 4, fewest, 16}):
    best = asked(nodes).best
    print(f"{nodes:2} node{'s' * (nodes > 1):1}: {best.ledger.total_bytes / 1e9:5.1f} GB on each GPU, {'fits' if best.fits else 'too much'}")
compare("06.nodes", fewest)

# %%
chosen = asked(16)
print(chosen.answer)
for entry in sorted(chosen.best.ledger.entries, key=lambda entry: -entry.bytes)[:4]:
    print(f"{entry.bytes / 1e9:5.1f} GB  {entry.name}")
for hop in chosen.hidden:
    print(f"{hop.name:18}: {hop.tokens:,} tokens per rank over {hop.link}, hidden from {hop.least_tokens:,.0f}")
print(f"a step takes {chosen.best.step_s:.0f} s;", chosen.limit.sentence)

# %% [markdown]
# One node is far too small, and not for the sake of attention: weights, gradients, optimizer state and what a forward keeps must be somewhere. With
# 16 nodes the planner takes one ring of all GPUs, for the most part over NVLink, but as fast as InfiniBand. Tokens per
# rank are above the threshold in every pass, so it hides. (The planner's thresholds are a little above section 6's, since it counts
# latency too.) Communication makes this *possible*; it is memory and arithmetic
# that you pay for. In a terminal the same plan, with alternatives and what to change, is

# %%
print(chosen.request.command())

# %% [markdown]
# And if your ranks are others? The map below shows all of them at once. Beside the ring and the all-gather it knows one
# more way, **Ulysses** (arXiv 2309.14509): one exchange, in which every rank sends something to every other, gives each
# rank *all* tokens of a few heads; it attends to them alone, and a second such exchange takes the output home. While
# there are heads to deal out, a rank's bytes hardly grow with the number of ranks, where a ring's do; but none of them
# hide behind attention, and heads are few.
#
# Go across to your tokens per rank and up to your link's bandwidth: the colour says which of the three leaves the least
# communication exposed, and right of the heavy line, the threshold of section 2, a ring's hops are hidden. Each diamond
# is the threshold of a known machine on one of its links. Like section 2 the map counts with the **peak** FLOP/s, which
# no kernel reaches, and it begins with 32 query heads on 8 K/V heads. So it asks for more tokens than section 6 and the
# planner did, for the same H100s on InfiniBand.

# %% tags=["nbval-ignore-output"]
decision_map.play("h100", P=8)

# %% [markdown]
# ## Recap
#
# - A step computes 4·c²·D·H FLOPs and sends 2·c·D·K·e bytes. The first grows like c², the second like c.
# - A hop hides from c = e·F/(2·B) · K/H tokens per rank, twice that under a balanced causal mask. B is one direction of the
#   link, in bytes.
# - Double buffered, a uniform ring takes (P − 1) · max(block, hop) + block; with one buffer P · block + (P − 1) · hop.
# - Traffic is an all-gather's. Memory is c tokens and one block in flight, whatever P. A KV cache holds K *and* V.
# - One slow link or one slow rank sets the pace of all.
#
# ## Self-check
#
# 1. You double the tokens per rank. What happens to block, hop and their ratio? *(Four times, twice, twice as easy to hide.)*
# 2. Elements become one byte instead of two, F doubles with it. The threshold? *(e·F stays, so does the threshold.)*
# 3. A hop takes 3 times a block, P = 5, double buffered: how many blocks long is the run? *(4 · 3 + 1 = 13.)*
# 4. Why can adding ranks to a fixed sequence expose communication that was hidden? *(c = S/P falls below the threshold.)*
# 5. A colleague's link does "400 gigabit". What do you put for B? *(50 GB/s, after asking whether that is one direction.)*
#
# Now build it: [exercise 06](../exercises/06_what_it_costs.ipynb), the threshold, a makespan, a ring that beats it, a table.
