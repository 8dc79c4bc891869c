# %% [markdown]
# # 07 · The causal imbalance
#
# **Afterwards you can** mask by global position on any layout, say what a pair of shards computes without building a mask,
# and show which rank waits for which, and for how long.
#
# **You need first** [lesson 05](05_emulated_ring.ipynb), the ring and, in its section 7, the causal mask.
#
# **Minutes** 60 to read and run, in two parts of 40 and 20; the exercise takes another 75.
#
# A causal mask hides almost half of all pairs of a query and a key. In lesson 05's ring, the last of four ranks computed
# almost six times as many pairs as the first. What does that cost in *time*? Part 1 measures who computes, who waits, and
# how long the ring takes. Part 2 leaves contiguous shards behind, and finds the work of any layout without building a mask.

# %%
import math
from collections import Counter
from itertools import product

import numpy as np
import torch

from ringlab import Layout, Run, VirtualCluster, contiguous, dealt, oracle, striped, zigzag
from ringlab.comm.virtual import Costs
from ringlab_course import compare, corpus, predict
from ringlab.merge import Partial, merge_into
from ringlab.plan import tiles, work
from ringlab.viz import gantt
from ringlab_course.figures import layout_view, load_mosaic
from ringlab.viz.style import INK, show

# %% [markdown]
# # Part 1 · Who computes, and who waits
#
# ## 1 · One mask, sixteen pieces
#
# We put 32 tokens on 4 ranks, contiguously: rank 0 owns the first eight tokens, rank 1 the next eight, and so on. A query
# sees the keys at or before its own position **in the sequence**. So the mask of two shards is one comparison of global
# positions, and its sum is the number of pairs that they compute.

# %%
def mask(layout, rank, origin):
    """True where a query of `rank` sees a key of `origin`."""
    return layout.positions(rank)[:, None] >= layout.positions(origin)[None, :]


small = contiguous(S=32, P=4)
pairs = np.array([[mask(small, rank, origin).sum() for origin in range(4)] for rank in range(4)])
print(pairs)
print("visible:", pairs.sum(), "of", 32 * 32)

# %% [markdown]
# The sixteen pieces of the big causal triangle are of three kinds: squares in which every pair is visible, 64; triangles on
# the diagonal, 36; and empty ones. The same as a mosaic, with one row for each rank's queries:

# %%
show(load_mosaic.figure(small, by="origin"),
     "Visible pairs of each rank's queries (row) and each rank's keys (column). Below the diagonal "
     f"64, on it 36, above it none. Totals of the ranks: {pairs.sum(axis=1).tolist()}.")

# %% [markdown]
# Rank 3 has the most to do, and the later half of the ranks does more than half of the work. How much more, on a larger ring?

# %% tags=["nbval-ignore-output"]
predict("07.half", "8 ranks with 64 tokens each: what percentage of all visible pairs do ranks 4 "
        "to 7 compute together?", unit="%")

# %%
def totals(layout):
    """The visible pairs of every rank."""
    P = layout.P
    return [sum(int(mask(layout, rank, origin).sum()) for origin in range(P)) for rank in range(P)]


each = totals(contiguous(8 * 64, 8))
print("pairs, rank 0 to 7:", each)
compare("07.half", 100 * sum(each[4:]) / sum(each))
print(f"last rank over first: {each[-1] / each[0]:.1f}")

# %% [markdown]
# **Three quarters.** The queries of the earlier half see only keys of the earlier half: a triangle of half the side, and
# so a quarter of the area. All the rest is left to ranks 4 to 7.
#
# The last rank computes **14.8 times** as many pairs as the first: a triangle and 7 squares, where the first has only the
# triangle. A square is nearly two triangles, so with many tokens the ratio approaches 1 + 2 · 7 = 15, or **2P − 1**.
#
# ## 2 · Half the work
#
# Now we run the ring. A rank should compute nothing that is hidden. So the package looks at two shards and lists *tiles* of
# rows × keys. Either every pair of a tile is visible, or the tile has `causal=True`: then it is a square in which row i sees
# keys 0 to i.

# %%
for origin in range(4):
    print(f"rank 2, block of rank {origin}:", tiles(small, 2, origin))

# %% [markdown]
# Full, full, causal, nothing. For such tiles attention needs no list of positions, only one bit, `causal`. (`tile.rows`
# and `tile.keys` are slices, and `merge_into` merges a Partial into these rows of the state.)

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
# The ring is that of lesson 05: post the block, compute, wait. Only the list of tiles is new. Where there is no tile, the rank
# computes nothing, but **it still takes part in the exchange**.

# %%
def tile_ring(ring, layout, whole, causal=True):
    """This rank's rows of attention."""
    q, k, v = layout.shard(whole, ring.rank)
    state = Partial.identity(q)
    for step in range(ring.world_size):
        origin = ring.origin(step)
        due = layout.length(ring.origin(step + 1))  # tokens of the block that arrives next
        exchange = ring.post(k, v, length=due) if step < ring.world_size - 1 else None
        todo = tiles(layout, ring.rank, origin, causal)
        ring.compute(f"attend {step}", attend_tiles, state, q, k, v, todo)
        if exchange:
            k, v = exchange.wait()
    return state.out

# %% [markdown]
# To see time we need a clock. The virtual cluster has one, and we decide what things cost: **one second for each pair that is
# computed**, and no time for a message. But a message is sent only when both of its ranks *take part*, that is, when both have
# posted their exchange of this step. So this lesson is about waiting alone.

# %%
class ByPairs(Costs):
    """A virtual second per pair, times a rank's factor in `slow`; messages cost nothing."""

    def __init__(self, slow=None):
        self.slow = slow or {}

    def compute(self, rank, label, args):
        return self.slow.get(rank, 1) * sum(tile.scores for tile in args[-1])

    def message(self, source, to, nbytes):
        return 0.0


def run(layout, causal=True, slow=None):
    """The outcome on real text, and the time at which the last rank was done."""
    text = corpus.qkv(layout.S, heads=1, head_dim=16)
    outcome = VirtualCluster(layout.P, costs=ByPairs(slow)).run(tile_ring, layout, text, causal)
    return outcome, max(event.end for event in outcome.trace.computes())

# %%
unmasked, before = run(small, causal=False)
print("unmasked: done after", before, "s; pairs computed:", 4 * 4 * 8 * 8)
print("causal: pairs visible:", pairs.sum(), f"= {pairs.sum() / 1024:.1%}")

# %% [markdown]
# Unmasked, every rank computes 64 pairs in each of 4 steps, which takes 256 seconds. The causal ring has 51.6% of those pairs.
# Which ranks can skip the block of a step altogether?

# %%
for step in range(4):
    idle = [rank for rank in range(4) if not tiles(small, rank, (rank - step) % 4)]
    print(f"step {step}: {len(idle)} of 4 ranks skip", idle)

# %% [markdown]
# In step 2 half of the ranks skip their block, in step 3 three of four do. Some texts conclude: "so it takes half the time".

# %% tags=["nbval-ignore-output"]
predict("07.time", "4 ranks with 8 tokens each: what percentage of the unmasked ring's time does "
        "the causal ring take?", unit="%")

# %%
causal, after = run(small)
text = corpus.qkv(32, heads=1, head_dim=16)
right = oracle.attention(*text, causal=True).out
error = np.abs(small.unshard(causal.results).numpy() - right).max()
print("equal to causal attention on one device:", bool(error < 1e-5))
print("done after", after, "s")
compare("07.time", 100 * after / before)

# %% [markdown]
# Half the work, **89% of the time**. Where did the rest of the time go?

# %%
both = [unmasked.trace, causal.trace], ["Unmasked", "Causal, contiguous"]
picture = gantt.compare(*both)
picture.axes[-1].set_xticks([0, 36, 100, 164, 228, 256])
show(picture, gantt.describe_all(*both))

# %% [markdown]
# In blue bars a rank computes. In hatched ones it waits until the ranks beside it have posted their exchange of the same
# step. The dashed line is the end of the run.
#
# At second 36 all ranks begin step 1 and post its exchange. For rank 0 this step is empty, so it goes on to step 2 at once.
# Its exchange of step 2 needs ranks 1 and 3, and they begin step 2 at second 100. So rank 0 waits until then, although it
# has nothing left to compute. After that it is done, but nothing is gained: the output of the layer is complete when rank 3
# is done, and only then does the next layer begin. Skipping saved energy on three ranks, and very little time, because
# **rank 3 never skips**.

# %% [markdown]
# ## 3 · The slowest rank of every step
#
# Sort the mosaic by step instead of by owner, and it becomes a timetable. Press Play, or move the slider with the arrow keys,
# up to the last step.

# %% tags=["nbval-ignore-output"]
load_mosaic.play(small)

# %% [markdown]
# Each column is a step. A heavy outline marks its busiest ranks. The bottom row is their work, and here its sum is the time
# of the whole ring (not always: section 4). All of this follows from the lists of tiles, without a run:

# %%
def per_step(layout, causal=True):
    """Pairs [rank, step]."""
    P = layout.P
    pairs = np.zeros((P, P), int)
    for rank, step in np.ndindex(P, P):
        pairs[rank, step] = work(layout, rank, (rank - step) % P, causal)
    return pairs


table = per_step(small)
slowest, even = table.max(axis=0), table.sum() / 4
print("slowest of each step:", slowest, "sum", slowest.sum())
times = slowest.sum() / even
print(f"an even split: {even}, so the ring takes {times:.2f} times as long as necessary")

# %% [markdown]
# **228 seconds, where 132 would be enough.** In general a contiguous causal ring with L tokens on a rank takes as long as a
# triangle and P − 1 squares, L(L + 1)/2 + (P − 1)L², and the unmasked ring as long as P squares, P·L². For large L the
# ratio is (P − ½)/P: with more ranks the mask saves *less* time.
#
# How busy are the ranks meanwhile?

# %% tags=["nbval-ignore-output"]
predict("07.busy", "8 ranks with 64 tokens each: for what percentage of the time does a rank "
        "compute, on average over all ranks?", unit="%")

# %%
wide, _ = run(contiguous(8 * 64, 8))
chart = gantt.chart(wide.trace)
name = "8 ranks, 64 tokens each"
picture = gantt.figure(wide.trace, name)
picture.axes[0].xaxis.set_major_formatter("{x:,.0f}")
show(picture, gantt.describe(wide.trace, name))
compare("07.busy", 100 * chart.busy_fraction)
print(f"together the ranks do the work of {8 * chart.busy_fraction:.1f}")
print(f"rank 0 computes for {chart.busy(0) / chart.makespan:.1%} of the time")

# %% [markdown]
# The chart is a staircase: you pay for eight ranks and get the work of 4.3. Rank 0 computes least, and yet it leaves the ring
# later than ranks 1 to 3. Rank 7 sends to it, and rank 7 is late.
#
# For large L, rank 0 computes for 1/(2P − 1) of the time, and all ranks together for P/(2P − 1), which approaches one half
# as P grows.

# %% [markdown]
# ## 4 · A slow machine
#
# Rank 0 of our small ring computes for 36 of 228 seconds. Suppose its machine slows down to a quarter of its speed. It then
# needs 144 seconds for its work, still far less than 228.

# %% tags=["nbval-ignore-output"]
predict("07.slow", "Rank 0 takes four times as long for its 36 pairs, the others as long as "
        "before. When is the ring done?", unit="s")

# %%
limping, end = run(small, slow={0: 4})
name = "Rank 0 at a quarter of its speed"
picture = gantt.figure(limping.trace, name)
picture.axes[0].axvline(after, color=INK, linewidth=1.2, linestyle=":")
picture.axes[0].text(after + 2, 0.45, "end before", fontsize=8.5)
show(picture, gantt.describe(limping.trace, name) + f" A dotted line at {after}: the end before.")
compare("07.slow", end)
busy = gantt.chart(limping.trace).busy(0)
print(f"{end - after:.0f} s later than before; rank 0 computes for {busy:.0f} s")

# %% [markdown]
# **272**, 44 seconds later than before. **Idle time is slack only until a neighbour needs the rank's exchange.** Follow
# rank 3. In step 1 it sends to rank 0, and a send is over only when the receiver takes part. Rank 0 begins step 1 after
# 144 seconds, so rank 3 begins step 2 then, and not at second 100. Rank 0's idle time comes *after* its work; its
# neighbours need its exchanges earlier, while it still works. Each rank posts before it computes. So a rank may fall
# behind by about one step of its neighbours before they notice.

# %%
for factor in (2, 4):
    ends = [run(small, slow={rank: factor})[1] for rank in range(4)]
    print(f"one rank {factor} times as slow, rank 0 to 3: done after {ends} s")
brink = {factor: round(run(small, slow={0: factor})[1], 1) for factor in (2.7, 2.8, 2.9)}
print(f"rank 0, by factor: {brink}; 100/36 = {100 / 36:.2f}")

# %% [markdown]
# If rank 0 is 2.7 times as slow, no other rank notices: rank 0 then begins step 1 just before second 100, when rank 3 wants to
# begin step 2. If rank 3 is slow, the whole ring is slow by the same factor.
#
# Does section 3's bottom row still give the time?

# %%
slowest = (per_step(small) * np.array([[4], [1], [1], [1]])).max(axis=0)
print("rank 0 at a quarter, slowest of each step:", slowest, "sum", slowest.sum())

# %% [markdown]
# The sum is 336 seconds, but the ring took 272. It would be right if all ranks waited for all in every step. In a ring
# only neighbours wait for each other: rank 3 waited only 44 seconds for rank 0, which was 108 seconds late. So the sum
# is an **upper bound**. It is reached if one rank is the slowest in every step, ties included, as rank 3 is in section
# 3.

# %% [markdown]
# ---
# **End of part 1. This is a good place to stop.** You can already solve stage 07.makespan of
# [the exercise](../exercises/07_causal_imbalance.ipynb), which rank waits for which. If you return in a fresh kernel, run all
# cells up to here first.
#
# ---

# %% [markdown]
# # Part 2 · Any layout
#
# ## 5 · Four ways in which two runs meet
#
# The imbalance comes from the contiguous layout, and nothing forces a rank to own neighbouring tokens. In the *striped*
# layout rank r owns tokens r, r + 4, r + 8, … Begin with 8 tokens, two on each rank. Rank 0 has queries 0 and 4, and the
# block of rank 2 arrives, keys 2 and 6:

# %%
print(mask(striped(8, 4), 0, 2).astype(int))

# %% [markdown]
# Query 4 sees key 2, but not key 6: 4 ≥ 2, and 4 < 6. Neither the number of the rank nor the row in the shard
# decides what a query sees. Longer stripes show the pattern:

# %%
stripes = striped(16, 4)
for rank, origin in ((2, 1), (1, 2)):
    print(f"queries {stripes.positions(rank)}, keys {stripes.positions(origin)}")
    print(mask(stripes, rank, origin).astype(int))

# %% [markdown]
# The first mask is a plain lower triangle. In the second, each query comes just *before* the key of the same row: row 0 sees
# nothing, row 1 sees key 0. This is **causal shifted by one**: the triangle of rows 1, 2, 3 with keys 0, 1, 2. It needs no
# new kernel, only two slices:

# %%
print("rank 2, block of 1:", tiles(stripes, 2, 1))
print("rank 1, block of 2:", tiles(stripes, 1, 2))
shifted, triangle = mask(stripes, 1, 2), np.tri(3, dtype=bool)
print("the slices show a triangle:", bool((shifted[1:, :-1] == triangle).all()))
print("nothing outside of it is visible:", bool(shifted.sum() == triangle.sum()))

# %% [markdown]
# This holds in general. A layout keeps a rank's tokens as a few *runs* `(start, step, length)`. This `step`, the
# *stride*, is the same in all runs, and is not a step of the ring. Row i of a run of queries sees key j of a run of
# keys if start_k + stride·j ≤ start_q + stride·i. Divide by the stride: j ≤ i + d, with d = ⌊(start_q −
# start_k)/stride⌋. This one number, **the same for all rows**, says how two runs meet. Take keys 10, 14, 18, 22. Thick
# lines are the tiles:

# %%
keys = Run(start=10, step=4, length=4)
queries = [Run(start, 4, 4) for start in (10, 9, 18, 2)]
show(layout_view.meetings(queries, keys), layout_view.describe_meetings(queries, keys))

# %% [markdown]
# With n_q rows and n_k keys, d says what to compute:
#
# - **d ≤ −n_q**: even the last row sees nothing. Skip. **d ≥ n_k − 1**: even row 0 sees all keys. Full.
# - **d = 0**: row i sees keys 0 to i. Causal.
# - **d = −1**: every row sees one key fewer, and row 0 sees nothing. Causal, shifted by one.
# - **Any other d**: a triangle again, shifted by more. If d is positive, rectangles lie beside and below it, three
#   tiles in all.
#
# The last case never occurs in layouts that are *dealt*, cut into pieces that go to the ranks in turns, like lesson 08's
# family. Runs cut by hand may have any d, and the exercise asks for those too. Which cases occur in many dealt layouts, also
# with lengths that do not divide? `chunk` is the length of a piece; `folded` deals every other turn backwards.

# %%
def kind(q, k):
    """How a run of queries meets a run of keys."""
    d = (q.start - k.start) // q.step
    if d <= -q.length or d >= k.length - 1:
        return "skip" if d < 0 else "full"
    return {0: "causal", -1: "shifted"}.get(d, "something else")


kinds = Counter()
for S, P in product((7, 16, 24, 37), (2, 3, 4, 8)):
    for chunk, folded in product((1, 2, 3, math.ceil(S / P)), (False, True)):
        layout = dealt(S, P, chunk=chunk, folded=folded)
        for rank, origin in np.ndindex(P, P):
            both = product(layout.runs(rank), layout.runs(origin))
            kinds += Counter(kind(q, k) for q, k in both)
print("pairs of runs:", dict(sorted(kinds.items())))

# %% [markdown]
# Four kinds, and no others.
#
# ## 6 · A ring on any layout
#
# Tiles cover the same pairs as masks, so a ring that computes by tiles is right on *any* layout. Try one in which the tokens
# are dealt at random.

# %% tags=["nbval-ignore-output"]
predict("07.random", "32 tokens dealt at random to 4 ranks: when is the ring done? "
        "(Contiguous: 228 s, an even split: 132 s)",
        ["later than 228 s", "nearer to 228 s", "nearer to 132 s"])

# %%
owner = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 8))
ranks = [[Run(int(token), 1, 1) for token in np.flatnonzero(owner == rank)] for rank in range(4)]
chance = Layout(32, 4, "random", tuple(map(tuple, ranks)))
outcome, end = run(chance)
error = np.abs(chance.unshard(outcome.results).numpy() - right).max()
print("right:", bool(error < 1e-5), "  done after", end, "s")
near = "nearer to 132 s" if end < (132 + 228) / 2 else "nearer to 228 s"
compare("07.random", near if end < 228 else "later than 228 s")

# %% [markdown]
# Beside the others, and the *zig-zag*, in which each rank gets an early and a late piece:

# %%
for layout in (small, chance, striped(32, 4)):
    count = sum(len(tiles(layout, rank, origin)) for rank, origin in np.ndindex(4, 4))
    print(f"{layout.name:10} done after {run(layout)[1]:.0f} s, {count:2} tiles")
print(f"zigzag     done after {run(zigzag(32, 4))[1]:.0f} s; its tiles are a question of lesson 08")

# %% [markdown]
# Random shards are far better than contiguous ones: every rank gets early and late tokens. But they have many tiles. Each tile
# is a launch of the kernel and a merge, and tiles this small leave most of the chip idle. Striped shards have both: little
# waiting and few tiles. The zig-zag waits even less.
#
# So a good layout gives **every rank** the same work in **every step**, with few runs, all of one stride. Lesson 08 shows how
# striped and zig-zag do that, and which of them still does when a kernel computes whole squares of 128 × 128.

# %%
three = [small, chance, zigzag(32, 4)]
show(load_mosaic.figure(three), load_mosaic.describe(three))

# %% [markdown]
# ## Recap
#
# - A mask compares global positions. Contiguous shards make it full blocks, triangles, and empty blocks.
# - The last rank computes almost 2P − 1 times as much as the first.
# - The last rank never skips. So a contiguous causal ring does half the work in (P − ½)/P of the unmasked time.
# - The slowest rank of every step, added up, is an upper bound of the time; totals per rank hide who waits. Idle time
#   is slack only until a neighbour needs the rank's exchange.
# - d = ⌊(start_q − start_k)/stride⌋ says how two runs of one stride meet. In dealt layouts that is skip, full, causal or causal
#   shifted by one; runs cut by hand have any shift. In all cases a kernel needs one bit, `causal`.
#
# ## Self-check
#
# <details><summary>1. 16 ranks, many tokens: how many times as much as the first rank does the last one
# compute?</summary>2 · 16 − 1 = 31 times.</details>
#
# <details><summary>2. A colleague skips hidden blocks on 8 ranks and sees hardly any speed-up. Is that a bug?</summary>No:
# a contiguous layout takes 7.5/8 of the unmasked time, so almost nothing can be gained.</details>
#
# <details><summary>3. Queries 5, 9, 13 meet keys 6, 10, 14. Which rows and keys make the triangle?</summary>Rows 1 and 2 with
# keys 0 and 1: causal shifted by one.</details>
#
# <details><summary>4. In our ring of four, rank 0 computes for 36 of 228 seconds. How much slower may its machine be before
# the ring takes longer?</summary>100/36 = 2.78 times, and not 228/36 = 6.3 times: rank 3 needs rank 0's part in step 1 at
# second 100.</details>
#
# Now build it: [exercise 07](../exercises/07_causal_imbalance.ipynb), counts without masks, tiles, the ring on any layout, and
# who waits.
