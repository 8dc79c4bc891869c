# %% [markdown]
# # 08 · Striped and zig-zag
#
# **Afterwards you can** build the published layouts as one family, say what each of them costs in pairs and in the tiles
# that a kernel computes, and share out packed documents.
#
# **You need first** [lesson 05](05_emulated_ring.ipynb), the ring, and [lesson 07](07_causal_imbalance.ipynb), why all ranks
# of a contiguous causal ring wait for the last one.
#
# **Minutes** 60 to read and run, in two parts of 40 and 20; the exercise takes another 75.
#
# Lesson 07 ended with a wish: the same work for **every rank** in **every step**, with tokens kept as few runs, all of one
# stride. A rank need not own *neighbouring* tokens, since masks compare global positions. So we deal tokens like cards, but by a
# rule.

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
from ringlab_course.figures.layout_tiles import PARTIAL, SKIP, tiles_of
from ringlab.viz.style import BLUE, INK, ORANGE, WIDE, new_figure, show, styled

# %% [markdown]
# ## Part 1 · One family of layouts
#
# ## 1 · One way of dealing, four layouts
#
# Cut the sequence into pieces of `chunk` tokens, and deal them in turns, one piece to each rank.

# %%
def round_robin(S, P, chunk):
    """The tokens of every rank."""
    shares = [[] for _ in range(P)]
    for piece, start in enumerate(range(0, S, chunk)):
        shares[piece % P] += range(start, min(start + chunk, S))
    return shares


print(*round_robin(16, 4, chunk=1))

# %% [markdown]
# *Folded* means that every other turn runs backwards: the rank with the earliest piece of one turn gets the latest piece of
# the next. The package's `dealt` deals both ways. In the exercise you write it yourself.

# %%
def shares(layout):
    """The tokens of every rank."""
    return [sorted(layout.positions(rank).tolist()) for rank in range(layout.P)]


def owners(layout):
    """A digit for each token: the rank that owns it."""
    owner = {token: rank for rank, mine in enumerate(shares(layout)) for token in mine}
    return "".join(str(owner[token]) for token in sorted(owner))


family = {"contiguous": (4, False), "striped": (1, False), "zig-zag": (2, True),
          "token fold": (1, True)}
for name, (chunk, folded) in family.items():
    layout = dealt(16, 4, chunk=chunk, folded=folded)
    print(f"{name:11} chunk={chunk}, folded={folded!s:5}  {owners(layout)}")
print("token fold:", *shares(dealt(16, 4, chunk=1, folded=True)))

# %% [markdown]
# Two parameters give all four layouts. In the *contiguous* layout pieces are so large, S/P tokens, that one turn is enough.
# *Striped* deals single tokens (arXiv 2311.09431). *Zig-zag*, with which Llama 3 was trained (arXiv 2407.21783, section 3.3.2),
# cuts 2P pieces and folds once, so that rank r gets pieces r and 2P − 1 − r, an early one and a late one. The *token fold*
# folds single tokens: rank 0 owns tokens 0, 7, 8 and 15.
#
# Any length will do: the last piece may be shorter, and the last turn may end early. (Zig-zag pieces have S/(2P) tokens,
# rounded up. So 10 tokens on 4 ranks make five pieces, of which only rank 3 gets two. In a long sequence this evens out.)

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
# The work of a rank in a step is its number of visible pairs. As the **cost** of a layout we take the *sum over steps of the
# maximum over ranks*: the time of a ring in which all ranks wait for the slowest in every step. As in lesson 07, this is an
# upper bound, which is reached if one rank is the slowest in every step, ties included. That is so for contiguous, striped
# and zig-zag shards. Ideal would be all visible pairs divided by P.

# %%
def seen(queries, keys):
    """Visible pairs: keys at or before the query."""
    return sum(key <= query for query in queries for key in keys)


def by_step(layout):
    """Visible pairs [rank, step]."""
    P, mine = layout.P, shares(layout)
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
# 36. The difference is a diagonal of 8 pairs, which matters less as shards grow. Now the fold, beside the others, with 32
# tokens on 4 ranks:

# %%
picture = [contiguous(32, 4), striped(32, 4), zigzag(32, 4)]
assert all((layout_work(layout) == by_step(layout)).all() for layout in picture)
show(load_mosaic.figure(picture), load_mosaic.describe(picture))

# %% [markdown]
# All ranks of the zig-zag have the same work in *every* step. In step 0 each rank meets its own two pieces: two triangles
# and a square. Afterwards it always computes two full squares. Let the *visitor* be the block that has arrived: either both
# of the rank's pieces see the visitor's early piece, or its late piece sees both of the visitor's. The assertion shows that
# the package's `layout_work` equals our `by_step`.
#
# "A fold balances exactly", some texts say. Count the pairs of a token fold of 12 tokens on 4 ranks, in all steps together. If
# these totals differ, the steps cannot be even.

# %% tags=["nbval-ignore-output"]
predict("08.fold", "12 tokens, 4 ranks, token fold: by how many pairs, in total, do the busiest "
        "and the idlest rank differ?", unit="pairs")

# %%
odd = dealt(12, 4, chunk=1, folded=True)
totals = [sum(token + 1 for token in mine) for mine in shares(odd)]
print(owners(odd), totals)
compare("08.fold", max(totals) - min(totals))
print("16 tokens, pairs of each rank by step:")
print(by_step(dealt(16, 4, chunk=1, folded=True)))

# %% [markdown]
# There are three turns. The first two cancel each other; the third has no partner. A fold is exact only where turns come in
# pairs. Then all steps are even, not only the totals, as with 16 tokens.
#
# ## 3 · Balance, by tiles
#
# A kernel does not compute single pairs. It cuts its rows and keys into *tiles*, say 128 × 128 scores. It skips a tile in which
# nothing is visible. It computes any other tile in full, and masks it afterwards. (In this lesson a tile is always such a
# square. Lesson 07's rectangles appear in section 4, as *launches*.)
#
# Counted in tokens, striping is nearly ideal. Now count in tiles: 2,048 tokens on 8 ranks. A rank's 256 queries meet all 2,048
# keys in 2 × 16 = 32 tiles. Half of them, 50 %, would be ideal.

# %% tags=["nbval-ignore-output"]
predict("08.tiles", "2,048 tokens, 8 ranks, tiles of 128: what percentage of its 32 tiles does a "
        "striped rank compute?", unit="%")

# %%
def share_computed(layout, tile):
    """Percentage of a rank's tiles that the slowest rank computes, step by step."""
    work = layout_work(layout, tile=(tile, tile))
    return 100 * work.max(0).sum() / (layout.S**2 / layout.P)


for layout in (contiguous(2048, 8), striped(2048, 8), zigzag(2048, 8)):
    print(f"{layout.name:11} {share_computed(layout, 128):.0f} % of its tiles")
compare("08.tiles", share_computed(striped(2048, 8), 128))

# %% [markdown]
# **Three quarters.** A shard is two tiles wide, so each pair of shards has four tiles, and the diagonal leaves only one of
# them empty. Here are 64 tokens on 4 ranks, with tiles of 4 × 4. Above is the owner of each token, below are all scores,
# with each rank's queries and keys in the order in which it stores them.

# %%
layouts = [contiguous(64, 4), striped(64, 4), zigzag(64, 4)]
show(layout_view.figure(layouts, tile=4), layout_view.describe(layouts, tile=4))

# %% [markdown]
# In the striped panel **every pair of shards has a dark diagonal**, and about half the work in each of its tiles is wasted.
# The zig-zag has a diagonal only where a rank meets its own tokens, in step 0. Let the tile grow with the slider: at 8 a shard
# is two tiles wide, as in the question.

# %% tags=["nbval-ignore-output"]
layout_view.play(tiles=(4, 8, 16))

# %% [markdown]
# From here on we take more tokens, 32,768 on 8 ranks. A shard is then 32 tiles wide, and a diagonal weighs less.
# (`imbalance` is the cost over the ideal.)

# %%
S, P, TILE = 32_768, 8, (128, 128)
print("32,768 tokens on 8 ranks       busiest/mean, total   cost/ideal")
for layout in (contiguous(S, P), striped(S, P), zigzag(S, P)):
    total = layout_work(layout, tile=TILE).sum(1)
    cost = imbalance(layout_work(layout, tile=TILE), layout)
    print(f"{layout.name:30} {total.max() / total.mean():19.3f} {cost:12.3f}")

# %% [markdown]
# The two columns differ. Counted in tiles, striped ranks are *perfectly even*, 1.000, and yet all of them compute 3.1 % too much; the zig-zag's
# compute 0.4 % too much. **Even is not the same as little**: half-empty tiles, spread evenly, are still waste. So compare with
# the ideal, not with the mean.
#
# Some texts say that striping "defeats" tile skipping. It does not: where shards are 32 tiles wide, nearly half of the tiles
# are skipped. But more of the computed tiles are *masked*. (The cell takes S and tile 16 times smaller: the same pattern.)

# %%
for layout in (striped(2048, 8), zigzag(2048, 8)):
    kinds = tiles_of(layout, tile=8).kinds
    print(f"{layout.name}: {(kinds == SKIP).mean():.0%} of the tiles skipped; "
          f"of the computed ones {(kinds == PARTIAL).sum() / (kinds != SKIP).sum():.1%} are masked")

# %% [markdown]
# All four layouts are one family, so we can vary the chunk from single tokens to one piece per rank. (With `ascending=True`
# tiles are laid over a rank's tokens in ascending order. Section 4 shows the effect of another order.)

# %%
chunks = [2**i for i in range(13)]
cost = {folded: [] for folded in (False, True)}
for folded in cost:
    for chunk in chunks:
        layout = dealt(S, P, chunk=chunk, folded=folded)
        cost[folded].append(imbalance(layout_work(layout, tile=TILE, ascending=True), layout))
for folded in cost:
    print("folded     " if folded else "round-robin", *(f"{x:.3f}" for x in cost[folded]))

# %%
with styled():
    dial = new_figure(WIDE)
    ax = dial.subplots()
    for folded, colour, mark, size in ((False, ORANGE, "o", 11), (True, BLUE, "s", 6)):
        above = [100 * (x - 1) for x in cost[folded]]
        name = "folded" if folded else "round-robin"
        ax.plot(chunks, above, color=colour, marker=mark, ms=size, label=name)
    ax.axvline(TILE[0], color=INK, linewidth=1, linestyle=":")
    ax.annotate("chunk = tile", (TILE[0], 40), (6, 0), textcoords="offset points")
    for name, x, y in (("striped", 1, 4.2), ("zig-zag", 900, 0.5), ("contiguous", 900, 80)):
        ax.text(x, y, name, weight="bold")
    ax.set(xscale="log", yscale="log", xlabel="chunk (tokens)", ylabel="cost above ideal (%)",
           title="Cost of dealt layouts: 32,768 tokens, 8 ranks, tiles of 128", xticks=[])
    ax.set_xticks(chunks[::2], chunks[::2])
    ax.set_yticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
    ax.minorticks_off()
    ax.legend(loc="upper left")
show(dial, "Cost above ideal, in percent, against the chunk, both on logarithmic axes. Round-robin "
     "stays at 3.1 up to chunk 128, the tile, and rises to 88 at 4,096. Folded is 3.1 below 128, "
     "drops to 0.4 from 128 to 2,048, the zig-zag, and ends at 88 as well, contiguous.")

# %% [markdown]
# - **Chunks smaller than the tile:** the fold gains nothing. It only reorders tokens inside tiles that are computed anyway.
# - **At 128** the pieces fill tiles, and half-empty tiles become rare. The folded cost drops to 0.4 %. Round-robin gains
#   nothing: now the ranks are uneven. In every step but the first, the pieces of some ranks come after the visitor's in
#   every turn, so these ranks compute one diagonal of whole pieces more. A piece is now as large as a tile, so this diagonal
#   costs as much as the diagonal of half-empty tiles did before.
# - **Larger chunks, round-robin:** this diagonal grows with the piece.
# - **Larger chunks, folded:** the difference cancels, and only the diagonals of step 0 remain. The zig-zag is the last point of
#   the flat part, and has the fewest pieces.
# - **At the right end** a piece is a rank's whole share. There is no second turn to fold, and the layout is contiguous.
#
# ## 4 · Runs and launches
#
# A kernel needs rows in memory and a simple mask, not a list of positions. So a rank stores its tokens as a few **runs**,
# `(start, step, length)`, one after the other. Lesson 07 showed how two runs of one stride meet in this family: nothing is
# visible, everything is, causal, or causal shifted by one. So a kernel needs only one flag, `causal`.

# %%
token_fold = dealt(32, 4, chunk=1, folded=True, name="token fold")
for layout in (contiguous(32, 4), striped(32, 4), zigzag(32, 4), token_fold):
    runs = [(run.start, run.step, run.length) for run in layout.runs(1)]
    print(f"{layout.name:11} rank 1:", *runs)

# %% [markdown]
# A contiguous or striped rank has one run, a zig-zag or token fold two (the last zig-zag rank's touch). The package turns
# pairs of runs into rectangles of rows × keys, and joins rectangles that touch, where it can. Each rectangle is a **launch**: one call
# of the kernel, which cuts it into tiles, and one merge.

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
# form *one* causal launch. In every later step the two visible squares of section 2 share their rows or their keys, and form
# one launch without a mask.
#
# In the chart of section 3, a folded chunk of 128 costs as little as the zig-zag. But then a rank has 4,096 / 128 = 32 runs,
# and not all of their rectangles touch:

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
# Each launch takes time to start, and its result has to be merged. Among layouts of the same low cost, the zig-zag wins: one
# launch a step. Note the token fold: here it costs 1.062, but 1.031 in the chart. It stores its two runs one after the
# other, and each *pair of runs* has a diagonal of half-empty tiles. The chart laid tiles over its tokens in ascending order.
# The order within a shard is part of a layout.

# %% [markdown]
# ---
# **End of part 1. This is a good place to stop.** You can already solve stages 08.deal, 08.runs, 08.tiles and 08.balance of
# [the exercise](../exercises/08_striped_and_zigzag.ipynb). If you return in a fresh kernel, run all cells up to here first.
#
# ---

# %% [markdown]
# ## Part 2 · In practice
#
# ## 5 · On the clock
#
# Lesson 06's simulator models time more finely than pairs and tiles do: it runs the real ring program, with the speeds of
# eight H100s.

# %% tags=["nbval-ignore-output"]
predict("08.clock", "32,768 tokens on 8 H100s: how many times as fast as contiguous is the "
        "zig-zag?", unit="times")

# %%
sizes, h100 = Attention(H=32, K=8, D=128), hardware("h100")
runs_on = {layout.name: simulate(sizes, layout, h100, tile=TILE)
           for layout in (contiguous(S, P), striped(S, P), zigzag(S, P))}
slowest = runs_on["contiguous"].makespan_s
for name, run in runs_on.items():
    print(f"{name:11} {1e3 * run.makespan_s:.2f} ms, {slowest / run.makespan_s:.2f} times as fast, "
          f"ranks compute {run.busy_fraction:.0%} of the time")
compare("08.clock", slowest / runs_on["zigzag"].makespan_s)

# %%
traces = {name: run.trace() for name, run in runs_on.items()}
show(gantt.compare(list(traces.values()), list(traces), ranks=[0, 2, 5, 7]),
     gantt.describe_all(traces.values(), traces))

# %% [markdown]
# The chart shows four ranks of eight. Nothing is computed faster; the waiting is gone. No striped rank ever waits, and yet
# they end after the zig-zag: a busy rank need not do useful work.
#
# Even totals seem to be simpler to get: keep one stretch for each rank, but give the first rank more tokens and the last one
# fewer. Visible pairs grow as the square of the length, so cut at S · √(r / P).

# %% tags=["nbval-ignore-output"]
predict("08.totals", "Stretches of equal total work, on the same clock: how do they compare with "
        "contiguous?", ["slower", "the same, within 1 %", "faster"])

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
# Even totals, and a little *slower* than the plain contiguous layout. In every step a different rank is the slowest, and its
# neighbours cannot go on without it. A layout has to balance each step.
#
# The last two lines compare the cost, counted in tiles as in section 3, with the clock. They agree for contiguous shards,
# where rank 7 is the slowest in every step. For the stretches the cost is far above the time: slow steps of *different*
# ranks overlap, because a delay moves at most one rank per step. So a cost near 1 proves a layout good, but only a clock
# shows how bad another one is.
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
# ## 7 · Outlook: packed documents
#
# Training batches pack several documents into one sequence, and a query sees only its own document. One long triangle becomes
# many short ones. Does the zig-zag still balance?

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
# Worse than contiguous: rank 3 owns the middle of the sequence, and that is the late half of the longest document. The
# remedy is to fold each document by itself: cut it into 2P pieces, and pair piece r with piece 2P − 1 − r. There are two
# ways to collect the pairs. *Document-major* writes them in a row: for document 0 the pieces 0 7 1 6 2 5 3 4, then those of
# document 1, and so on. Each rank gets a quarter of that row. *Two of each* gives each rank its two pieces **of every
# document**.

# %%
def fold_each(documents, P):
    """For each document the two runs of every rank, an early one and a late one."""
    pairs, begin = [], 0
    for n in documents:
        c = n // (2 * P)
        starts = [(begin + r * c, begin + (2 * P - 1 - r) * c) for r in range(P)]
        pairs.append([(Run(early, 1, c), Run(late, 1, c)) for early, late in starts])
        begin += n
    return pairs

# %%
def document_major(documents, P):
    runs = [run for pairs in fold_each(documents, P) for pair in pairs for run in pair]
    parts = np.split(np.concatenate([run.positions for run in runs]), P)
    shares = [tuple(Run(int(token), 1, 1) for token in part) for part in parts]
    return Layout(sum(documents), P, "document-major", tuple(shares))


def two_of_each(documents, P):
    shares = [sum((pairs[rank] for pairs in fold_each(documents, P)), ()) for rank in range(P)]
    return Layout(sum(documents), P, "two of each", tuple(shares))

# %%
packed = [zigzag(64, P_packed), document_major(documents, P_packed),
          two_of_each(documents, P_packed), striped(64, P_packed)]
for layout in packed:
    cost_of = cost_over_ideal(layout, documents)
    print(f"{layout.name:15} cost/ideal {cost_of:.3f}  {owners(layout)}")

# %% [markdown]
# The digits are the owners of the 64 tokens. The table counts visible pairs, the lines above these panels whole tiles of
# 2 × 2:

# %%
shown = [packed[3], packed[2]]
show(layout_view.figure(shown, tile=2, documents=documents),
     layout_view.describe(shown, tile=2, documents=documents))

# %% [markdown]
# Folding documents by themselves is not enough. In document-major order ranks get tokens of different documents,
# and those of a long one see more keys.
# Two pieces of *every* document are exactly even. Striping ignores documents, and is nearly even in each. Its price is the
# diagonal in every pair of shards: 1.30 scores computed for each visible one, where two of each needs 1.11. With longer
# documents:

# %%
for scale in (8, 64):
    longer = tuple(scale * n for n in documents)
    for layout in (zigzag(sum(longer), 4), striped(sum(longer), 4), two_of_each(longer, 4)):
        cost_of = cost_over_ideal(layout, longer)
        print(f"{sum(longer):5} tokens, {layout.name:11} cost/ideal {cost_of:.3f}")

# %% [markdown]
# 2P divides all these lengths. Otherwise some pieces are a token longer than others. Over thousands of short documents that
# adds up if the same ranks always get the longer pieces. So rotate the ranks from document to document, until each has had
# every part in every step. But where long and short documents alternate, one rank may begin every long one. In which order
# must the rotation go? The exercise asks.

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
