# %% [markdown]
# # 07 · The causal imbalance
#
# **Afterwards you can** mask by global position on any layout, say what a pair of shards computes without building a mask,
# and show who waits for whom, and how long.
#
# **You need first** [lesson 05](05_emulated_ring.ipynb), the ring and, in its section 7, the causal mask;
# [lesson 06](06_what_it_costs.ipynb) for one cell of section 3, which uses its simulator.
#
# **Minutes** 60 to read and run; the exercise takes another 75.
#
# A causal mask hides almost half of all pairs of a query and a key. Lesson 05 ended with a suspicion: in a ring, that half
# is not hidden from everybody alike. This lesson measures who computes, who waits, and why half the work is not half the time.

# %%
import math
from collections import Counter
from itertools import product

import numpy as np
import torch

from ringlab import Layout, Run, VirtualCluster, contiguous, dealt, oracle, striped, zigzag
from ringlab.comm.virtual import Costs
from ringlab.cost.hardware import hardware
from ringlab.cost.simulate import simulate
from ringlab.cost.sizes import Attention
from ringlab_course import compare, corpus, predict
from ringlab.errors import DeadlockError
from ringlab.merge import Partial, merge_into
from ringlab.plan import tiles, work
from ringlab.viz import gantt
from ringlab_course.figures import load_mosaic
from ringlab.viz.style import show

# %% [markdown]
# ## 1 · One mask, sixteen pieces
#
# 32 tokens on 4 ranks, contiguous: rank r owns the r-th eight. A query sees the keys at or before its own place **in the
# sequence**. So the mask of a pair of shards is one comparison of global positions, and its sum is what the pair computes.

# %%
def mask(layout, rank, origin):
    """True where a query of `rank` sees a key of `origin`."""
    return layout.positions(rank)[:, None] >= layout.positions(origin)[None, :]


small = contiguous(S=32, P=4)
pairs = np.array([[mask(small, rank, origin).sum() for origin in range(4)] for rank in range(4)])
print(pairs)
print("visible:", pairs.sum(), "of", 32 * 32)

# %% [markdown]
# The big causal triangle, cut into sixteen pieces, is made of three kinds: squares that are seen whole, 64; triangles on the
# diagonal, 36; and nothing. The same as a mosaic, one row for each rank's queries:

# %%
show(load_mosaic.figure(small, by="origin"), "Work of rank (row) against the keys of each rank (column). "
     f"Below the diagonal 64 pairs, on it 36, above it none. Totals of the ranks: {pairs.sum(axis=1).tolist()}.")

# %% [markdown]
# Rank 3 has most to do. How much more than rank 0, on a larger ring?

# %% tags=["nbval-ignore-output"]
predict("07.ratio", "8 ranks, 64 tokens on each. How many times as many pairs does the last rank compute as the first?",
        choices=["8 times", "a little less than 15 times", "16 times", "64 times"])

# %%
def totals(layout):
    """The visible pairs of every rank."""
    return [sum(int(mask(layout, rank, origin).sum()) for origin in range(layout.P)) for rank in range(layout.P)]


each = totals(contiguous(8 * 64, 8))
print("pairs, rank 0 to 7:", each)
times = each[-1] / each[0]
compare("07.ratio", "a little less than 15 times" if 14.5 < times < 15 else f"{times:.1f} times")
print(f"exactly {times:.2f}")

# %% [markdown]
# **14.8.** Often one reads 2P, which would be 16. Count it: with c tokens on a rank, the first computes its triangle,
# c(c + 1)/2, and the last the same triangle plus P − 1 squares of c².
#
# $$\frac{c(c+1)/2 + (P-1)\,c^2}{c(c+1)/2} = 1 + 2(P-1)\,\frac{c}{c+1} \;\to\; 2P - 1$$

# %%
def ratio(c, P):
    """Last rank over first."""
    return 1 + 2 * (P - 1) * c / (c + 1)


print("formula, c = 64:", round(ratio(64, 8), 1))
for c in (1, 8, 64, 4096):
    counted = f"{totals(contiguous(8 * c, 8))[-1] / totals(contiguous(8 * c, 8))[0]:.4f}" if c <= 64 else "not counted"
    print(f"{c:5} tokens per rank: {ratio(c, 8):8.4f}  by masks: {counted}")

# %% [markdown]
# It begins at P and tends to 2P − 1 = 15 from below. To get 2P one has to give the last rank its own block whole, and the
# first one only half of its own.
#
# ## 2 · Half the work
#
# Now let it run. A rank must not compute what is hidden. For that the package looks at two shards and lists *tiles*, rows
# × keys: a tile is either seen whole or, with `causal=True`, a square in which row i sees keys 0 to i.

# %%
for origin in range(4):
    print(f"rank 2, block of rank {origin}:", tiles(small, 2, origin))

# %% [markdown]
# Full, full, causal, nothing. The attention inside needs no mask at all, just one bit:

# %%
def attend(q, k, v, causal):
    """Attention of some rows on some keys, as a Partial (out, lse)."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    lse = scores.logsumexp(-1)
    return Partial(torch.exp(scores - lse[..., None]) @ v, lse)


def attend_tiles(state, q, k, v, todo):
    """Merge the tiles of this block into the state."""
    for tile in todo:
        part = attend(q[..., tile.rows, :], k[..., tile.keys, :], v[..., tile.keys, :], tile.causal)
        merge_into(state, tile.rows, part)

# %% [markdown]
# The ring around it is that of lesson 05: post the block, compute, wait. Only `todo` is new. With no tile there is nothing to
# compute, and **the exchange happens all the same**.

# %%
def tile_ring(ring, layout, whole, causal=True):
    """This rank's rows of attention."""
    q, k, v = layout.shard(whole, ring.rank)
    state = Partial.identity(q)
    for step in range(ring.world_size):
        origin = ring.origin(step)
        due = layout.length(ring.origin(step + 1))
        exchange = ring.post(k, v, length=due) if step < ring.world_size - 1 else None
        ring.compute(f"attend {step}", attend_tiles, state, q, k, v, tiles(layout, ring.rank, origin, causal))
        if exchange:
            k, v = exchange.wait()
    return state.out

# %% [markdown]
# To see time we need a clock. The virtual cluster has one, and lets us say what things cost: here **one second for each
# pair that is computed**, and a message takes no time once both ranks take part. What follows is therefore about waiting
# alone; whether hops hide was lesson 06.

# %%
class ByPairs(Costs):
    """A virtual second per pair, times what `slow` says of a rank; messages cost nothing."""

    def __init__(self, slow=None):
        self.slow = slow or {}

    def compute(self, rank, label, args):
        return self.slow.get(rank, 1) * sum(tile.scores for tile in args[-1])

    def message(self, source, to, nbytes):
        return 0.0


def run(layout, causal=True, slow=None):
    """The outcome on real text, and when the last rank was done."""
    text = corpus.qkv(layout.S, heads=1, head_dim=16)
    outcome = VirtualCluster(layout.P, costs=ByPairs(slow)).run(tile_ring, layout, text, causal)
    return outcome, max(event.end for event in outcome.trace.computes())

# %%
unmasked, before = run(small, causal=False)
print("unmasked: done after", before, "s; pairs computed:", 4 * 4 * 8 * 8)
print("causal: pairs visible:", pairs.sum(), f"= {pairs.sum() / 1024:.1%}")

# %% [markdown]
# Unmasked, every rank computes 64 pairs in each of 4 steps: 256 seconds. The causal ring has 51.6% of those pairs. And in how many
# steps can a rank skip its block altogether?

# %%
for step in range(4):
    idle = [rank for rank in range(4) if not tiles(small, rank, (rank - step) % 4)]
    print(f"step {step}: {len(idle)} of 4 ranks skip", idle)

# %% [markdown]
# Over the last rounds half of the blocks and more are skipped. A claim in circulation goes on: "so it takes half the time".

# %% tags=["nbval-ignore-output"]
predict("07.time", "4 ranks, 8 tokens each: the causal ring takes what percentage of the unmasked ring's time?", unit="%")

# %%
causal, after = run(small)
text = corpus.qkv(32, heads=1, head_dim=16)
error = np.abs(small.unshard(causal.results).numpy() - oracle.attention(*text, causal=True).out).max()
print("equal to causal attention on one device:", bool(error < 1e-5))
print("done after", after, "s")
compare("07.time", 100 * after / before)

# %% [markdown]
# Half the work, **89% of the time**. Look where it went:

# %%
show(gantt.compare([unmasked.trace, causal.trace], ["Unmasked", "Causal, contiguous"]),
     gantt.describe_all([unmasked.trace, causal.trace], ["Unmasked", "Causal, contiguous"]))

# %% [markdown]
# Blue bars compute, hatched ones wait for a message. An orange line is a message from posted to complete; as messages are free here,
# what makes it long is a rank that does not take part yet. Rank 0 computes for 36 seconds. Then it
# waits, though it has nothing left to compute, as the blocks for others have to go through its hands; then it is done. But *done* is no
# holiday: the layer's output is complete when rank 3's is, and the next layer begins then. Skipping saved energy on three
# ranks and no time, because **rank 3 never skips**.

# %% [markdown]
# ## 3 · The slowest rank, in every step
#
# Sort the mosaic by step instead of by owner, and it becomes a timetable. Press Play, or put the focus on the slider and use the
# arrow keys, to the last step.

# %%
load_mosaic.play(small)

# %% [markdown]
# Each column is a step; an orange outline marks the slowest rank, where others wait for it. The bottom row is what the step costs,
# and its sum is the time. From the plan alone, without a run:

# %%
def per_step(layout, causal=True):
    """Pairs [rank, step]."""
    P = layout.P
    return np.array([[work(layout, rank, (rank - step) % P, causal) for step in range(P)] for rank in range(P)])


table = per_step(small)
print("slowest in each step:", table.max(axis=0), "sum", table.max(axis=0).sum())
print("an even split:", table.sum() / 4, f"  so {table.max(axis=0).sum() / (table.sum() / 4):.2f} times as long as need be")

# %% [markdown]
# **228 seconds, where 132 would do.** In general a contiguous causal ring costs a triangle and P − 1 squares,
# c(c + 1)/2 + (P − 1)c², against P·c² unmasked. For large c that is (P − ½)/P: the more ranks, the *less* the mask saves.

# %%
c = 4096
for P in (2, 4, 8, 64):
    time = (c * (c + 1) / 2 + (P - 1) * c * c) / (P * c * c)
    share = (P * c + 1) / (2 * P * c)
    print(f"P = {P:2}: {share:.1%} of the work, {time:.1%} of the time; (P − ½)/P = {(P - 0.5) / P:.1%}")

# %% [markdown]
# And how busy is everybody? Rank 0 first.

# %% tags=["nbval-ignore-output"]
predict("07.busy", "8 ranks, 64 tokens on each: for what percentage of the time does rank 0 compute?", unit="%")

# %%
wide, _ = run(contiguous(8 * 64, 8))
chart = gantt.chart(wide.trace)
show(gantt.figure(wide.trace, "8 ranks, 64 tokens each"), gantt.describe(wide.trace, "8 ranks, 64 tokens each"))
compare("07.busy", 100 * chart.busy(0) / chart.makespan)

# %%
c, P = 64, 8
visible, longest = P * c * (P * c + 1) / 2, c * (c + 1) / 2 + (P - 1) * c * c
print(f"all ranks together: {chart.busy_fraction:.1%} on the clock, {visible / (P * longest):.1%} by the formula")
print(f"that is the work of {P * chart.busy_fraction:.1f} ranks")
print(f"limits for large c: rank 0 {1 / (2 * P - 1):.1%}, all {P / (2 * P - 1):.1%}")

# %% [markdown]
# A staircase: you rent eight ranks and get the work of 4.3. Look at rank 0: it is idlest of all and leaves later than ranks 1 to 3,
# because it stands beside rank 7, which sends to it.
#
# For large c rank 0 computes 1/(2P − 1) of the time, all together
# P/(2P − 1), which tends to one half. Slow links are not to blame, since ours were free, nor is the kernel.
#
# Do real sizes behave like that? Lesson 06 had a simulator. `simulate` runs the package's own ring program on a clock that charges
# what hardware would: tiles of 128 × 128, latencies, bandwidths. `hardware("h100")` is a row of the package's table, `Attention` says
# how large a token is: here 32 heads on 8 K/V heads. Eight H100s, 65,536 tokens:

# %%
sizes = Attention(B=1, H=32, K=8, D=128, dtype="bfloat16", causal=True)
whole = Attention(B=1, H=32, K=8, D=128, dtype="bfloat16", causal=False)
h100, long = hardware("h100"), contiguous(65_536, 8)
masked, full = simulate(sizes, long, h100), simulate(whole, long, h100)
print(f"causal / unmasked: {masked.makespan_s / full.makespan_s:.1%}   (P − ½)/P = {7.5 / 8:.1%}")
print(f"ranks compute {masked.busy_fraction:.1%} of the time")

# %% [markdown]
# ## 4 · Idle is not slack
#
# Rank 0 of our small ring computes for 36 of 228 seconds. Suppose its machine slows down to a quarter of its speed. It then
# needs 144 seconds for its work, far less than 228.

# %% tags=["nbval-ignore-output"]
predict("07.slow", "Rank 0 takes four times as long for its 36 pairs, all others are as before. When is the ring done?",
        unit="s")

# %%
limping, end = run(small, slow={0: 4})
show(gantt.figure(limping.trace, "Rank 0 at a quarter of its speed"), gantt.describe(limping.trace, "Rank 0 slow"))
compare("07.slow", end)
print(f"{end - after:.0f} s later than before; rank 0 computes for {gantt.chart(limping.trace).busy(0):.0f} s")

# %% [markdown]
# **272**, 44 seconds later than before. Follow rank 3: in step 1 it sends to rank 0, and a send is over only when rank 0 takes
# part. Rank 0 begins step 1 after 144 seconds, so rank 3 begins step 2 then, not at 100. Rank 0's idle time comes *after* its
# work, and others need its exchanges *before*. A rank may lag behind its neighbours by one step, which is what posting first
# buys, and no more.

# %%
for factor in (2, 4):
    ends = [run(small, slow={rank: factor})[1] for rank in range(4)]
    print(f"one rank {factor} times as slow, rank 0 to 3: done after {ends} s")
brink = {factor: round(run(small, slow={0: factor})[1], 1) for factor in (2.7, 2.8, 2.9)}
print(f"rank 0, by factor: {brink}; 100/36 = {100 / 36:.2f}")
slowed = per_step(small) * np.array([[4], [1], [1], [1]])
print("rank 0 at a quarter, slowest in each step:", slowed.max(axis=0), "sum", slowed.max(axis=0).sum())

# %% [markdown]
# Rank 0 may be 2.7 times as slow and hurts nobody: it then begins step 1 just before second 100, when rank 3 wants to begin step 2.
# A slow rank 3 costs its full factor.
#
# Note the last line: adding up the slowest rank of every step gives 336 seconds, and the ring took 272. The sum is right if in every
# step all wait for all. Really only neighbours wait for each other: while rank 0 was busy with step 0 until second 144, rank 3
# had done step 0 by second 36 and step 1 by second 100, and had to wait only then. Part of rank 0's delay lay beside work of others. So the sum
# is an upper bound. It is met where one rank is slowest in every step, or ties, as in section 3. In the exercise you compute the
# exact time of any table.
#
# Could rank 0 at least go home when it has nothing more to see? Try it.

# %%
def hasty_ring(ring, layout, whole):
    """Leaves as soon as the next blocks lie in the future."""
    _, k, v = layout.shard(whole, ring.rank)
    for step in range(ring.world_size - 1):
        if not tiles(layout, ring.rank, ring.origin(step)):
            return step
        k, v = ring.shift(k, v)
    return step


try:
    VirtualCluster(4).run(hasty_ring, small, text)
except DeadlockError as error:
    for line in str(error).splitlines():
        print(line if len(line) < 96 else line[:95] + "…")

# %% [markdown]
# Rank 0 has left and the block that others need is stuck on the way. **Nothing to compute is no reason not to pass on.**
#
# ## 5 · Any layout: four kinds of tile
#
# The imbalance is the contiguous layout's. Nobody says that a rank must own neighbours. Take *striped*: rank r owns tokens r,
# r + 4, r + 8, … Begin with 8 tokens, two on each rank: rank 0 has queries 0 and 4, and the block of rank 2 comes by, keys
# 2 and 6.

# %% tags=["nbval-ignore-output"]
predict("07.stripes", "Queries 0 and 4, keys 2 and 6: how many of the four pairs are visible?",
        choices=["0", "1", "2", "3", "4"])

# %%
print(mask(striped(8, 4), 0, 2).astype(int))
compare("07.stripes", str(mask(striped(8, 4), 0, 2).sum()))

# %% [markdown]
# **One.** Query 4 sees key 2 and not key 6: 4 ≥ 2, but 4 < 6. Nor does a query see a key because its rank is
# larger, or because its row in the shard is. Larger stripes show the pattern:

# %%
stripes = striped(16, 4)
for rank, origin in ((2, 1), (1, 2)):
    print(f"queries {stripes.positions(rank)}, keys {stripes.positions(origin)}")
    print(mask(stripes, rank, origin).astype(int))

# %% [markdown]
# The first is a plain triangle, the lower one. In the second each query stands just *before* the key of the same row: row 0 sees nothing, row 1
# sees key 0. That is **causal shifted by one**: the triangle of rows 1, 2, 3 with keys 0, 1, 2. No new kernel is needed, just
# two slices:

# %%
print("rank 2, block of 1:", tiles(stripes, 2, 1))
print("rank 1, block of 2:", tiles(stripes, 1, 2))
shifted, triangle = mask(stripes, 1, 2), np.tri(3, dtype=bool)
print("the slices show a triangle:", bool((shifted[1:, :-1] == triangle).all()))
print("and nothing lies outside of it:", bool(shifted.sum() == triangle.sum()))

# %% [markdown]
# This is no luck. A layout keeps a rank's tokens as a few *runs* `(start, step, length)`, all of one step. Row i of a run of
# queries sees key j where start_k + step·j ≤ start_q + step·i. Divide by the step: j ≤ i + d, with
# d = ⌊(start_q − start_k)/step⌋. One number, **the same for all rows**, says how two runs meet. Take keys 2, 6, 10, 14:

# %%
keys = Run(start=2, step=4, length=4)
for queries in (Run(2, 4, 4), Run(1, 4, 4), Run(10, 4, 4)):
    d = (queries.start - keys.start) // 4
    seen = (queries.positions[:, None] >= keys.positions).sum(axis=1)
    print(f"queries {queries.positions}: d = {d:2}, the rows see the first {seen} keys")

# %% [markdown]
# - **d = 0**: row i sees keys 0 to i. Causal.
# - **d = −1**: every row sees one key less, and row 0 nothing. Shifted by one. (Floor division matters: −1/4 gives −1.)
# - **d = +2**: every row sees two keys more, but there are only four. That is neither causal nor full, and takes three tiles: rows 0 and 1
#   with keys 0 and 1, full; the same rows with keys 2 and 3, a triangle; rows 2 and 3 with all keys, full.
#
# Layouts that are *dealt*, as all published ones are, never show the third. Between two of their runs there is nothing to see, or
# everything, or d = 0, or d = −1. (Where one run is longer, whole rows or keys are left over beside the triangle: one more full tile.)
# Runs that somebody cut by hand may have any d, and the exercise asks for those too. Do tiles equal masks everywhere? We ask
# many dealt layouts, lengths that do not divide included.

# %%
def covered(layout, rank, origin):
    """How often the tiles see each pair."""
    times = np.zeros((layout.length(rank), layout.length(origin)), int)
    for tile in tiles(layout, rank, origin):
        block = times[tile.rows, tile.keys]
        block += np.tri(*block.shape, dtype=int) if tile.causal else 1
    return times


def kind(q, k):
    """What a run of queries is to a run of keys."""
    d = (q.start - k.start) // q.step
    if d <= -q.length or d >= k.length - 1:
        return "skip" if d < 0 else "full"
    return {0: "causal", -1: "shifted"}.get(d, "something else")

# %%
checked, kinds = 0, Counter()
for S, P in product((7, 16, 24, 37), (2, 3, 4, 8)):
    for chunk, folded in product((1, 2, 3, -(-S // P)), (False, True)):
        layout = dealt(S, P, chunk=chunk, folded=folded)
        for rank, origin in np.ndindex(P, P):
            assert (covered(layout, rank, origin) == mask(layout, rank, origin)).all()
            kinds += Counter(kind(q, k) for q in layout.runs(rank) for k in layout.runs(origin))
            checked += 1
print(f"{checked:,} pairs of shards: tiles and masks agree, every visible pair once")
print("pairs of runs:", dict(sorted(kinds.items())))

# %% [markdown]
# Four kinds, and nothing else, as long as layouts are dealt. And as the tiles show what the masks show, a ring that computes by tiles is right on *any* layout. Even on one without sense: let chance deal the tokens.

# %%
owner = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 8))
ranks = [[Run(int(token), 1, 1) for token in np.flatnonzero(owner == rank)] for rank in range(4)]
chance = Layout(32, 4, "by chance", tuple(map(tuple, ranks)))
outcome, end = run(chance)
error = np.abs(chance.unshard(outcome.results).numpy() - oracle.attention(*text, causal=True).out).max()
print("right:", bool(error < 1e-5), "  done after", end, "s")

# %%
for layout in (small, chance, striped(32, 4), zigzag(32, 4)):
    count = sum(len(tiles(layout, rank, origin)) for rank, origin in np.ndindex(4, 4))
    print(f"{layout.name:10} done after {run(layout)[1]:.0f} s, {count:2} tiles")

# %% [markdown]
# Dealing by chance beats contiguous shards by far: everybody gets early and late tokens. But look at the tiles. Each is a launch
# and a merge, and tiles this small keep no kernel busy. The last two rows have both, little waiting and few tiles.
#
# So this is what an ideal layout has to do: in **every step** give **every rank** the same work, with few runs, all of one
# step. How striped and zig-zag do that, and which of them still does when a kernel computes whole tiles of 128 × 128, is
# lesson 08.

# %%
show(load_mosaic.figure([small, chance, zigzag(32, 4)]), load_mosaic.describe([small, chance, zigzag(32, 4)]))

# %% [markdown]
# ## Recap
#
# - A mask compares global positions. Contiguous shards make it whole blocks, triangles, and nothing.
# - Last rank over first: 1 + 2(P − 1)c/(c + 1), at most 2P − 1.
# - The last rank never skips. A contiguous causal ring takes (P − ½)/P of the unmasked time for half the work.
# - Count the slowest rank of every step; totals per rank hide who waits. Idle time is no slack: neighbours need your
#   exchanges on time, and in any case need them.
# - d = ⌊(start_q − start_k)/step⌋ says how two runs of one step meet. In dealt layouts they are skip, full, causal or causal shifted by
#   one; runs cut anywhere have any shift. In all cases one bit, `causal`, is all a kernel needs.
#
# ## Self-check
#
# 1. 16 ranks, many tokens: what is the busiest rank's work over the idlest's? *(2 · 16 − 1 = 31.)*
# 2. A colleague skips hidden blocks and sees no speed-up on 8 ranks. Bug? *(No: 7.5/8 of the time is all there is to see.)*
# 3. Queries 5, 9, 13 meet keys 6, 10, 14. Which rows and keys make the triangle? *(Rows 1, 2 with keys 0, 1: shifted.)*
# 4. In our ring of four, rank 0 computes for 36 of 228 seconds. How much slower may its machine be before anybody notices?
#    *(100/36 = 2.8 times, not 228/36 = 6.3: rank 3 needs its part in step 1 at second 100.)*
#
# Now build it: [exercise 07](../exercises/07_causal_imbalance.ipynb), counts without masks, tiles, the ring on any layout, and
# who waits.
