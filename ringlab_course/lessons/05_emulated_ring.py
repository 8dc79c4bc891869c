# %% [markdown]
# # 05 · The emulated ring
#
# **Afterwards you can** run ring attention on virtual ranks, say which block is where at every step, and count its
# rounds, bytes and memory before you run it.
#
# **You need first** [lesson 02](02_online_softmax.ipynb), the merge of `(out, lse)`, and
# [lesson 03](03_tiled_attention.ipynb), attention by tiles.
#
# **Minutes** 60 to read and run; the exercise takes another 60.
#
# Lesson 03 ended with attention that needs no S × S matrix. What is left is the sequence itself: at some length Q, K and
# V alone outgrow one machine. So we cut the *sequence* and give every machine, every **rank**, a piece of it. Each query
# still has to meet every key. This lesson is about how they meet.

# %%
import math
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from ringlab import VirtualCluster, contiguous, launch, oracle, ring_attention, zigzag
from ringlab_course import compare, corpus, predict
from ringlab.errors import DeadlockError
from ringlab.merge import Partial, merge
from ringlab_course.figures import ring_view
from ringlab.viz.style import show

# %% [markdown]
# ## 1 · Small enough for paper
#
# Eight tokens, one head, head dim D = 4, two ranks. Rank 0 owns tokens 0–3, rank 1 owns tokens 4–7, each with its own
# rows of Q, K and V. Take a sheet of paper and count:
#
# | | on paper | |
# |---|---|---|
# | values in Q, K and V, all tokens | 3 · 8 · 4 | 96 |
# | of these, on one rank | 3 · 4 · 4 | 48 |
# | values in one K/V block | 2 · 4 · 4 | 32 |
# | bytes of that block in float32 | 32 · 4 | 128 |
# | pairs of a query block and a K/V block | 2 · 2 | 4 |
# | multiply-adds for one pair: scores, then weights × V | 4·4·4 + 4·4·4 | 128 |
# | multiply-adds in all | 4 · 128 | 512 |
# | FLOPs, two per multiply-add | 2 · 512 | 1024 |
#
# To make the numbers easy, K holds small integers and each row of Q is 2 ln 2 in one place. Then a score q·k/√4 is a
# multiple of ln 2, and the weight e^score is a power of two.

# %%
K = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 1], [0, 2, 0, 1], [0, 1, 1, 0],
                  [1, 0, 0, 2], [2, 1, 0, 0], [2, 0, 1, 1], [1, 2, 0, 0]], dtype=torch.float32)[None, None]
token = torch.arange(8.0)
V = torch.stack([token, token % 2, 7 - token, torch.ones(8)], dim=-1)[None, None]
Q = 2 * math.log(2) * torch.eye(4).repeat(2, 1)[None, None]
print("Q, K, V:", tuple(Q.shape), "each =", Q.numel() + K.numel() + V.numel(), "values")

# %% [markdown]
# Now follow query 0 with a pencil. It looks at column 0 of K, so its weights are 2⁰ = 1 for keys 0–3 and 2, 4, 4, 2 for
# keys 4–7. Column 0 of V is the token's own number, so column 0 of the answer is *the mean token number it looked at*:
#
# - over rank 0's keys: (0 + 1 + 2 + 3) / 4 = **1.5**, with a sum of weights of **4**;
# - over rank 1's keys: (2·4 + 4·5 + 4·6 + 2·7) / 12 = **5.5**, with a sum of weights of **12**.
#
# These are two partials, `(out, lse)` = (1.5, ln 4) and (5.5, ln 12). Merged, they weigh 4 to 12: (4 · 1.5 + 12 · 5.5)
# / 16 = **4.5**. Their plain average would be 3.5, which is no attention at all. Below, a *layout* says which rank owns
# which tokens: `contiguous` gives each rank one stretch, and `shard` cuts out a rank's rows.

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
(q0, k0, v0), (q1, k1, v1) = (layout.shard((Q, K, V), rank) for rank in range(2))
here, there = attend(q0, k0, v0), attend(q0, k1, v1)
for name, part in (("own keys", here), ("rank 1's keys", there), ("merged", merge(here, there))):
    print(f"{name:14} out {part.out[0, 0, 0, 0]:.1f}   sum of weights {part.lse[0, 0, 0].exp():.0f}")
print(f"plain average  out {(here.out + there.out)[0, 0, 0, 0] / 2:.1f}")

# %% [markdown]
# Paper and machine agree. And the count of FLOPs? PyTorch can count the matrix products it runs.

# %%
with FlopCounterMode(display=False) as counter:
    for q in (q0, q1):
        for k, v in ((k0, v0), (k1, v1)):
            attend(q, k, v)
print("FLOPs:", counter.get_total_flops(), "  values on a rank:", q0.numel() + k0.numel() + v0.numel())

# %% [markdown]
# Cutting the sequence saved no FLOP: the four pairs together cost what one device would have paid. It *divided* the
# work: two pairs each. For that, something had to travel.

# %% tags=["nbval-ignore-output"]
predict("05.values", "How many values must rank 0 receive to finish its four queries?", unit="values")

# %% [markdown]
# ## 2 · Ranks without a cluster
#
# A rank is a program with its own memory and a number. Every rank runs the *same* program; only `ring.rank` differs. On
# a cluster each is a process on its own device. Here all of them live in this notebook: `VirtualCluster(P).run(program)`
# lets one rank run until it has to wait for a message, then the next one that can go on. Nothing is shared but messages.

# %%
def hello(ring):
    return f"rank {ring.rank} of {ring.world_size}: sends to {ring.next}, hears from {ring.previous}"


for line in VirtualCluster(4).run(hello).results:
    print(line)

# %% [markdown]
# Four ranks in a circle, each knowing just two others. `ring.shift(x)` hands x to the next rank and returns what the
# previous one handed over. So things travel to the right, to rank + 1. Suppose every rank shifts its own block, then
# shifts on what it got.

# %% tags=["nbval-ignore-output"]
predict("05.origin", "After two shifts among 5 ranks, whose block does rank 0 hold?",
        choices=["rank 1's", "rank 2's", "rank 3's", "rank 4's"])

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
compare("05.origin", f"rank {journeys[0][2]}'s")

# %% [markdown]
# Read a row: the owners count *down*. Because blocks move right, what is here after `step` shifts comes from `step`
# places to the left: **origin = (rank − step) mod P**, which is `ring.origin(step)`. Write-ups that send to the right and
# then claim (rank + step) mod P describe another ring. Without a mask the slip goes unnoticed; with one, it is a bug.
#
# ## 3 · The ring, in ten lines
#
# Everything is in place: blocks come by, `attend` handles one, `merge` adds it to what is known. Queries never move.
# One shift of a block is a *hop*.

# %% tags=["nbval-ignore-output"]
predict("05.hops", "How many hops does a K/V block make on P ranks?", choices=["P - 1", "P"])

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
# `ring.compute(label, function, …)` just calls the function, and tells the trace that it did.

# %%
def on_shards(ring, layout, program, *whole):
    """Run `program` on this rank's shards of the whole tensors."""
    return program(ring, *layout.shard(whole, ring.rank))


run = VirtualCluster(2).run(on_shards, layout, my_ring, Q, K, V)
out = layout.unshard([out for out, _ in run.results])
truth = oracle.attention(Q, K, V)
print("query 0, column 0:", round(out[0, 0, 0, 0].item(), 4))
print("equal to full attention:", bool((out - torch.from_numpy(truth.out)).abs().max() < 1e-6))

# %%
for event in run.trace.exchanges():
    print(f"rank {event.rank} → rank {event.to}: {event.shapes[0]} twice, {event.bytes_sent} bytes")
compare("05.values", run.trace.exchanges(0)[0].bytes_received // 4)
compare("05.hops", "P - 1" if run.trace.rounds(0) == 1 else "P")

# %% [markdown]
# **32 values, one hop.** There are P = 2 blocks to meet, but your own is here already. The last one to arrive is used and
# need not go home. Programs that shift P times are correct and pay for a hop that nobody needs.
#
# Does it stay exact for more ranks? Merging is associative, so the cuts cannot matter, up to rounding.

# %%
torch.manual_seed(0)
wide = contiguous(S=16, P=4)
qkv = [torch.randn(1, 2, 16, 8) for _ in range(3)]
run4 = VirtualCluster(4).run(on_shards, wide, my_ring, *qkv)
out4 = wide.unshard([out for out, _ in run4.results])
error = (out4 - torch.from_numpy(oracle.attention(*qkv).out)).abs().max().item()
print("4 ranks, error below 1e-6:", error < 1e-6, "  rounds:", [run4.trace.rounds(rank) for rank in range(4)])

# %% [markdown]
# ## 4 · See it move
#
# The picture below plays that run, from its trace: who held which block, who computed, what was sent. Press Play, or put
# the focus on the slider and use the arrow keys. A box shows the block that a rank holds; its colour is the owner's.

# %% tags=["nbval-ignore-output"]
ring_view.play(run4.trace)

# %% [markdown]
# The same as small multiples. The last panel is the **coverage matrix**: row r are the queries of rank r, column o is the
# K/V of rank o, and the number is the step in which they met.

# %%
show(ring_view.strip(run4.trace), ring_view.describe(run4.trace))

# %% [markdown]
# Every cell holds one number: each query block met each K/V block **exactly once**. Along a row, steps count up to the
# left, and go on at the right edge. Down a column you can follow one block through the ring. In every step each rank
# holds another block, so all four are busy and no link carries more than one block.
#
# The trace knows where blocks were, but not whether the program used them well. For that there is a neat probe. With
# Q = K = 0 every visible key weighs e⁰ = 1. With V the identity matrix, out · e^lse is then *the number of times each key
# was counted*. Here is a ring with a common slip, beside yours: it sends its **own** block again in every step.

# %%
def stale_ring(ring, q, k, v):
    own, state = (k, v), attend(q, k, v)
    for _ in range(ring.world_size - 1):
        state = merge(state, attend(q, *ring.shift(*own)))
    return state.out, state.lse


small = contiguous(S=12, P=4)
good, stale = ring_view.counts(my_ring, small), ring_view.counts(stale_ring, small)
print("my ring: every pair once:", bool((good.round(6) == 1).all()))
print("stale ring: counts that occur:", sorted(set(stale.round(6).ravel().tolist())))

# %%
show(ring_view.counted(stale, (3, 6, 9), "stale ring: times counted"),
     "A 12 by 12 matrix of queries and keys in 4 by 4 blocks. The blocks on the diagonal are grey, counted once. In each "
     "row of blocks the block to the left, cyclically, shows the number 3; the other two are empty, never counted.")

# %% [markdown]
# Grey is once, white is never. The neighbour's keys count three times, two blocks out of four not at all. Its rounds
# and bytes are perfect, and with two ranks even its result is. That is why the exercise looks at P = 3.
#
# ## 5 · What travels, and what stays
#
# The obvious alternative: let every rank gather *all* keys and values first, then attend once.

# %% tags=["nbval-ignore-output"]
predict("05.traffic", "Against such an all-gather, how many bytes does a rank send in the ring?",
        choices=["fewer", "as many", "more"])

# %% [markdown]
# Time for real text: 8,192 tokens, bytes of the Python standard library's own source through one seeded layer. 8 query
# heads share 2 K/V heads. The package's `ring_attention` is your ten lines with a plan for masks and a choice of
# schedules; we run it on 8 ranks, with both.

# %%
S, P, H, Hkv, D = 8192, 8, 8, 2, 64
text = corpus.qkv(S, heads=H, kv_heads=Hkv, head_dim=D)
even = contiguous(S, P)


def package(ring, q, k, v, layout, **options):
    return ring_attention(q, k, v, ring=ring, layout=layout, **options)


def run_package(layout, qkv, **options):
    program = partial(package, layout=layout, **options)
    return VirtualCluster(layout.P).run(on_shards, layout, program, *qkv)

# %%
ringed = run_package(even, text, causal=False)
gather = run_package(even, text, causal=False, schedule="allgather")
closed_form = (P - 1) * 2 * (S // P) * Hkv * D * 4
print(f"ring       {ringed.trace.bytes_sent(0):>9,} bytes sent by a rank")
print(f"all-gather {gather.trace.bytes_sent(0):>9,}")
print(f"formula    {closed_form:>9,}")
compare("05.traffic", "as many" if ringed.trace.bytes_sent(0) == gather.trace.bytes_sent(0) else "fewer")

# %% [markdown]
# The same to the byte: **(P − 1) · 2 · (S/P) · Hkv · D · e**, with 2 for K and V, and e bytes per element. Every rank has
# to see P − 1 foreign blocks, whatever the schedule. Mind *Hkv*: K and V travel with their 2 heads, not with the 8 query
# heads that share them. So why a ring? Ask what a rank holds.

# We keep 512 tokens per rank and add ranks:

# %%
for ranks in (2, 4, 8, 16):
    more, peaks = contiguous(512 * ranks, ranks), []
    qkv_more = corpus.qkv(more.S, heads=H, kv_heads=Hkv, head_dim=D)
    for schedule in ("ring", "allgather"):
        outcome = run_package(more, qkv_more, causal=False, schedule=schedule)
        peaks.append(outcome.memory[0].peak_bytes / (2 * 512 * Hkv * D * 4))
    print(f"{ranks:2} ranks, peak in K/V blocks: ring {peaks[0]:2.0f}, all-gather {peaks[1]:2.0f}")

# %% [markdown]
# The ring's peak soon stops growing: beyond its shard, which is not counted here, a rank needs a block in use, a
# block in flight and its accumulators, whatever P is. These weigh the most, since out has 8 heads where K and V have 2,
# and an update holds old and new side by side. The all-gather's peak grows by one K/V block for every rank. Same bytes
# on the wire, another peak: that is what the ring buys. And no rank ever makes anything as large as the scores of one
# block pair, for the package's block attention works by tiles:

# %%
largest = max(report.largest_bytes for report in ringed.memory)
print(f"largest tensor {largest:,} bytes; scores of one block pair {H * (S // P) ** 2 * 4:,} bytes")

# %% [markdown]
# ## 6 · Post, then compute
#
# Your ring computes, *then* shifts: while a block travels, everybody waits. But the block that is leaving is only being
# read. It can be sent while we compute with it. `ring.post(k, v)` starts the exchange and returns at once; `wait()` gives
# what has arrived. The price is a second buffer, hence *double buffering*.

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
# The virtual cluster keeps a virtual clock. Unless told otherwise, a computation takes 1 second, a hop half a second.
# `my_ring` on 4 ranks takes 4 · 1 + 3 · ½ = 5.5 seconds.

# %% tags=["nbval-ignore-output"]
predict("05.clock", "And the overlapped ring, on the same clock?", unit="s")

# %%
def finished(outcome):
    return max(event.end for event in outcome.trace.computes())


overlapped = VirtualCluster(4).run(on_shards, wide, overlapped_ring, *qkv)
print("compute, then shift:", finished(run4), "s   same result:",
      all(torch.equal(a[0], b[0]) for a, b in zip(run4.results, overlapped.results, strict=True)))
compare("05.clock", finished(overlapped))

# %% [markdown]
# The hops vanish behind the computation, as long as a hop takes no longer than a block's attention. Whether it does, on
# your hardware, is a matter of tokens per rank, FLOP/s and bandwidth: lesson 06.
#
# Why `post` and `shift` send and receive *together* shows when one does not. A send is over only when somebody has
# received it. Let every rank send first and receive afterwards:

# %%
def polite_ring(ring, x):
    ring.comm.exchange(send=(x,), to=ring.next, tag="x").wait()
    return ring.comm.exchange(receive=(torch.empty_like(x),), source=ring.previous, tag="x").wait()


try:
    VirtualCluster(3).run(polite_ring, torch.zeros(2))
except DeadlockError as error:
    print(error)

# %% [markdown]
# Everybody sends, nobody listens: a deadlock. On a real cluster it is a silent hang. Here it is found at once, because
# "nobody can go on and somebody has not finished" is something a virtual cluster can know. Remember its cure: post both
# ends at once, equally often on all ranks. A rank with nothing to do must still pass on what it got.
#
# ## 7 · Causal: positions are global
#
# A language model's query sees only keys at or before its own place *in the sequence*. Row 0 of rank 2's shard is not
# token 0. Which of the four blocks does each rank need?

# %% tags=["nbval-ignore-output"]
predict("05.future", "4 ranks, causal, rank r owns the r-th quarter. How many of the 4 blocks are of use to rank 0?",
        choices=["1", "2", "4"])

# %%
def visible_pairs(layout, rank, origin):
    """How many (query, key) pairs of the two shards a causal mask lets through."""
    rows, columns = layout.positions(rank)[:, None], layout.positions(origin)[None, :]
    return int((rows >= columns).sum())


table = [[visible_pairs(wide, rank, origin) for origin in range(4)] for rank in range(4)]
print("contiguous, pairs per (rank, origin):", *table, sep="\n")
compare("05.future", str(sum(pairs > 0 for pairs in table[0])))

# %% [markdown]
# Rank 0 can use one block, its own, and yet has to pass on all the others. Rank 3 uses all four. The mask of a pair is
# one comparison of *positions*: all, nothing, or a triangle. A mask by local row and column would put a triangle into
# every pair, 10 each. Here is what the package's causal ring really counts, with the probe from above:

# %%
causal_counts = ring_view.counts(partial(package, layout=small, causal=True, return_lse=True), small)
show(ring_view.counted(causal_counts, (3, 6, 9), "causal: times counted"),
     "A 12 by 12 matrix of queries and keys: the lower triangle with the diagonal is grey, counted once; above it nothing "
     "is counted. Lines cut it into 4 by 4 blocks: those above the diagonal of blocks are empty.")

# %% [markdown]
# Rank 0 waits, rank 3 toils. Other layouts deal the same work evenly, for instance the zig-zag, which gives every rank an
# early piece and a late one. `ring_attention` takes any layout; lessons 07 and 08 are about why.

# %%
folded = zigzag(S=16, P=4)
for rank in range(4):
    pairs = [visible_pairs(folded, rank, origin) for origin in range(4)]
    print(f"rank {rank} owns {folded.positions(rank)}: {sum(pairs)} pairs of {16 * 17 // 2}")

# %% [markdown]
# ## 8 · Two things the ring is not
#
# **"It replaces FlashAttention."** Inside every step sits an ordinary attention of one query block on one K/V block, and
# any will do if it returns `(out, lse)`. `block=` chooses it: "naive" is your `attend`, "blockwise" lesson 03, "native"
# PyTorch's own FlashAttention. The ring decides *which* block is here, the block attention *how* it is computed.

# %% tags=["nbval-ignore-output"]
predict("05.block", "Put PyTorch's FlashAttention in place of the naive block, in every step of 8 ranks. The result …",
        choices=["stays exact, up to rounding", "becomes an approximation", "cannot be merged"])

# %%
whole = scaled_dot_product_attention(*text, is_causal=True, enable_gqa=True)
errors = {}
for block in ("naive", "native"):
    shards = run_package(even, text, causal=True, block=block).results
    errors[block] = (even.unshard(shards) - whole).abs().max().item()
    print(f"{block:6} block on 8 ranks, {S:,} tokens: within 1e-5 of SDPA on one device: {errors[block] < 1e-5}")
compare("05.block", "stays exact, up to rounding" if errors["native"] < 1e-5 else "becomes an approximation")

# %% [markdown]
# **"It needs special hardware."** It needs something that carries messages. `launch` starts real processes on this
# machine, joined by *gloo*, PyTorch's CPU transport. They run your function, unchanged:

# %%
real = launch(on_shards, 2, layout, my_ring, Q, K, V)
out_real = layout.unshard([out for out, _ in real.results])
print("2 processes, bit for bit the virtual ranks:", torch.equal(out_real, out))
print("rounds and bytes of rank 0:", real.trace.rounds(0), real.trace.bytes_sent(0))

# %% [markdown]
# The same bits, the same rounds, the same 128 bytes. What you debug here is what a cluster runs.
#
# The whole ring stands in one file of 200 lines, [ringlab/plain_ring.py](../ringlab/plain_ring.py): read its `forward` now,
# and its `backward` after lesson 09.
#
# ## Recap
#
# - A rank owns a shard of the sequence. Queries stay, K/V blocks travel to the right, and after `step` shifts the block
#   of rank (rank − step) mod P is here.
# - Each step: attend to the block that is here, merge `(out, lse)`. P blocks, P − 1 hops, every pair exactly once.
# - Traffic equals an all-gather's, (P − 1) · 2 · (S/P) · Hkv · D · e bytes. Memory does not: one block in use and one in
#   flight, in place of the sequence. The FLOPs are divided, not reduced.
# - Post the exchange, compute, then wait: the hop hides. Post both ends together, on every rank equally often.
# - Masks compare global positions. The block attention inside is yours to choose, and so is the transport.
#
# ## Self-check
#
# 1. 6 ranks, step 4: whose block is on rank 1? *(1 − 4 mod 6 = 3: rank 3's.)*
# 2. Your ring gives the right answer on 2 ranks and a wrong one on 3. What do you look at first? *(Whether what arrived is
#    passed on: with two ranks sending your own block again makes no difference.)*
# 3. You double P and S together. What happens to a rank's memory, and to the bytes it sends? *(Memory stays; S/P is the
#    same and P − 1 hops are about twice as many.)*
# 4. Why may rank 0 not leave the loop early under a causal mask? *(Others still wait for the blocks it forwards.)*
#
# Now build it yourself: [exercise 05](../exercises/05_emulated_ring.ipynb), one step, the forward ring, the causal ring.
