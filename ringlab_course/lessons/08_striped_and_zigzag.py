# %% [markdown]
# # 08 · Striped and zig-zag
#
# **Afterwards you can** build the published layouts as one family, say what each of them costs, at the size of the tiles
# that a kernel really computes, and share out packed documents.
#
# **You need first** [lesson 05](05_emulated_ring.ipynb), the ring, and [lesson 07](07_causal_imbalance.ipynb), why a
# contiguous causal ring keeps everybody waiting for its last rank.
#
# **Minutes** 60 to read and run; the exercise takes another 75.
#
# Lesson 07 ended with a wish: in **every step** the same work for **every rank**, and the tokens kept as few runs, all of one
# step. A rank need not own *neighbouring* tokens, for masks compare global positions; even tokens dealt by chance kept the
# ranks busy, if in useless crumbs. So let us deal tokens like cards, but by a rule.

# %%
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ringlab import Layout, Run, VirtualCluster, contiguous, dealt, ring_attention, striped, zigzag
from ringlab.cost.flops import imbalance, layout_work
from ringlab.cost.hardware import hardware
from ringlab.cost.models import model
from ringlab.cost.papers import STRIPED_TILE_GPU, STRIPED_WEIGHT_GPU, striped_bracket, striped_speedup
from ringlab.cost.simulate import simulate
from ringlab.cost.sizes import Attention
from ringlab_course import compare, corpus, predict
from ringlab.plan import tiles
from ringlab.viz import gantt
from ringlab_course.figures import layout_view
from ringlab_course.figures import load_mosaic
from ringlab_course.figures.layout_tiles import PARTIAL, SKIP, tiles_of
from ringlab.viz.style import BLUE, INK, ORANGE, WIDE, new_figure, show, styled

# %% [markdown]
# ## 1 · One way of dealing, four layouts
#
# Cut the sequence into pieces of `chunk` tokens and deal them, one to each rank, turn after turn.

# %%
def round_robin(S, P, chunk):
    """The tokens of every rank."""
    shares = [[] for _ in range(P)]
    for piece, start in enumerate(range(0, S, chunk)):
        shares[piece % P] += range(start, min(start + chunk, S))
    return shares


print(*round_robin(16, 4, chunk=1))

# %% [markdown]
# *Folded* means that every other turn runs backwards, as a farmer ploughs: whoever got the earliest piece of one turn gets
# the latest of the next. The package's `dealt` deals both ways; in the exercise you write it.

# %%
def shares(layout):
    """The tokens of every rank."""
    return [sorted(layout.positions(rank).tolist()) for rank in range(layout.P)]


def owners(layout):
    """A digit for each token: the rank that owns it."""
    owner = {token: rank for rank, mine in enumerate(shares(layout)) for token in mine}
    return "".join(str(owner[token]) for token in sorted(owner))


family = {"contiguous": (4, False), "striped": (1, False), "zig-zag": (2, True), "token fold": (1, True)}
for name, (chunk, folded) in family.items():
    print(f"{name:11} chunk={chunk}, folded={folded!s:5}  {owners(dealt(16, 4, chunk=chunk, folded=folded))}")
print("token fold:", *shares(dealt(16, 4, chunk=1, folded=True)))

# %% [markdown]
# Two numbers, and all four are there. *Contiguous* is dealing with pieces so large, S/P, that one turn is enough. *Striped*
# deals single tokens (arXiv 2311.09431). *Zig-zag*, with which Llama 3 was trained (arXiv 2407.21783, section 3.3.2), cuts
# 2P pieces and folds once, so that rank r gets pieces r and 2P − 1 − r: head with tail. The *token fold* folds single
# tokens; rank 0 owns tokens 0, 7, 8 and 15.
#
# Nothing has to divide: the last piece is shorter, and the last turn may end early.

# %%
checked = 0
for S in range(30):
    for P, chunk in ((1, 3), (2, 1), (3, 2), (4, 5), (8, 1), (8, 3)):
        assert shares(dealt(S, P, chunk=chunk)) == round_robin(S, P, chunk)
        checked += 1
print(checked, "layouts: round_robin and ringlab.dealt give every rank the same tokens")
print("10 tokens, zig-zag on 4 ranks:", *shares(zigzag(10, 4)))

# %% [markdown]
# ## 2 · Balance, by tokens
#
# The work of a step is the number of visible pairs, and a step lasts as long as its slowest rank. So a layout costs the
# *sum over steps of the maximum over ranks*. Ideal would be all visible pairs divided by P.

# %%
def seen(queries, keys):
    """Visible pairs: keys at or before the query."""
    return sum(key <= query for query in queries for key in keys)


def by_step(layout):
    """Visible pairs [rank, step]."""
    P, mine = layout.P, shares(layout)
    return np.array([[seen(mine[rank], mine[(rank - step) % P]) for step in range(P)] for rank in range(P)])


def told(layout):
    """The table, the slowest rank of each step, and what they add up to."""
    slowest = by_step(layout).max(axis=0)
    print(f"{by_step(layout)}\nslowest rank of each step: {slowest}, sum {slowest.sum()}; ideal: {32 * 33 // 2 // 4}")


told(contiguous(32, 4))

# %% [markdown]
# A row for each rank, a column for each step, as in lesson 07. 228, where 132 would do: 96 too many. Now stripe: every rank
# gets early and late tokens alike.

# %% tags=["nbval-ignore-output"]
predict("08.striped", "4 ranks, 32 tokens. Contiguous costs 96 pairs more than the ideal, 132. How many more does "
        "striped cost?", unit="pairs")

# %%
told(striped(32, 4))
compare("08.striped", by_step(striped(32, 4)).max(axis=0).sum() - 32 * 33 // 2 // 4)

# %% [markdown]
# **144.** Close to ideal, and not ideal. Take two stripes: where the queries' stripe begins at or after the keys', row i
# sees keys 0 … i; where it begins earlier, row i does not see key i. So a rank computes 36 pairs or 28, and in every step
# *somebody* has 36. The two differ by a diagonal, 8 pairs, which matters less and less as shards grow. Now fold:

# %%
picture = [contiguous(32, 4), striped(32, 4), zigzag(32, 4)]
assert all((layout_work(layout) == by_step(layout)).all() for layout in picture)
show(load_mosaic.figure(picture), load_mosaic.describe(picture))

# %% [markdown]
# The last row is what each step costs everybody. The zig-zag's ranks agree in *every* step. In the first each meets its
# own two pieces: two triangles and a square. Afterwards a rank always computes exactly two of the four meetings of
# pieces, both of them whole squares: either both its pieces see the visitor's early one, or its late piece sees both of
# the visitor's. From now on we take `layout_work` from the package; the assertion shows that it is our `by_step`.
#
# "A fold balances exactly", one reads. Count the pairs of a token fold of 12 tokens on 4 ranks, all steps together: where
# even the totals differ, the steps cannot be even.

# %% tags=["nbval-ignore-output"]
predict("08.fold", "12 tokens, 4 ranks, token fold: by how many pairs, in all, do the busiest and the idlest rank differ?",
        unit="pairs")

# %%
odd = dealt(12, 4, chunk=1, folded=True)
totals = [sum(token + 1 for token in mine) for mine in shares(odd)]
print(owners(odd), totals)
compare("08.fold", max(totals) - min(totals))

# %% [markdown]
# Three turns: the first two cancel, the third is a plain deal that nobody folds back. It is exact only where turns come
# in pairs.
#
# ## 3 · Balance, by tiles
#
# A kernel does not compute pairs. It cuts the rows and keys that it is given into *tiles*, say 128 × 128 scores: it skips a
# tile in which nothing is visible, and computes any other wholly, to mask it afterwards. (In this lesson a tile is always
# such a square. The rectangles that `ringlab.plan.tiles` lists come in section 4, as *launches*.)
#
# "Striping balances" is true of tokens. Take 2,048 tokens on 8 ranks. A rank's 256 queries meet all 2,048 keys: 2 × 16 = 32
# tiles. Half of them, 50 %, would be ideal.

# %% tags=["nbval-ignore-output"]
predict("08.tiles", "2,048 tokens, 8 ranks, tiles of 128: how many percent of its 32 tiles does a striped rank compute?",
        unit="%")

# %% [markdown]
# First in small: 64 tokens on 4 ranks, tiles of 4 × 4. Above, who owns what. Below, all scores, with each rank's queries
# and keys in the order in which it keeps them. Colours are ranks; greys are tiles.

# %%
layouts = [contiguous(64, 4), striped(64, 4), zigzag(64, 4)]
show(layout_view.figure(layouts, tile=4), layout_view.describe(layouts, tile=4))

# %% [markdown]
# Look at the striped panel: **every pair of shards has a dark diagonal**, and every tile on it is computed for half its worth.
# The zig-zag has a diagonal only where a rank meets its own tokens, in step 0. All its other tiles are full
# or skipped. Now let the tile grow, with the slider: at 8 a shard is two tiles wide, as in the question above.

# %% tags=["nbval-ignore-output"]
layout_view.play(tiles=(4, 8, 16))

# %%
def share_computed(layout, tile):
    """Percent of a rank's tiles that the slowest rank computes, step by step."""
    work = layout_work(layout, tile=(tile, tile))
    return 100 * work.max(0).sum() / (layout.S**2 / layout.P)


for layout in (contiguous(2048, 8), striped(2048, 8), zigzag(2048, 8)):
    print(f"{layout.name:11} {share_computed(layout, 128):.0f} % of its tiles")
compare("08.tiles", share_computed(striped(2048, 8), 128))

# %% [markdown]
# **Three quarters.** Two tiles a side make four: three are touched by the diagonal or lie below it. Are the ranks out of
# balance then? Not at all. From here on we take more tokens, 32,768 on 8 ranks. A shard is then 32 tiles wide, and a
# diagonal weighs less:

# %%
S, P, TILE = 32_768, 8, (128, 128)
print("32,768 tokens on 8 ranks       busiest/mean in all   cost/ideal")
for layout in (contiguous(S, P), striped(S, P), zigzag(S, P)):
    total = layout_work(layout, tile=TILE).sum(1)
    cost = imbalance(layout_work(layout, tile=TILE), layout)
    print(f"{layout.name:30} {total.max() / total.mean():19.3f} {cost:12.3f}")

# %% [markdown]
# Here is the misconception in two columns. Striped ranks are *perfectly even*, 1.000, and all of them compute 3.1 % too
# much, against the zig-zag's 0.4 %. **Even is not the same as little**: an even spread of half-empty tiles is still
# waste. So measure against the ideal, not against the mean.
#
# Some say that a token-level layout "defeats" tile skipping. It does not: nearly half of the tiles are skipped. It leaves
# more tiles *masked*. (The count below takes S and the tile 16 times smaller, which leaves the tiles as they are.)

# %%
for layout in (striped(2048, 8), zigzag(2048, 8)):
    kinds = tiles_of(layout, tile=8).kinds
    print(f"{layout.name}: {(kinds == SKIP).mean():.0%} of the tiles skipped; "
          f"of the computed ones {(kinds == PARTIAL).sum() / (kinds != SKIP).sum():.1%} are masked")

# %% [markdown]
# Since all four layouts are one family, we can turn the dial: from single tokens to one piece per rank. (`ascending=True`
# lays the tiles over a rank's tokens in ascending order. Section 4 shows what another order does.)

# %%
chunks = [2**i for i in range(13)]
cost = {folded: [] for folded in (False, True)}
for folded in cost:
    for chunk in chunks:
        layout = dealt(S, P, chunk=chunk, folded=folded)
        cost[folded].append(imbalance(layout_work(layout, tile=TILE, ascending=True), layout))
print("round-robin", *(f"{x:.3f}" for x in cost[False]), "\nfolded     ", *(f"{x:.3f}" for x in cost[True]))

# %%
with styled():
    dial = new_figure(WIDE)
    ax = dial.subplots()
    for folded, colour, mark, size in ((False, ORANGE, "o", 11), (True, BLUE, "s", 6)):
        above = [100 * (x - 1) for x in cost[folded]]
        ax.plot(chunks, above, color=colour, marker=mark, ms=size, label="folded" if folded else "round-robin")
    ax.axvline(TILE[0], color=INK, linewidth=1, linestyle=":")
    ax.annotate("chunk = tile", (TILE[0], 40), (6, 0), textcoords="offset points")
    for name, x, y in (("striped", 1, 4.2), ("zig-zag", 1250, 0.5), ("contiguous", 900, 80)):
        ax.text(x, y, name, weight="bold")
    ax.set(xscale="log", yscale="log", xlabel="chunk (tokens)", ylabel="cost above ideal (%)",
           title="32,768 tokens, 8 ranks, tiles of 128", xticks=[], xticklabels=[])
    ax.set_xticks(chunks[::2], chunks[::2])
    ax.set_yticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
    ax.minorticks_off()
    ax.legend(loc="upper left")
show(dial, "Cost above ideal, in percent, against the chunk, both on logarithmic axes. Round-robin stays at 3.1 up to chunk "
     "128, the tile, and rises to 88 at 4,096. Folded is 3.1 below 128, drops to 0.4 from 128 to 2,048, the zig-zag, and "
     "ends at 88 as well, contiguous.")

# %% [markdown]
# Read it from the left.
#
# - **Below the tile's size** the fold buys nothing: it only reorders tokens inside tiles that are computed anyway.
# - **At 128** the pieces fill tiles, and half-empty ones become rare.
# - **Beyond, round-robin**: the waste turns into unevenness. In every step somebody has a diagonal of pieces more, and
#   larger pieces make it worse.
# - **Beyond, folded**: that cancels, and what is left are the diagonals of step 0. How often you fold does not matter; the
#   zig-zag is the end of the valley, with the fewest pieces.
# - **At the right end** a piece is a whole share, there is no second turn to fold, and we are back at contiguous. That is
#   what you get if you cut P pieces and not 2P.
#
# ## 4 · Runs and launches
#
# A kernel wants rows in memory and a simple mask, no list of positions. So a rank keeps its tokens as a few **runs**,
# `(start, step, length)`, one after the other. From lesson 07 you know what two runs of one step are to each other: nothing
# visible, everything, causal, or causal shifted by one. That holds for the whole family, so a kernel needs one flag, `causal`.

# %%
for name, (chunk, folded) in family.items():
    layout = dealt(32, 4, chunk=2 * chunk if chunk > 1 else 1, folded=folded)
    print(f"{name:11} rank 1:", *((run.start, run.step, run.length) for run in layout.runs(1)))

# %% [markdown]
# A contiguous or striped rank has one run, a zig-zag or fold rank two. `ringlab.plan.tiles` turns them into rectangles of
# rows × keys. Each of these is a **launch**: one call of the kernel, which cuts it into its tiles, and one merge. For the
# zig-zag:

# %%
for step in range(4):
    parts = tiles(zigzag(32, 4), 1, (1 - step) % 4)
    shown = [f"rows {t.q_start}–{t.q_stop - 1} × keys {t.k_start}–{t.k_stop - 1}{' causal' * t.causal}" for t in parts]
    print(f"rank 1, step {step}:", "; ".join(shown))

# %% [markdown]
# In step 0 a zig-zag shard meets itself, and since it ascends, the two triangles and the square are *one* causal
# launch. Every later step is one launch without any mask. That is why fast ring code is so short.
#
# In the valley of the picture, chunk 128 costs as little as the zig-zag. But a rank has 4,096 / 128 = 32 runs then, and two rectangles become
# one launch only where they touch.

# %% tags=["nbval-ignore-output"]
predict("08.launches", "32,768 tokens, 8 ranks. Rank 0 of a zig-zag makes 8 launches, one a step. How many with chunk 128, "
        "folded?", unit="launches")

# %%
members = {"striped": (1, False), "zig-zag": (2048, True), "folded, 512": (512, True), "folded, 128": (128, True),
           "token fold": (1, True)}
launches = {}
for name, (chunk, folded) in members.items():
    layout = dealt(S, P, chunk=chunk, folded=folded)
    launches[name] = sum(len(tiles(layout, 0, origin)) for origin in range(P))
    print(f"{name:11} {len(layout.runs(0)):2} runs, {launches[name]:3} launches, "
          f"cost/ideal {imbalance(layout_work(layout, tile=TILE), layout):.3f}")
compare("08.launches", launches["folded, 128"])

# %% [markdown]
# Each launch starts cold and has to be merged. Among all the equals of the valley it is the zig-zag that wins: one
# launch a step. Mind the token fold: here it costs 1.062, not 1.031 as in the picture. Its two runs are kept one after the other,
# and each *pair of runs* has a diagonal of half-empty tiles; the picture laid tiles over its tokens in ascending order. The
# order within a shard is part of a layout.

# %% [markdown]
# ## 5 · On the clock
#
# Pairs and tiles are a model of time. Lesson 06's simulator has a finer one: the real ring program on eight H100, with
# their links and the speed that kernels reach.

# %% tags=["nbval-ignore-output"]
predict("08.clock", "32,768 tokens on 8 H100: how many times faster than contiguous is the zig-zag?", unit="times")

# %%
runs_on = {layout.name: simulate(Attention(H=32, K=8, D=128), layout, hardware("h100"), tile=TILE)
           for layout in (contiguous(S, P), striped(S, P), zigzag(S, P))}
slowest = runs_on["contiguous"].makespan_s
for name, run in runs_on.items():
    print(f"{name:11} {1e3 * run.makespan_s:.2f} ms, {slowest / run.makespan_s:.2f} times as fast, "
          f"ranks compute {run.busy_fraction:.0%} of the time")
compare("08.clock", slowest / runs_on["zigzag"].makespan_s)

# %%
traces = {name: run.trace() for name, run in runs_on.items()}
show(gantt.compare(list(traces.values()), list(traces), ranks=[0, 2, 5, 7]), gantt.describe_all(traces.values(), traces))

# %% [markdown]
# Four of the eight ranks, each bar a step. Nothing is computed faster; the waiting is gone. Note the striped chart: no
# hatching at all, every rank is busy all the time, and it still ends after the zig-zag. Being busy is no proof of being
# useful.
#
# If even totals are what you are after, there is a simpler way, you may think: leave the stretches whole, and give the
# first rank more tokens, the last fewer, so that all have the same work in all. Visible pairs grow as the square, so cut
# at S · √(r / P).

# %% tags=["nbval-ignore-output"]
predict("08.totals", "Stretches of equal total work, on the same clock: how do they compare with contiguous?",
        ["slower", "the same, within 1 %", "faster"])

# %%
cuts = [round(S * (rank / P) ** 0.5) for rank in range(P + 1)]
equal = Layout(S, P, "equal work", tuple((Run(a, 1, b - a),) for a, b in pairwise(cuts)))
total = layout_work(equal, tile=TILE).sum(1)
run = simulate(Attention(H=32, K=8, D=128), equal, hardware("h100"), tile=TILE)
print(f"busiest over mean rank, all steps together: {total.max() / total.mean():.3f}")
print(f"{1e3 * run.makespan_s:.2f} ms, ranks compute {run.busy_fraction:.0%} of the time")
print(f"{slowest / run.makespan_s:.3f} times as fast as contiguous")
verdict = "slower" if run.makespan_s > 1.01 * slowest else "faster" if slowest > 1.01 * run.makespan_s else None
compare("08.totals", verdict or "the same, within 1 %")

# %% [markdown]
# Even totals, and *slower* than doing nothing, by a little. In every step another rank is the slow one, and all others need the block
# that it will pass on. (And memory is not even either.) A layout has to balance each step.
#
# > **Aside: a published puzzle** (arXiv 2311.09431). The Striped Attention paper computes how much striping can gain at
# > most, counting pairs. For a model of 1 billion parameters and 262,144 tokens on 4 A100 its Table 3 says 1.72; its runs
# > gained 1.41. Its kernels skip tiles of 2,048 × 4,096 (section 3.1). Here is its bound, and the same sum with those tiles.
# > `STRIPED_WEIGHT_GPU` is 2: its attention ran in TF32, at half the rate of the linear layers, so its FLOPs count twice.

# %%
BIG = STRIPED_TILE_GPU
for tokens in (16_384, 65_536, 262_144):
    gains = [striped_speedup(model("striped-1b"), 4, tokens, STRIPED_WEIGHT_GPU, tile) for tile in (None, BIG)]
    print(f"{tokens:7,} tokens, at most: {gains[0]:.2f} by pairs, {gains[1]:.2f} by tiles of {BIG}")
least, most = striped_bracket(model("striped-1b"), 4, 262_144, STRIPED_WEIGHT_GPU, BIG)
print(f"262,144 tokens, a training step by tiles: {least:.2f} to {most:.2f}")
for layout in (contiguous(16_384, 4), striped(16_384, 4), zigzag(16_384, 4)):
    count = layout_work(layout, tile=BIG) // (BIG[0] * BIG[1])
    print(f"16,384 tokens, {layout.name:10} {32 - count.sum():2} of 32 tiles skipped,",
          f"slowest rank of each step: {count.max(0)}")

# %% [markdown]
# > The bound by pairs is the paper's, to the digit. With tiles that large a shard of 16,384 / 4 tokens is two tiles, one below
# > the other. Contiguous and zig-zag skip some, but in every step, in every layout, some rank computes both of its tiles: so
# > nothing is gained. The range of the training step begins with a backward that does not skip, as in the code that was
# > published; what was measured lies in between.
#
# ## 6 · What it costs to reorder
#
# Does all this shuffling not cost traffic? Only once: the data loader hands each rank its tokens in the layout's order.
# From then on a transformer layer treats tokens one by one, except in attention, and attention needs positions, not order.

# %%
text = corpus.qkv(1024, heads=4, kv_heads=2, head_dim=32)


def program(ring, layout, whole):
    return ring_attention(*layout.shard(whole, ring.rank), ring=ring, layout=layout)


for layout in (contiguous(1024, 8), striped(1024, 8), zigzag(1024, 8), zigzag(1021, 8)):
    whole = tuple(x[:, :, : layout.S] for x in text)
    run = VirtualCluster(8).run(program, layout, whole)
    error = (layout.unshard(run.results) - scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)).abs().max()
    print(f"{layout!r:25} exact: {error < 1e-5}, rank 0 sends {run.trace.bytes_sent(0):,} bytes")

# %% [markdown]
# The same bytes in every layout, and no exchange that puts tokens back in between. The last line is ragged, 1,021 tokens:
# no padding, the last piece is just shorter.
#
# One thing does break, and silently: whatever else depends on *where* a token is. Rotary embeddings (RoPE) turn q and k
# by an angle that grows with the position. Give every rank the positions 0, 1, 2, … of its own shard:

# %%
def rope(x, positions):
    """Turn every pair of channels by an angle that grows with the position."""
    angle = positions[:, None] * 10_000.0 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1).flatten(-2)


torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 1024, 32) for _ in range(3))
right = torch.arange(1024)
local = torch.empty_like(right)
for rank in range(8):
    local[zigzag(1024, 8).positions(rank)] = torch.arange(128)
out, wrong = (scaled_dot_product_attention(rope(q, p), rope(k, p), v, is_causal=True) for p in (right, local))
print(f"local positions under zig-zag: relative error {(wrong - out).norm() / out.norm():.1f}")

# %% [markdown]
# No shape is wrong and no NaN appears; the model is just another one. Positions are global, always: lesson 14 shards a
# whole transformer by that rule.
#
# ## 7 · Outlook: packed documents
#
# Training batches pack several documents into one sequence, and no query looks into another document. One long triangle
# becomes many short ones. Does the zig-zag still balance?

# %%
documents, P_packed = (8, 32, 16, 8), 4


def busiest(layout, documents):
    """The busiest rank of each step, added up, over the mean; each document is causal by itself."""
    document, work = np.repeat(np.arange(len(documents)), documents), np.zeros((layout.P, layout.P))
    for rank, step in np.ndindex(work.shape):
        q, k = layout.positions(rank)[:, None], layout.positions((rank - step) % layout.P)
        work[rank, step] = ((q >= k) & (document[q] == document[k])).sum()
    return work.max(0).sum() / work.sum() * layout.P

# %% tags=["nbval-ignore-output"]
predict("08.packed", "Documents of 8, 32, 16 and 8 tokens on 4 ranks, zig-zag over all 64. The sum over steps of the busiest "
        "rank: how does it compare with contiguous?", ["better", "the same, within 1 %", "worse"])

# %%
folded_once, plain = (busiest(layout, documents) for layout in (zigzag(64, P_packed), contiguous(64, P_packed)))
print(f"busiest/mean: zig-zag {folded_once:.3f}, contiguous {plain:.3f}")
verdict = "worse" if folded_once > 1.01 * plain else "better" if plain > 1.01 * folded_once else None
compare("08.packed", verdict or "the same, within 1 %")

# %% [markdown]
# Worse than not dealing at all: rank 3 owns the middle of the sequence, and that is the late half of the longest document.
# What would you do? Fold each document by itself, surely. There are two ways to collect what comes out.
# *Document-major* writes the folded documents one after the other and gives each rank a quarter of that. *Two of each* gives
# each rank its two pieces **of every document**.

# %%
def fold_each(documents, P):
    """For each document the runs, head and tail, of every rank."""
    pairs, begin = [], 0
    for n in documents:
        c = n // (2 * P)
        pairs.append([(Run(begin + r * c, 1, c), Run(begin + (2 * P - 1 - r) * c, 1, c)) for r in range(P)])
        begin += n
    return pairs

# %%
def document_major(documents, P):
    stream = np.concatenate([run.positions for pairs in fold_each(documents, P) for pair in pairs for run in pair])
    shares = [tuple(Run(int(token), 1, 1) for token in part) for part in np.split(stream, P)]
    return Layout(sum(documents), P, "document-major", tuple(shares))


def two_of_each(documents, P):
    shares = [sum((pairs[rank] for pairs in fold_each(documents, P)), ()) for rank in range(P)]
    return Layout(sum(documents), P, "two of each", tuple(shares))

# %%
packed = [zigzag(64, P_packed), document_major(documents, P_packed), two_of_each(documents, P_packed), striped(64, P_packed)]
for layout in packed:
    print(f"{layout.name:15} busiest/mean {busiest(layout, documents):.3f}")

# %%
shown = [packed[3], packed[2]]
show(layout_view.figure(shown, tile=2, documents=documents), layout_view.describe(shown, tile=2, documents=documents))

# %% [markdown]
# (The captions compare the ranks' tiles in all; the cell above went step by step.) Folding documents by themselves is not
# enough: cut document-major, the folded pieces land on whoever comes next. Two pieces of *every* document are exact. And
# look who else does well: striping knows nothing of documents and is nearly even in each. Its price is the one you know, a
# diagonal in every pair of shards, dark in the picture: 1.30 scores computed for each visible one, where two of each needs
# 1.11. With longer documents:

# %%
for scale in (8, 64):
    longer = tuple(scale * n for n in documents)
    for layout in (zigzag(sum(longer), 4), striped(sum(longer), 4), two_of_each(longer, 4)):
        print(f"{sum(longer):5} tokens, {layout.name:11} busiest/mean {busiest(layout, longer):.3f}")

# %% [markdown]
# These lengths divide by 2P. Where they do not, some pieces are a token longer. In a long document that is nothing; in
# thousands of short ones it adds up, if it always meets the same ranks. In the exercise you see to it that it does not.
#
# ## Recap
#
# - One family: pieces of `chunk` tokens, dealt round-robin or folded. Contiguous, striped, zig-zag and token fold are
#   four points of it; lengths need not divide.
# - A layout costs the sum over steps of the slowest rank's work, against the ideal S (S + 1) / 2 / P. Even totals are not
#   enough, and even steps are not enough if all ranks waste alike.
# - By tokens striping is nearly ideal. By tiles it spreads masked tiles evenly over all ranks and steps; the zig-zag has
#   diagonals in step 0 only. The coarser the tiles, the more that matters.
# - Kept as runs of one step, any two mask each other in four ways, so a kernel needs one flag. Few runs are few launches.
# - Tokens are dealt once, by the data loader; traffic stays the same. Positions stay global.
# - Packed documents: two pieces of every document for every rank; what is left over goes round.
#
# ## Self-check
#
# 1. Somebody builds a zig-zag of P pieces, one fold. What is it? *(Contiguous: with P pieces there is one turn, and nothing
#    to fold back.)*
# 2. All ranks of a ring are busy 100 % of the time. May a better layout still be faster? *(Yes: masked halves of tiles are
#    work too.)*
# 3. Why does a chunk of 16 tokens gain nothing by folding, with tiles of 128? *(A tile of 128 rows then holds early and
#    late pieces alike; what the fold exchanges lies in tiles that are computed anyway.)*
# 4. A zig-zag model trains, and its loss is worse than on one device. What do you check first? *(That positions, for RoPE
#    and for the mask, are global.)*
#
# Now build it yourself: [exercise 08](../exercises/08_striped_and_zigzag.ipynb), dealing, runs, tiles, balance and packed
# documents of any length.
