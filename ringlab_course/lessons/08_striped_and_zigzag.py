# %% [markdown]
# # 08 · Striped and zig-zag
#
# **Afterwards you can** build the published layouts as one family, say what each of them costs in pairs and in the tiles
# that a kernel computes, and deal packed documents.
#
# **You need first** [lesson 05](05_emulated_ring.ipynb), the ring, and [lesson 07](07_causal_imbalance.ipynb), why all
# ranks of a contiguous causal ring wait for the last one.
#
# **Minutes** 60 to read and run, in two parts of 40 and 20; the exercise takes another 75.
#
# Lesson 07 ended with a wish: the same work for **every rank** in **every step**. Two published layouts grant it,
# *striped* and *zig-zag*. Simulate both on the same machines with the same kernel: no rank waits for another's work, all
# compute 100 % of the time. And yet the zig-zag ends sooner. What do the striped ranks compute that nobody needs?
#
# Both deal tokens like cards, because a rank need not own *neighbouring* tokens: masks compare global positions. Four
# words go with that, from the hand that deals to the chip that computes:
#
# | word | what it is |
# |---|---|
# | piece | neighbouring tokens that are dealt together |
# | run | tokens at equal distances, which a rank stores one after the other |
# | launch | a rectangle of scores that one call of the kernel computes |
# | tile | a square of scores, the smallest part that the kernel computes or skips |

# %%
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ringlab import Layout, Run, VirtualCluster, contiguous, dealt, ring_attention, striped, zigzag
from ringlab.cost.flops import imbalance, layout_work
from ringlab.cost.hardware import hardware
from ringlab.cost.simulate import simulate
from ringlab.cost.sizes import Attention
from ringlab_course import compare, corpus, predict
from ringlab.plan import tiles as launches
from ringlab.viz import gantt
from ringlab_course.figures import layout_view
from ringlab_course.figures import load_mosaic
from ringlab.viz.style import INK, show

# %% [markdown]
# # Part 1 · One family of layouts
#
# ## 1 · One way of dealing, four layouts
#
# Cut the sequence into pieces of `chunk` tokens, and deal them in turns, one piece to each rank.

# %%
def round_robin(S, P, chunk):
    """The tokens of every rank."""
    shards = [[] for _ in range(P)]
    for piece, start in enumerate(range(0, S, chunk)):
        shards[piece % P] += range(start, min(start + chunk, S))
    return shards


print(*round_robin(16, 4, chunk=1))

# %% [markdown]
# *Folded* means that every other turn runs backwards: the rank with the earliest piece of one turn gets the latest piece of
# the next. The package's `dealt` deals both ways. In the exercise you write it yourself.

# %%
def shards(layout):
    """The tokens of every rank."""
    return [sorted(layout.positions(rank).tolist()) for rank in range(layout.P)]


def owners(layout):
    """A digit for each token: the rank that owns it."""
    owner = {token: rank for rank, mine in enumerate(shards(layout)) for token in mine}
    return "".join(str(owner[token]) for token in sorted(owner))


family = {"contiguous": (4, False), "striped": (1, False), "zig-zag": (2, True),
          "token fold": (1, True)}
for name, (chunk, folded) in family.items():
    layout = dealt(16, 4, chunk=chunk, folded=folded)
    print(f"{name:11} chunk={chunk}, folded={folded!s:5}  {owners(layout)}")
print("token fold:", *shards(dealt(16, 4, chunk=1, folded=True)))

# %% [markdown]
# Two parameters give all four layouts. In the *contiguous* layout pieces are so large, S/P tokens, that one turn is
# enough. *Striped* deals single tokens (arXiv 2311.09431). *Zig-zag*, with which Llama 3 was trained (arXiv 2407.21783,
# section 3.3.2), cuts 2P pieces and folds once, so that rank r gets pieces r and 2P − 1 − r, an early one and a late one.
# The *token fold* folds single tokens: rank 0 owns tokens 0, 7, 8 and 15.
#
# Any length will do: the last piece may be shorter, and the last turn may end early.

# %%
checked = 0
for S in range(30):
    for P, chunk in ((1, 3), (2, 1), (3, 2), (4, 5), (8, 1), (8, 3)):
        assert shards(dealt(S, P, chunk=chunk)) == round_robin(S, P, chunk)
        checked += 1
print(checked, "layouts: round_robin and ringlab.dealt give every rank the same tokens")

# %% [markdown]
# ## 2 · Balance, by tokens
#
# The work of a rank in a step is its number of visible pairs. As the **cost** of a layout we take the *sum over steps of
# the maximum over ranks*: the time of a ring in which all ranks wait for the slowest in every step. By lesson 07 it is an
# upper bound of the time; contiguous, striped and zig-zag shards reach it. Ideal would be all visible pairs divided by P.

# %%
def seen(queries, keys):
    """Visible pairs: keys at or before the query."""
    return sum(key <= query for query in queries for key in keys)


def by_step(layout):
    """Visible pairs [rank, step]."""
    P, mine = layout.P, shards(layout)
    work = np.zeros((P, P), int)
    for rank, step in np.ndindex(P, P):
        work[rank, step] = seen(mine[rank], mine[(rank - step) % P])
    return work


def show_steps(layout):
    """The table, the slowest rank of each step, and their sum."""
    slowest = by_step(layout).max(axis=0)
    print(by_step(layout))
    ideal = layout.S * (layout.S + 1) // 2 // layout.P
    print(f"slowest rank of each step: {slowest}, sum {slowest.sum()}; ideal: {ideal}")


show_steps(contiguous(64, 8))

# %% [markdown]
# Rows are ranks and columns steps, as in lesson 07. In a striped layout every rank gets early and late tokens alike.

# %% tags=["nbval-ignore-output"]
predict("08.striped", "8 ranks, 64 tokens. Contiguous costs 224 pairs more than the ideal, 260. "
        "How many more does striped cost?", unit="pairs")

# %%
show_steps(striped(64, 8))
compare("08.striped", by_step(striped(64, 8)).max(axis=0).sum() - 64 * 65 // 2 // 8)

# %% [markdown]
# **28 more, 288.** Take two stripes. If the queries' stripe begins at or after the keys', row i sees keys 0 to i. If it
# begins earlier, row i sees only keys 0 to i − 1. So a rank computes 36 pairs or 28, and in every step some rank computes
# 36. The difference is the diagonal, 8 pairs; longer shards feel it less. Now the fold, beside the others, with 32
# tokens on 4 ranks:

# %%
picture = [contiguous(32, 4), striped(32, 4), zigzag(32, 4)]
# The package counts the same pairs as by_step.
assert all((layout_work(layout) == by_step(layout)).all() for layout in picture)
show(load_mosaic.figure(picture), load_mosaic.describe(picture))

# %% [markdown]
# All ranks of the zig-zag have the same work in *every* step. In step 0 each rank meets its own two pieces: two triangles
# and a square. Afterwards it always computes two full squares. Let the *visitor* be the block that has arrived: either
# both of the rank's pieces see the visitor's early piece, or its late piece sees both of the visitor's.
#
# "A fold balances exactly", some texts say. Count the pairs of a token fold of 12 tokens on 4 ranks, in all steps
# together. If these totals differ, the steps cannot be even.

# %% tags=["nbval-ignore-output"]
predict("08.fold", "12 tokens, 4 ranks, token fold: by how many pairs, in total, do the busiest "
        "and the idlest rank differ?", unit="pairs")

# %%
odd = dealt(12, 4, chunk=1, folded=True)
totals = [sum(token + 1 for token in mine) for mine in shards(odd)]
print(owners(odd), totals)
compare("08.fold", max(totals) - min(totals))
print("16 tokens, pairs of each rank by step:")
print(by_step(dealt(16, 4, chunk=1, folded=True)))

# %% [markdown]
# There are three turns. The first two cancel each other; the third has no partner. A fold is exact only where turns come
# in pairs. Then all steps are even, not only the totals, as with 16 tokens.
#
# ## 3 · Balance, by tiles
#
# A kernel does not compute single pairs. It cuts its rows and keys into *tiles*, say of 128 × 128 scores. It skips a tile
# in which nothing is visible. It computes any other tile in full, and masks it afterwards.
#
# Counted in tokens, striping is nearly ideal. Now count in tiles: 2,048 tokens on 8 ranks. A rank's 256 queries meet all
# 2,048 keys in 2 × 16 = 32 tiles. Half of them, 50 %, would be ideal.

# %% tags=["nbval-ignore-output"]
predict("08.tiles", "2,048 tokens, 8 ranks, tiles of 128: what percentage of its 32 tiles does a "
        "striped rank compute?", unit="%")

# %%
def percent_computed(layout, tile):
    """Percentage of a rank's tiles that the slowest rank computes, step by step."""
    work = layout_work(layout, tile=(tile, tile))
    return 100 * work.max(0).sum() / (layout.S**2 / layout.P)


for layout in (contiguous(2048, 8), striped(2048, 8), zigzag(2048, 8)):
    print(f"{layout.name:11} {percent_computed(layout, 128):.0f} % of its tiles")
compare("08.tiles", percent_computed(striped(2048, 8), 128))

# %% [markdown]
# **Three quarters.** A shard is two tiles wide, so each pair of shards has four tiles, and the diagonal leaves only one of
# them empty. Here are 64 tokens on 4 ranks, with tiles of 4 × 4. Above is the owner of each token, below are all scores,
# with each rank's queries and keys in the order in which it stores them. The slider changes the tile: at 8 a shard is two
# tiles wide, as in the question.

# %% tags=["nbval-ignore-output"]
layout_view.play(tiles=(2, 4, 8))

# %% [markdown]
# This answers the puzzle. In the striped panel **every pair of shards has a dark diagonal**, and about half the work in
# each of its tiles is wasted. The zig-zag has a diagonal only where a rank meets its own tokens, in step 0. The lines
# above the panels say the same in numbers: in both layouts the busiest rank has 1.00 times the mean, but striped ranks
# compute 1.23 scores for each visible one, and zig-zag ranks 1.05. **Even is not the same as little.** So compare a
# layout with the ideal, not with its own mean.
#
# In a real ring a shard is many tiles wide, and a diagonal weighs less. Take 32,768 tokens on 8 ranks, and vary the chunk
# from single tokens to one piece for each rank. (`imbalance` is the cost over the ideal.)

# %%
S, P, TILE = 32_768, 8, (128, 128)
chunks = [2**i for i in range(13)]
cost = {folded: [] for folded in (False, True)}
for folded in cost:
    for chunk in chunks:
        layout = dealt(S, P, chunk=chunk, folded=folded)
        cost[folded].append(imbalance(layout_work(layout, tile=TILE, ascending=True), layout))
for folded in cost:
    print("folded     " if folded else "round-robin", *(f"{x:.3f}" for x in cost[folded]))

# %%
words = "Cost of dealt layouts: 32,768 tokens, 8 ranks, tiles of 128"
given = chunks, cost, TILE[0], words
show(layout_view.dial(*given), layout_view.describe_dial(*given))

# %% [markdown]
# Pieces smaller than a tile give nothing to fold: each tile holds early and late pieces alike, and the fold only reorders
# tokens inside tiles that are computed anyway. From 128 on, pieces fill whole tiles. With the fold, only the diagonals of
# step 0 remain, and the zig-zag, the last point of the flat part, has the fewest pieces. Round-robin gets worse: in every later
# step, some ranks own the later piece of each turn, and compute a diagonal of whole pieces. At the right end one piece is a
# whole shard, so there is no second turn to fold.
#
# ## 4 · Runs and launches
#
# A kernel needs rows in memory and a simple mask, not a list of positions. So a rank stores its tokens as a few **runs**,
# `(start, step, length)`, one after the other. (This `step` is lesson 07's stride, not a step of the ring.) Lesson 07
# showed how two runs of one stride meet in this family: nothing is visible, everything is, causal, or causal shifted by
# one. So a kernel needs only one flag, `causal`.

# %%
token_fold = dealt(32, 4, chunk=1, folded=True, name="token fold")
for layout in (contiguous(32, 4), striped(32, 4), zigzag(32, 4), token_fold):
    runs = [(run.start, run.step, run.length) for run in layout.runs(1)]
    print(f"{layout.name:11} rank 1:", *runs)

# %% [markdown]
# A contiguous or striped rank has one run, a zig-zag or token fold two (those of the last zig-zag rank are neighbours). The
# package turns each pair of runs into a rectangle of rows × keys, and joins rectangles that touch, where it can. Each
# rectangle is a **launch**: one call of the kernel, which cuts it into tiles, and one merge.

# %% tags=["nbval-ignore-output"]
predict("08.launches", "A zig-zag rank has 2 runs, and so meets 2 × 2 pairs of runs in each of 4 "
        "steps. With rectangles joined where they touch, how many launches does rank 1 make in "
        "all?",
        unit="launches")

# %%
count = 0
for step in range(4):
    parts = launches(zigzag(32, 4), 1, (1 - step) % 4)
    count += len(parts)
    for t in parts:
        rows, keys = f"rows {t.q_start}–{t.q_stop - 1}", f"keys {t.k_start}–{t.k_stop - 1}"
        print(f"step {step}: {rows} × {keys}, {'causal' if t.causal else 'full'}")
compare("08.launches", count)

# %% [markdown]
# **One launch a step.** In step 0 a zig-zag shard meets itself. Its positions ascend, so the two triangles and the square
# form *one* causal launch. In every later step the two visible squares of section 2 share their rows or their keys, and
# form one launch without a mask.
#
# In the chart of section 3, a folded chunk of 128 costs as little as the zig-zag. But then a rank has 4,096 / 128 = 32
# runs, and not all of their rectangles touch:

# %%
members = {"striped": (1, False), "zig-zag": (2048, True), "folded, 512": (512, True),
           "folded, 128": (128, True), "token fold": (1, True)}
for name, (chunk, folded) in members.items():
    layout = dealt(S, P, chunk=chunk, folded=folded)
    count = sum(len(launches(layout, 0, origin)) for origin in range(P))
    cost_of = imbalance(layout_work(layout, tile=TILE), layout)
    runs = len(layout.runs(0))
    print(f"{name:11} {runs:2} runs, {count:3} launches, cost/ideal {cost_of:.3f}")

# %% [markdown]
# Each launch takes time to start, and its result has to be merged. Among layouts of the same low cost, the zig-zag wins:
# one launch a step.
#
# Note the token fold: here it costs 1.062, but 1.031 in the chart. It stores its two runs one after the other, and each
# *pair of runs* has a diagonal of half-empty tiles. The chart laid tiles over its tokens in ascending order
# (`ascending=True`). The order within a shard is part of a layout.

# %% [markdown]
# ---
# **End of part 1. This is a good place to stop.** You can already solve stages 08.deal, 08.runs, 08.tiles and 08.balance of
# [the exercise](../exercises/08_striped_and_zigzag.ipynb). If you return in a fresh kernel, run all cells up to here first.
#
# ---

# %% [markdown]
# # Part 2 · In practice
#
# ## 5 · On the clock
#
# Lesson 06's simulator models time more finely than pairs and tiles do: it runs the real ring program, with the speeds of
# eight H100s.

# %%
sizes, h100 = Attention(H=32, K=8, D=128), hardware("h100")
runs_on = {layout.name: simulate(sizes, layout, h100, tile=TILE)
           for layout in (contiguous(S, P), striped(S, P), zigzag(S, P))}
slowest = runs_on["contiguous"].makespan_s
for name, run in runs_on.items():
    print(f"{name:11} {1e3 * run.makespan_s:.2f} ms, {slowest / run.makespan_s:.2f} times as fast, "
          f"ranks compute {run.busy_fraction:.0%} of the time")

# %%
traces = {name: run.trace() for name, run in runs_on.items()}
picture = gantt.compare(list(traces.values()), list(traces), ranks=[0, 7])
soonest = 1e3 * runs_on["zigzag"].makespan_s
picture.axes[1].axvline(soonest, color=INK, linewidth=1.2, linestyle=":")
picture.axes[1].text(soonest + 0.1, 1, "dotted: the end\nof the zig-zag", va="center", fontsize=9)
show(picture, gantt.describe_all(traces.values(), traces)
     + " In the striped chart a dotted line marks the end of the zig-zag, 0.05 ms before.")

# %% [markdown]
# The chart shows the first and the last rank. The waiting of the contiguous ring is gone in both other layouts. No striped
# rank ever waits, and yet they end after the zig-zag: between the two lines they finish the masked halves of their tiles.
# A busy rank need not do useful work.
#
# Do we need to deal at all? Keep one run of neighbouring tokens for each rank, but give the first rank more tokens and the
# last one fewer, so that all have the same total. Visible pairs grow as the square of the length, so cut at S · √(r / P).

# %% tags=["nbval-ignore-output"]
predict("08.totals", "One run for each rank, with equal total work, on the same clock: how does "
        "it compare with contiguous?", ["slower", "the same, within 1 %", "faster"])

# %%
cuts = [round(S * (rank / P) ** 0.5) for rank in range(P + 1)]
equal = Layout(S, P, "equal work", tuple((Run(a, 1, b - a),) for a, b in pairwise(cuts)))
total = layout_work(equal, tile=TILE).sum(1)
run = simulate(sizes, equal, h100, tile=TILE)
factor = slowest / run.makespan_s
print(f"busiest over mean rank, all steps together: {total.max() / total.mean():.3f}")
print("slowest rank of each step:", *layout_work(equal, tile=TILE).argmax(0))
print(f"{1e3 * run.makespan_s:.2f} ms, {factor:.3f} times as fast as contiguous")
verdict = "slower" if factor < 0.99 else "faster" if factor > 1.01 else "the same, within 1 %"
compare("08.totals", verdict)
for layout, timed in ((contiguous(S, P), runs_on["contiguous"]), (equal, run)):
    bound = imbalance(layout_work(layout, tile=TILE), layout)
    time = timed.makespan_s / runs_on["zigzag"].makespan_s
    print(f"{layout.name:10} cost/ideal {bound:.2f}, on the clock {time:.2f} times the zig-zag")

# %% [markdown]
# Even totals, and a little *slower* than the plain contiguous layout. In every step a different rank is the slowest, and
# its neighbours cannot go on without it. A layout has to balance each step.
#
# The last two lines compare the cost, counted in tiles, with the clock. For contiguous shards they agree. For equal totals
# the cost is far too high: the slow steps of *different* ranks overlap. So a cost near 1 proves a layout good, but only a
# clock shows how bad another one is.
#
# ## 6 · What it costs to reorder
#
# Does reordering cost traffic? The data loader gives each rank its tokens in the layout's order, once. After that, only
# attention relates tokens to each other, and it needs their positions, not their order.

# %%
text = corpus.qkv(1024, heads=4, kv_heads=2, head_dim=32)


def program(ring, layout, whole):
    return ring_attention(*layout.shard(whole, ring.rank), ring=ring, layout=layout)


for layout in (contiguous(1024, 8), striped(1024, 8), zigzag(1024, 8), zigzag(1021, 8)):
    whole = tuple(x[:, :, : layout.S] for x in text)
    run = VirtualCluster(8).run(program, layout, whole)
    alone = scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    error = (layout.unshard(run.results) - alone).abs().max()
    sent = run.trace.bytes_sent(0)
    print(f"{layout!r:25} equal to one device: {error < 1e-5}, rank 0 sends {sent:,} bytes")

# %% [markdown]
# For 1,024 tokens each layout sends the same number of bytes, and none needs an exchange to restore the order. The last line
# has 1,021 tokens, without padding.
#
# But one thing breaks silently: everything else that depends on a token's *position*. Rotary embeddings (RoPE) rotate q and k
# by an angle that grows with the position. Suppose that every rank uses the positions 0, 1, 2, … of its own shard:

# %%
def rope(x, positions):
    """Rotate every pair of channels by an angle that grows with the position."""
    angle = positions[:, None] * 10_000.0 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    even, odd, cos, sin = x[..., 0::2], x[..., 1::2], angle.cos(), angle.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 1024, 32) for _ in range(3))
right = torch.arange(1024)
local = torch.empty_like(right)
for rank in range(8):
    local[zigzag(1024, 8).positions(rank)] = torch.arange(128)
out, wrong = (scaled_dot_product_attention(rope(q, at), rope(k, at), v, is_causal=True)
              for at in (right, local))
print(f"local positions under zig-zag: relative error {(wrong - out).norm() / out.norm():.1f}")

# %% [markdown]
# No shape is wrong and no NaN appears, but this is another model. Positions are always global.
#
# ## 7 · Packed documents
#
# Training batches pack several documents into one sequence, and a query sees only its own document. One long triangle
# becomes many short ones. Does the zig-zag still balance?

# %%
documents, P_packed = (8, 32, 16, 8), 4


def cost_over_ideal(layout, documents):
    """As before, in visible pairs: the slowest rank of each step, added up, over the ideal."""
    document = np.repeat(np.arange(len(documents)), documents)
    work = np.zeros((layout.P, layout.P))
    for rank, step in np.ndindex(work.shape):
        q, k = layout.positions(rank)[:, None], layout.positions((rank - step) % layout.P)
        work[rank, step] = ((q >= k) & (document[q] == document[k])).sum()
    return work.max(0).sum() / work.sum() * layout.P

# %% tags=["nbval-ignore-output"]
predict("08.packed", "Documents of 8, 32, 16 and 8 tokens on 4 ranks, one zig-zag over all 64 "
        "tokens: how does its cost compare with contiguous?",
        ["better", "the same, within 1 %", "worse"])

# %%
once, plain = (cost_over_ideal(make(64, P_packed), documents) for make in (zigzag, contiguous))
print(f"cost/ideal: zig-zag {once:.3f}, contiguous {plain:.3f}")
verdict = "worse" if once > 1.01 * plain else "better" if plain > 1.01 * once else None
compare("08.packed", verdict or "the same, within 1 %")

# %% [markdown]
# Worse than contiguous. The zig-zag gives rank 3 the middle of the sequence, and here that is the late half of the longest
# document. The remedy is to fold **each document by itself**: cut it into 2P pieces, and give rank r its pieces r and
# 2P − 1 − r.

# %%
def two_of_each(documents, P):
    """Each rank's two pieces of every document, where 2P divides the lengths."""
    runs, begin = [[] for _ in range(P)], 0
    for n in documents:
        c = n // (2 * P)
        for rank in range(P):
            runs[rank] += [Run(begin + piece * c, 1, c) for piece in (rank, 2 * P - 1 - rank)]
        begin += n
    return Layout(begin, P, "two of each", tuple(map(tuple, runs)))

# %%
packed = [zigzag(64, P_packed), two_of_each(documents, P_packed)]
for layout in packed:
    print(f"{layout.name:11} cost/ideal {cost_over_ideal(layout, documents):.3f}")
show(layout_view.figure(packed, tile=2, documents=documents),
     layout_view.describe(packed, tile=2, documents=documents))

# %% [markdown]
# Left, rank 3 is the busiest, with 2.08 times the mean work, counted in tiles. Right, each rank has an early and a late
# piece of *every* document, and all have the same work in every step.
#
# 2P divides all these lengths. Otherwise some pieces are a token longer: a document of 10 tokens has six pieces
# of one token and two of two. If the longer pieces always went to the same ranks, thousands of short documents would add up.
# So the ranks must take turns. In which order? The exercise asks.

# %% [markdown]
# ## Recap
#
# - One family: pieces of `chunk` tokens, dealt round-robin or folded. Contiguous, striped, zig-zag and token fold belong to it.
# - A layout's cost is the work of the slowest rank of each step, added up: an upper bound of the time. The ideal is
#   S (S + 1) / 2 / P. Even totals are not enough, and even steps are not enough if all ranks waste alike.
# - Counted in tokens, striping is nearly ideal. Counted in tiles, it has masked tiles in all ranks and steps; the zig-zag has
#   diagonals only in step 0.
# - In this family two runs of one stride meet in four ways, so a kernel needs one flag. Few runs make few launches.
# - The data loader deals the tokens once, and traffic stays the same. Positions stay global.
# - Packed documents: each rank gets two pieces of every document.
#
# ## Self-check
#
# <details><summary>1. Somebody cuts P pieces instead of 2P, with <code>folded=True</code>. Which layout is it?</summary>Contiguous: P pieces are
# dealt in one turn, and there is nothing to fold back.</details>
#
# <details><summary>2. All ranks of a ring are busy 100 % of the time. May another layout still be
# faster?</summary>Yes: the masked halves of tiles are work too.</details>
#
# <details><summary>3. Tiles are 128 wide. Why does folding gain nothing with a chunk of 16 tokens?</summary>A tile of 128 rows
# then holds early and late pieces alike. The fold exchanges only tokens of tiles that are computed anyway.</details>
#
# <details><summary>4. A model with zig-zag shards trains, but its loss is worse than on one device. What do you check
# first?</summary>Whether positions are global, for RoPE and for the mask.</details>
#
# Now build it yourself: [exercise 08](../exercises/08_striped_and_zigzag.ipynb), dealing, runs, tiles, balance, and packed
# documents of any length.
