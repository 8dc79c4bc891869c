# %% [markdown]
# # 05 · The emulated ring
#
# **Afterwards you can** run ring attention on virtual ranks, say which block is where at every step, and predict how many
# hops, bytes and K/V blocks of memory it takes.
#
# **You need first** [lesson 02](02_online_softmax.ipynb), the merge of `(out, lse)`. You do not need the tiles of
# [lesson 03](03_tiled_attention.ipynb) here.
#
# **Minutes** 60 to read and run; the exercise takes another 60.
#
# On one machine, attention can do without the S × S matrix: lesson 03 computes it tile by tile. One limit remains: from
# some length on, Q, K and V alone outgrow one machine. So we cut the *sequence* and give every machine, every **rank**,
# a piece of it. Each query still has to meet every key. This lesson shows how they meet.

# %%
import math
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from ringlab import VirtualCluster, contiguous, launch, oracle, ring_attention
from ringlab_course import compare, corpus, predict
from ringlab.merge import Partial, merge
from ringlab_course.figures import memory_ledger, ring_counts, ring_view
from ringlab.viz import gantt
from ringlab.viz.style import show

# %% [markdown]
# ## 1 · Small enough for paper
#
# There are eight tokens, one head, head dim D = 4 and two ranks. Rank 0 owns tokens 0–3 and rank 1 tokens 4–7, each with
# its own rows of queries, keys and values. So a rank's K/V block has 2 · 4 · 4 = 32 values, which are 128 bytes in float32,
# and there are four pairs of a query block and a K/V block.
#
# To keep the numbers easy, the keys are small integers, and each query is 2 ln 2 in one place and 0 elsewhere. Then a score
# q·k/√4 is a multiple of ln 2, and the weight e^score is a power of two.

# %%
k8 = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 1], [0, 2, 0, 1], [0, 1, 1, 0],
                   [1, 0, 0, 2], [2, 1, 0, 0], [2, 0, 1, 1], [1, 2, 0, 0]])[None, None].float()
token = torch.arange(8.0)
v8 = torch.stack([token, token % 2, 7 - token, torch.ones(8)], dim=-1)[None, None]
q8 = 2 * math.log(2) * torch.eye(4).repeat(2, 1)[None, None]
print("queries, keys, values:", *(tuple(x.shape) for x in (q8, k8, v8)))

# %% [markdown]
# Now follow query 0 with a pencil. It reads column 0 of the keys, so its weights are 2⁰ = 1 for keys 0–3 and 2, 4, 4, 2
# for keys 4–7. Column 0 of the values is the token's own number, so column 0 of the output is *the mean token number it
# looked at*:
#
# - over rank 0's keys: (0 + 1 + 2 + 3) / 4 = **1.5**, with a sum of weights of **4**;
# - over rank 1's keys: (2·4 + 4·5 + 4·6 + 2·7) / 12 = **5.5**, with a sum of weights of **12**.
#
# These are two partials, `(out, lse)` = (1.5, ln 4) and (5.5, ln 12). The merge weighs them 4 to 12: (4 · 1.5 +
# 12 · 5.5) / 16 = **4.5**. Their plain average would be 3.5, which is not attention. Below, a *layout* says which rank
# owns which tokens: `contiguous` gives each rank one stretch, and `shard` cuts out a rank's rows.

# %%
def attend(q, k, v, mask=None):
    """Attention of q on one block, as the Partial (out, lse) of lesson 02."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return Partial(weights @ v, lse)

# %%
layout = contiguous(S=8, P=2)
(q0, k0, v0), (q1, k1, v1) = (layout.shard((q8, k8, v8), rank) for rank in range(2))
here, there = attend(q0, k0, v0), attend(q0, k1, v1)
for name, part in (("own keys", here), ("rank 1's keys", there), ("merged", merge(here, there))):
    weights = part.lse[0, 0, 0].exp()
    print(f"{name:14} out {part.out[0, 0, 0, 0]:.1f}   sum of weights {weights:.0f}")
print(f"plain average  out {(here.out + there.out)[0, 0, 0, 0] / 2:.1f}")

# %% [markdown]
# Paper and machine agree. Cutting the sequence saves no work: the four pairs of blocks together cost what one device would
# pay. But it *divides* the work, two pairs for each rank. For that, something had to travel: to serve query 0, rank 1's K/V
# block, 32 values, went to rank 0. It could be done the other way round: rank 0 sends its four queries to rank 1, which
# returns the partial `(out, lse)`.

# %% tags=["nbval-ignore-output"]
predict("05.values", "If rank 0's queries travel instead, how many values travel, there and back?",
        unit="values")

# %%
print("K/V block: ", k1.numel() + v1.numel(), "values")
print("queries:   ", q0.numel(), "there,", there.out.numel(), "+", there.lse.numel(), "back")
compare("05.values", q0.numel() + there.out.numel() + there.lse.numel())

# %% [markdown]
# K and V are the lighter load here, and by far where many query heads share a K/V head. So the K/V blocks travel.
#
# ## 2 · Ranks without a cluster
#
# A rank is a program with its own memory and a number. Every rank runs the *same* program; only `ring.rank` differs. On a
# cluster each rank is a process on its own device. Here all ranks live in this notebook: `VirtualCluster(P).run(program)`
# lets one rank run until it has to wait for a message; then it switches to the next rank that can continue. Ranks share
# nothing but messages. As in lesson 00 they form a circle: `ring.shift(x)` sends x to rank + 1, `ring.next`, and returns
# what rank − 1, `ring.previous`, sent. Every rank first shifts its own block, and from then on the block that it received
# last.

# %%
def follow(ring):
    block, seen = torch.tensor([ring.rank]), [ring.rank]
    for _ in range(ring.world_size - 1):
        block = ring.shift(block)
        seen.append(block.item())
    return seen


journeys = VirtualCluster(5).run(follow).results
for rank, seen in enumerate(journeys):
    print(f"rank {rank} sees blocks {seen}")

# %% [markdown]
# Read a row: the owners count *down*. The block that is here after `step` shifts comes from **origin = (rank − step) mod
# P**, which is `ring.origin(step)`. Some write-ups send to the right and then claim (rank + step) mod P.

# %% tags=["nbval-ignore-output"]
predict("05.slip", "On 4 ranks, in how many of the 4 steps is (rank + step) mod 4 the wrong owner?",
        choices=["1", "2", "3", "4"])

# %%
four = VirtualCluster(4).run(follow).results
wrong = [step for step in range(4)
         if any(four[rank][step] != (rank + step) % 4 for rank in range(4))]
print("steps with a wrong owner:", wrong)
compare("05.slip", str(len(wrong)))

# %% [markdown]
# Both formulas agree in step 0, for an even P also in step P/2, and so on 2 ranks always. The formula is used only to build
# masks. Without a mask a wrong one does no harm; with a mask it is a bug.
#
# ## 3 · The ring, in nine lines
#
# Everything is in place: blocks come by, `attend` handles one of them, and `merge` adds it to the state, which begins
# as `Partial.identity(q)`, *nothing seen*. Queries never move. A *step* is the attention on one block. Between two
# steps each rank shifts its block once: a *hop* (an exchange, in the words of the trace). There are P blocks to meet,
# your own is here already: P − 1 hops.

# %%
def my_ring(ring, q, k, v):
    """This rank's queries over the keys of all ranks."""
    state = Partial.identity(q)
    for step in range(ring.world_size):
        block = ring.compute(f"attend {step}", attend, q, k, v)
        state = merge(state, block)
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v)
    return state.out, state.lse

# %% [markdown]
# `ring.compute(label, function, …)` calls the function and records the call in the trace. Below, `layout.unshard` joins
# what the ranks return, in the order of the sequence.

# %%
def on_shards(ring, layout, program, *whole):
    """Run `program` on this rank's shards of the whole tensors."""
    return program(ring, *layout.shard(whole, ring.rank))


run = VirtualCluster(2).run(on_shards, layout, my_ring, q8, k8, v8)
out = layout.unshard([out for out, _ in run.results])
truth = oracle.attention(q8, k8, v8)
print("query 0, column 0:", round(out[0, 0, 0, 0].item(), 4))
print("equal to full attention:", bool((out - torch.from_numpy(truth.out)).abs().max() < 1e-6))

# %%
for event in run.trace.exchanges():
    print(f"rank {event.rank} → rank {event.to}: {event.shapes[0]} twice, {event.bytes_sent} bytes")

# %% [markdown]
# Each rank made one hop of 2 · 64 bytes: 32 values.
#
# Is the result still exact on more ranks? Merging is associative and commutative, so neither the cuts
# nor the order of arrival matter, up to rounding.

# %%
torch.manual_seed(0)
wide = contiguous(S=16, P=4)
qkv = [torch.randn(1, 2, 16, 8) for _ in range(3)]
run4 = VirtualCluster(4).run(on_shards, wide, my_ring, *qkv)
out4 = wide.unshard([out for out, _ in run4.results])
error = (out4 - torch.from_numpy(oracle.attention(*qkv).out)).abs().max().item()
print("4 ranks, error below 1e-6:", error < 1e-6)
print("hops:", [run4.trace.rounds(rank) for rank in range(4)])

# %% [markdown]
# ## 4 · See it move
#
# The picture below plays that run from its trace. Press Play, or put the focus on the slider and use the arrow keys. A box
# is the block that a rank holds, and its colour is the owner's.

# %% tags=["nbval-ignore-output"]
ring_view.play(run4.trace)

# %% [markdown]
# Here are the same steps side by side. On the right is the **coverage matrix**: row r is for the queries of rank r,
# column o for the K/V block of rank o, and the number is the step in which they met.

# %%
show(ring_view.strip(run4.trace), ring_view.describe(run4.trace))

# %% [markdown]
# Every cell holds one number: each query block met each K/V block **exactly once**. In every step the four ranks hold four
# different blocks, so all are busy, and no link carries more than one block.
#
# The trace knows where the blocks were, but not whether the program used them correctly. A probe can tell. With Q = K = 0
# every visible key has the weight e⁰ = 1. If V is the identity matrix (so D = S, and column j of out belongs to key j),
# then out · e^lse is *the number of times that each key was counted*. Compare your ring with one that makes a common slip:
# it sends its **own** block again in every step.

# %%
def stale_ring(ring, q, k, v):
    own, state = (k, v), attend(q, k, v)
    for _ in range(ring.world_size - 1):
        state = merge(state, attend(q, *ring.shift(*own)))
    return state.out, state.lse


small = contiguous(S=12, P=4)
good, stale = ring_counts.counts(my_ring, small), ring_counts.counts(stale_ring, small)
print("my ring: every pair once:", bool((good.round(6) == 1).all()))
print("stale ring: counts that occur:", sorted(set(stale.round(6).ravel().tolist())))
for program in (my_ring, stale_ring):
    trace = VirtualCluster(4).run(on_shards, wide, program, *qkv).trace
    print(f"{program.__name__}: {trace.rounds(0)} hops, {trace.bytes_sent(0):,} bytes")

# %%
show(ring_counts.counted(stale, (3, 6, 9), "Stale ring: how often\neach query counts each key"),
     "How often a stale ring counts each of 12 keys for each of 12 queries, in a grid of 4 by 4 "
     "blocks, each of 3 by 3 tokens. "
     "The blocks on the diagonal are grey, counted once. In each row of blocks the block to the "
     "left, cyclically, shows the number 3; the other two are empty, never counted.")

# %% [markdown]
# The previous rank's keys count three times, and two blocks of the four do not count at all. Yet the stale ring's hops and
# bytes are perfect, and with two ranks its result is right too. So the exercise also tests P = 3.
#
# ## 5 · What travels, and what stays
#
# There is an obvious alternative, the *all-gather*: every rank first collects *all* keys and values, and only then attends
# to them. (In the package it, too, attends block by block.)

# %% tags=["nbval-ignore-output"]
predict("05.traffic", "Compared with an all-gather, how many bytes does a rank send in the ring?",
        choices=["fewer", "as many", "more"])

# %% [markdown]
# Let us take real text: 8,192 tokens, bytes of the Python standard library's own source, through one layer of random
# weights, with 8 query heads on 2 K/V heads. The package's `ring_attention` does what your nine lines do, with masks, and
# its argument `schedule` chooses how blocks travel. We run it on 8 ranks as a ring and as an all-gather.

# %%
S, P, H, K, D = 8192, 8, 8, 2, 64
text = corpus.qkv(S, heads=H, kv_heads=K, head_dim=D)
even = contiguous(S, P)


def package(ring, q, k, v, layout, **options):
    return ring_attention(q, k, v, ring=ring, layout=layout, **options)


def run_package(layout, qkv, **options):
    program = partial(package, layout=layout, **options)
    return VirtualCluster(layout.P).run(on_shards, layout, program, *qkv)

# %%
ringed = run_package(even, text, causal=False)
gather = run_package(even, text, causal=False, schedule="allgather")
print(f"ring       {ringed.trace.bytes_sent(0):>9,} bytes sent by a rank")
print(f"all-gather {gather.trace.bytes_sent(0):>9,}")
same = ringed.trace.bytes_sent(0) == gather.trace.bytes_sent(0)
compare("05.traffic", "as many" if same else "fewer")

# %% [markdown]
# They are equal to the byte: whatever the schedule, every rank's block has to reach the P − 1 other ranks.
#
# Does a rank send more if there are more ranks? Take section 3's 16 tokens, first on 8 ranks and then on 16.

# %% tags=["nbval-ignore-output"]
predict("05.more", "16 tokens on 16 ranks instead of 8: how many bytes does a rank send?",
        choices=["half as many as on 8", "about as many", "twice as many"])

# %%
sent = {}
for ranks in (8, 16):
    shards = contiguous(16, ranks)
    sent[ranks] = VirtualCluster(ranks).run(on_shards, shards, my_ring, *qkv).trace.bytes_sent(0)
    print(f"16 tokens on {ranks:2} ranks: {sent[ranks]:,} bytes sent by a rank")
compare("05.more", "about as many" if 0.9 < sent[16] / sent[8] < 1.1 else "twice as many")

# %% [markdown]
# On twice as many ranks a block is half as large, but there are about twice as many to pass on. A rank sends **(P − 1) · 2 ·
# (S/P) · K · D · itemsize** bytes (times B, if there are B sequences), with 2 for K and V:

# %%
def sent_bytes(S, P, K, D, itemsize=4):
    return (P - 1) * 2 * (S // P) * K * D * itemsize


print(f"text: {sent_bytes(S, P, K, D):,}")
print(f"16 tokens: {sent_bytes(16, 8, 2, 8):,} on 8 ranks, {sent_bytes(16, 16, 2, 8):,} on 16")

# %% [markdown]
# Note the *K*, lesson 00's letter for K/V heads: K and V travel with their 2 heads, not with the 8 query heads that
# share them. So repeat heads inside `attend`, never before sending.
#
# If the bytes are those of an all-gather, why a ring? Look at what a rank holds. We keep 512 tokens per rank and add ranks:

# %%
peaks = {"ring": {}, "all-gather": {}}
for ranks in (2, 4, 8, 16):
    more = contiguous(512 * ranks, ranks)
    qkv_more = corpus.qkv(more.S, heads=H, kv_heads=K, head_dim=D)
    for name, others in (("ring", min(ranks - 1, 2)), ("all-gather", ranks - 1)):
        outcome = run_package(more, qkv_more, causal=False, schedule=name.replace("-", ""))
        peak = outcome.memory[0].peak_bytes / (2 * 512 * K * D * 4)
        peaks[name][ranks] = round(peak), others
rest = {peak - others for bars in peaks.values() for peak, others in bars.values()}
print("K/V blocks left without those of other ranks:", *rest)
show(memory_ledger.peaks_figure(peaks, 512), memory_ledger.describe_peaks(peaks, 512))

# %% [markdown]
# The ring's peak soon stops growing. The meter gives the height of a bar; its split is our guess. Of the other ranks'
# K/V blocks a ring should hold two, one in use and one in flight (a single one if there are only two ranks), and an
# all-gather all P − 1. It fits: the rest, grey, is 7 blocks in every bar. A K/V block has 2 + 2 heads, so the 7 are:
#
# | | heads | K/V blocks |
# |---|---|---|
# | the rank's own K and V | 2 + 2 | 1 |
# | its Q | 8 | 2 |
# | `out`, so far | 8 | 2 |
# | `out` of the block in use, before the merge | 8 | 2 |
#
# lse and other small tensors disappear in rounding. And no rank ever holds a tensor as large as the scores of one block
# pair, because the package's block attention works by tiles:

# %%
largest = max(report.largest_bytes for report in ringed.memory)
print(f"largest tensor {largest:,} bytes; scores of one block pair {H * (S // P) ** 2 * 4:,} bytes")

# %% [markdown]
# ## 6 · Post, then compute
#
# Your ring computes, *then* shifts: while a block travels, all ranks wait. But both the computation and the transport only
# read the block, so it can be sent while we compute with it. `ring.post(k, v)` starts the exchange and returns at once;
# `wait()` returns what has arrived.

# %%
def overlapped_ring(ring, q, k, v):
    state = Partial.identity(q)
    for step in range(ring.world_size):
        work = ring.post(k, v) if step < ring.world_size - 1 else None
        state = merge(state, ring.compute(f"attend {step}", attend, q, k, v))
        if work:
            k, v = work.wait()
    return state.out, state.lse

# %% [markdown]
# One buffer is read while the other fills: *double buffering*. It takes no more room, for a shift needs both buffers too.
#
# The virtual cluster keeps a virtual clock. By default a computation takes 1 second and a hop half a second. `my_ring`
# on 4 ranks takes 4 · 1 + 3 · ½ = 5.5 seconds. The overlapped ring should save the 3 · ½.

# %%
def finished(outcome):
    return max(event.end for event in outcome.trace.computes())


overlapped = VirtualCluster(4).run(on_shards, wide, overlapped_ring, *qkv)
pairs = zip(run4.results, overlapped.results, strict=True)
print("same result:", all(torch.equal(a[0], b[0]) for a, b in pairs))
print("compute, then shift:", finished(run4), "s")
print("post, then compute: ", finished(overlapped), "s")

# %%
both = (run4.trace, overlapped.trace), ("Compute, then shift", "Post, then compute")
show(gantt.compare(*both), gantt.describe_all(*both))

# %% [markdown]
# The hops are hidden behind the computation, as long as a hop takes no longer than a block's attention. Lesson 06 shows how
# that depends on tokens per rank, FLOP/s and bandwidth.
#
# Why do `post` and `shift` send and receive *together*? A send can last until its message has been received. If every
# rank sent first and received afterwards, all would wait for ever: a deadlock of another kind than lesson 00's. So post
# both ends at once, and equally often on all ranks. Even a rank that has no use for a block takes part in the exchange.
#
# ## 7 · Causal: positions are global
#
# A language model's query sees only keys at or before its own position *in the sequence*. Row 0 of rank 2's shard is not
# token 0. Which of the four blocks does each rank need?

# %%
def visible_pairs(layout, rank, origin):
    """How many (query, key) pairs of the two shards a causal mask lets through."""
    rows, columns = layout.positions(rank)[:, None], layout.positions(origin)[None, :]
    return int((rows >= columns).sum())


table = [[visible_pairs(wide, rank, origin) for origin in range(4)] for rank in range(4)]
print("contiguous, pairs per (rank, origin), and their sum:")
for row in table:
    print(row, sum(row), "of", 16 * 17 // 2)

# %% [markdown]
# Rank 0 can use only its own block, yet it has to take part in every shift, and passes on two blocks that even its
# neighbour cannot use. Rank 3 uses all four. The mask of a query block and a K/V block is one comparison of
# *positions*. For contiguous shards a block is visible entirely, not at all, or as a triangle. A mask by local row and
# column puts a triangle of 10 into every one of the 16 blocks. The probe from above shows what the package's causal
# ring counts, and what a ring with that slip counts:

# %%
def local_mask_ring(ring, q, k, v):
    """The slip: every block gets the same mask, by local row and column."""
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    state = Partial.identity(q)
    for step in range(ring.world_size):
        state = merge(state, attend(q, k, v, mask))
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v)
    return state.out, state.lse


causal = partial(package, layout=wide, causal=True, return_lse=True)
rings = {"right: by global position": causal, "wrong: by local row and column": local_mask_ring}
counted = {mask: ring_counts.counts(program, wide) for mask, program in rings.items()}
title = "Two masks of a causal ring on 4 ranks: how often each query counts each key"
show(ring_counts.compared(counted, (4, 8, 12), title),
     "Two matrices of 16 queries by 16 keys, cut into a grid of 4 by 4 blocks. Left, mask by "
     "global position: the lower triangle with the diagonal is grey, counted once; nothing above "
     "it is counted. Right, mask by local row and column: each of the 16 blocks has a grey "
     "triangle of its own, also those above the diagonal of blocks.")

# %% [markdown]
# Rank 0 has 10 of the 136 pairs, and rank 3 has 58. Other layouts share the work more evenly: lessons 07 and 08 compare
# them. `ring_attention` takes any layout.
#
# ## 8 · Two things the ring is not
#
# **"It replaces FlashAttention."** Every step contains an ordinary attention of one query block on one K/V block. `block=`
# chooses who computes it: "naive" is your `attend` with grouped heads, "blockwise" is lesson 03's, and "native" is PyTorch's own FlashAttention.

# %%
whole = scaled_dot_product_attention(*text, is_causal=True, enable_gqa=True)
for block in ("naive", "native"):
    shards = run_package(even, text, causal=True, block=block).results
    error = (even.unshard(shards) - whole).abs().max().item()
    print(f"{block:6} block on 8 ranks: within 1e-5 of SDPA on one device: {error < 1e-5}")

# %% [markdown]
# So any attention will do if it returns its lse beside out. The ring decides *which* block is here; the block attention
# decides *how* to compute with it.
#
# **"It needs special hardware."** It needs only something that carries messages. `launch` starts real processes on this
# machine, joined by *gloo*, PyTorch's CPU transport. They run your function unchanged:

# %%
real = launch(on_shards, 2, layout, my_ring, q8, k8, v8)
out_real = layout.unshard([out for out, _ in real.results])
print("2 processes, bitwise equal to the virtual ranks:", torch.equal(out_real, out))
print("hops and bytes of rank 0:", real.trace.rounds(0), real.trace.bytes_sent(0))

# %% [markdown]
# The bits, the hop and the 128 bytes are the same. You can debug here what runs on a cluster.
#
# The whole ring is in one file of 200 lines, [ringlab/plain_ring.py](../ringlab/plain_ring.py). Read its `forward` now,
# and its `backward` after lesson 09.
#
# ## Recap
#
# - A rank owns a shard of the sequence. Queries stay, K/V blocks travel to the right, and after `step` shifts a rank holds
#   the block of rank (rank − step) mod P.
# - In each step a rank attends to the block that is here and merges `(out, lse)`. There are P blocks and P − 1 hops, and
#   every pair meets exactly once.
# - Traffic equals an all-gather's, (P − 1) · 2 · (S/P) · K · D · itemsize bytes. Memory does not: beside its shard and its
#   results a rank holds one block in use and one in flight, not the whole sequence. The FLOPs are divided, not reduced.
# - Post the exchange, compute, then wait, and the hop is hidden. Post both ends together, equally often on every rank.
# - Masks compare global positions.
#
# ## Self-check
#
# <details><summary>1. There are 6 ranks. Whose block does rank 1 hold in step 4?</summary>(1 − 4) mod 6 = 3: the block of
# rank 3.</details>
#
# <details><summary>2. Your ring is right on 2 ranks and wrong on 3. What do you check first?</summary>Whether each rank
# passes on the block that it received. On two ranks, sending your own block again makes no difference.</details>
#
# <details><summary>3. You double P and S together. What happens to a rank's memory, and to the bytes that it
# sends?</summary>Memory stays the same, because S/P does. The bytes about double, because P − 1 does.</details>
#
# <details><summary>4. Why may rank 0 not leave the loop early under a causal mask?</summary>Its neighbours would wait
# for it: rank 3 could not send, and rank 1 could not receive. They wait for the exchange: the blocks that rank 0 would
# pass on after its first shift are of no use to any of them.</details>
#
# Now build it yourself: [exercise 05](../exercises/05_emulated_ring.ipynb), one step, the forward ring, the causal ring.
