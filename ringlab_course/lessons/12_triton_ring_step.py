# %% [markdown]
# # 12 · The Triton ring step
#
# **Afterwards you can** fuse block attention and merge in one kernel, carry its state between the steps of the ring, say
# what a step reads and writes, and let it skip tiles by a table.
#
# **You need first** [lesson 04](04_triton_from_zero.ipynb), a flash kernel in Triton, and
# [lesson 05](05_emulated_ring.ipynb), the ring; for part 2 [lesson 08](08_striped_and_zigzag.ipynb), layouts.
#
# **Minutes** 60 to read and run; the exercise takes another 90.
#
# So far a step of the ring was two things: attention on the block that is here, then a merge. On a GPU that is two kernels,
# and everything goes through memory between them. Here the two become one kernel, in four versions:
#
# - Part 1, the state: (1) block and merge apart; (2) the state is carried; (3) the first and the last step.
# - Part 2, the mask: (4) tiles by a table.
#
# Kernels run in Triton's interpreter, on the CPU, because the interpreter can *count* bytes, tiles and launches. Its
# seconds mean nothing.

# %%
import difflib
import inspect
import math
import os
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from ringlab_course import compare, corpus, needs_triton, predict

needs_triton()
import triton
import triton.language as tl

from ringlab import VirtualCluster, oracle, ring_attention, striped, zigzag
from ringlab.blocks.triton import configs, offline
from ringlab.blocks.triton.visits import row_visits
from ringlab.plan import tiles
from ringlab.viz.style import show
from ringlab_course.checking.accesses import record_accesses
from ringlab_course.figures import ring_step

# %% [markdown]
# ## Part 1 · The state
#
# ## 1 · What one step reads and writes
#
# First we count what a step moves, because that is what one kernel can save.
#
# A rank's rows go through P steps. Between the steps each row has the state of lesson 02: `acc`, the sum of weights times
# values, *not* normalised; `m`, the largest score; `total`, the sum of the weights. That is D + 2 float32 numbers for each
# row of each head. If the state is in memory between the steps, every step reads it and writes it back.

# %% tags=["nbval-ignore-output"]
predict("12.bytes", "D = 128, as many K/V heads as query heads. A step reads a bfloat16 K/V block, "
        "and reads and writes the float32 state of equally many rows. How many bytes of state for "
        "one byte of K/V?", unit="bytes")

# %%
def state_bytes(rows, H, D):
    """Bytes to read and write acc, m and total, float32."""
    return 2 * rows * H * (D + 2) * 4


def kv_bytes(keys, heads, D):
    """Bytes of a K/V block in bfloat16."""
    return 2 * keys * heads * D * 2


compare("12.bytes", round(state_bytes(1, 8, 128) / kv_bytes(1, 8, 128), 2))
print(f"with 8 query heads on 1 K/V head: {state_bytes(1, 8, 128) / kv_bytes(1, 1, 128):.2f}")

# %% [markdown]
# **Twice the K/V block**, and with grouped heads many times: the state has all query heads and four-byte numbers, and it is
# moved both ways.
#
# Does it take long? For each row and head a step computes 4·n·D FLOPs for n keys, and moves 8·(D + 2) bytes of state. Take
# an H200's peaks from its data sheet, 989 TFLOP/s and 4.8 TB/s. (All of this is computed, nothing timed.)

# %%
for n in (512, 2048, 8192, 32768):
    compute, move = 4 * n * 128 / 989e12, 8 * 130 / 4.8e12
    print(f"n = {n:6,} keys in a block: moving the state takes {move / compute:6.1%} "
          "of the arithmetic's time")

# %% [markdown]
# With few tokens per rank, moving the state takes nearly as long as the attention; with tens of thousands it is negligible.
# So move it once per step, not more often.
#
# ## 2 · First version: a block kernel and a merge
#
# The plain version comes first, so that there is something to beat.
#
# We use real text: 512 tokens on 4 ranks, 2 query heads on 1 K/V head, bfloat16. We play rank 1: its queries stay, and the
# blocks come by in the order of the ring.

# %%
rank, P, S, H, D, BLOCK = 1, 4, 512, 2, 32, 64
layout = zigzag(S, P)  # which tokens a rank owns: it does not matter before part 2
text = tuple(x.bfloat16() for x in corpus.qkv(S, heads=H, kv_heads=1, head_dim=D))
shards = [layout.shard(text, each) for each in range(P)]
q, blocks = shards[rank][0], [shards[(rank - step) % P][1:] for step in range(P)]
# R rows of queries on this rank, N keys in a block
R, N, SCALE = q.shape[2], blocks[0][0].shape[2], math.log2(math.e) / math.sqrt(D)
truth = oracle.attention(q, *text[1:])
print(f"q {tuple(q.shape)}, a block's k {tuple(blocks[0][0].shape)}")

# %% [markdown]
# The arithmetic of one tile is the same in all four versions:

# %%
@triton.jit
def add_tile(acc, m, total, q, K, V, base, keys, inside, visible, scale, D: tl.constexpr):
    """(acc, m, total) after one more tile of keys: lesson 04, in powers of two."""
    at = (base + keys)[:, None] * D + tl.arange(0, D)
    k = tl.load(K + at, mask=inside[:, None], other=0.0)
    v = tl.load(V + at, mask=inside[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, -float("inf"))
    new = tl.maximum(m, tl.max(scores, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)
    weights, old = tl.math.exp2(scores - safe[:, None]), tl.math.exp2(m - safe)
    acc = acc * old[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, new, total * old + tl.sum(weights, 1)

# %% [markdown]
# The exponentials are powers of two, because that is what the hardware has; `scale` contains log₂e. So m is in base 2, and
# ln 2 = 0.6931… turns a log₂ into the natural lse. `scale` multiplies the float32 scores: multiplied into a bfloat16 q
# beforehand, it would be rounded.
#
# The block kernel puts a loop around the tile. One program has 64 rows of one head; `group` is how many query heads share
# a K/V head, here all H.

# %%
@triton.jit
def block_kernel(Q, K, V, PART, PART_LSE, group, R, N, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    head, rows = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own, at, base = rows < R, head * R + rows, head // group * N
    wide = at[:, None] * D + tl.arange(0, D)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc = tl.zeros((BLOCK, D), tl.float32)
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        inside = keys < N
        acc, m, total = add_tile(
            acc, m, total, q, K, V, base, keys, inside, inside[None, :], scale, D)
    tl.store(PART + wide, acc / total[:, None], mask=own[:, None])
    lse = (m + tl.math.log2(total)) * 0.6931471805599453  # times ln 2
    tl.store(PART_LSE + at, lse, mask=own)

# %% [markdown]
# The merge is that of lesson 02. The running result and the new part are weighed by their lse:

# %%
@triton.jit
def merge_kernel(RUN, RUN_LSE, PART, PART_LSE, count, D: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own, wide = at < count, at[:, None] * D + tl.arange(0, D)
    run = tl.load(RUN + wide, mask=own[:, None], other=0.0)
    part = tl.load(PART + wide, mask=own[:, None], other=0.0)
    a, b = tl.load(RUN_LSE + at, mask=own, other=0.0), tl.load(PART_LSE + at, mask=own, other=0.0)
    top = tl.maximum(a, b)
    wa, wb = tl.exp(a - top), tl.exp(b - top)
    merged = (run * wa[:, None] + part * wb[:, None]) / (wa + wb)[:, None]
    tl.store(RUN + wide, merged, mask=own[:, None])
    tl.store(RUN_LSE + at, top + tl.log(wa + wb), mask=own)

# %% [markdown]
# Every step launches both, one after the other:

# %%
def separate(q, blocks):
    """All steps, with block and merge apart; returns out in the dtype of q."""
    part, run = torch.empty(q.shape), torch.zeros(q.shape)
    part_lse, run_lse = torch.empty(q.shape[:-1]), torch.full(q.shape[:-1], -math.inf)
    for k, v in blocks:
        block_kernel[(triton.cdiv(R, BLOCK), H)](
            q, k, v, part, part_lse, H, R, N, SCALE, D, BLOCK)
        merge_kernel[(triton.cdiv(H * R, BLOCK),)](
            run, run_lse, part, part_lse, H * R, D, BLOCK)
    return run.to(q.dtype)

# %% [markdown]
# `record_accesses()` records every load and store of every program. From it `ring_step.moved` adds up, for each launch, the
# bytes of partials, state and results. q, k and v are left out: the first three versions read the same of them.

# %%
ladder = {}


def report(name, steps, *args, expected=truth):
    """Run it and print what it did; returns the bytes that it moved for its rows."""
    with record_accesses() as accesses:
        out = steps(*args)
    launches = ladder[name] = ring_step.moved(accesses)
    tile_count = sum(a.argument == "K" for a in accesses)
    right = torch.from_numpy(expected.out)
    error = (out.double() - right).norm() / right.norm()
    row_bytes = sum(read + written for read, written in launches)
    print(f"{name:16} {len(launches)} launches, {tile_count:2} tiles, {row_bytes / 1024:4.0f} KiB "
          f"for rows, error below 0.5 %: {bool(error < 5e-3)}")
    return row_bytes

# %%
apart = report("block, merge", separate, q, blocks)
print("4 steps of 4·(D + 1) float32 numbers a row:", 4 * H * R * 4 * (D + 1) * 4 == apart)

# %% [markdown]
# There are four passes over something as large as out: the block kernel writes its partial; the merge reads the partial,
# reads the running out, and writes the new one. The state of a row is read by one program only, so no cache helps.
#
# ## 3 · Second version: carry the state
#
# The merge can go, and with it a launch and two passes.
#
# The block kernel begins with nothing, works, and divides. The merge weighs two results that have been divided. Both
# divisions are needless: let the kernel *begin with the state of the step before*. Then a further block is nothing but
# further tiles.

# %%
@triton.jit
def carry_kernel(Q, K, V, ACC, M, TOTAL, group, R, N, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    head, rows = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own, at, base = rows < R, head * R + rows, head // group * N
    wide = at[:, None] * D + tl.arange(0, D)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc = tl.load(ACC + wide, mask=own[:, None], other=0.0)
    m = tl.load(M + at, mask=own, other=-float("inf"))
    total = tl.load(TOTAL + at, mask=own, other=0.0)
    for start in range(0, N, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        inside = keys < N
        acc, m, total = add_tile(
            acc, m, total, q, K, V, base, keys, inside, inside[None, :], scale, D)
    tl.store(ACC + wide, acc, mask=own[:, None])
    tl.store(M + at, m, mask=own)
    tl.store(TOTAL + at, total, mask=own)

# %% [markdown]
# These are all the lines that have changed:

# %%
def changes(old, new):
    """Print the lines that differ between two kernels, without their signatures."""
    lines = [inspect.getsource(kernel.fn).split("):\n", 1)[1].splitlines() for kernel in (old, new)]
    print("\n".join(line for line in difflib.ndiff(*lines) if line[0] in "+-"))


changes(block_kernel, carry_kernel)

# %% [markdown]
# The state begins with nothing seen, and every step goes on from it:

# %%
def nothing_seen(q):
    acc = q.new_zeros(q.shape, dtype=torch.float32)
    return acc, acc.new_full(q.shape[:-1], -math.inf), acc.new_zeros(q.shape[:-1])


def carried(q, blocks):
    state = nothing_seen(q)
    for k, v in blocks:
        carry_kernel[(triton.cdiv(R, BLOCK), H)](q, k, v, *state, H, R, N, SCALE, D, BLOCK)
    acc, _, total = state
    return (acc / total[..., None]).to(q.dtype)

# %%
carry = report("carried state", carried, q, blocks)
formula = P * state_bytes(R, H, D)
print(f"{apart / carry:.2f} times fewer bytes for rows; the formula:", formula == carry)

# %% [markdown]
# One launch instead of two, nearly half the bytes, and no merge at all. (The last division, in torch, is not counted; the
# next version includes it.)
#
# ## 4 · Third version: the first and the last step
#
# Two trips of the state are still useless: before the first step nothing has been written, and after the last one nobody
# reads it.
#
# `FIRST` and `LAST` are `tl.constexpr`: Triton makes a kernel of its own for each combination, in which the other branch
# does not exist.

# %%
@triton.jit
def begin(ACC, M, TOTAL, at, wide, own, D: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    acc, total = tl.zeros((BLOCK, D), tl.float32), tl.zeros((BLOCK,), tl.float32)
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    if not FIRST:
        acc = tl.load(ACC + wide, mask=own[:, None], other=0.0).to(tl.float32)
        m = tl.load(M + at, mask=own, other=-float("inf")).to(tl.float32)
        total = tl.load(TOTAL + at, mask=own, other=0.0).to(tl.float32)
    return acc, m, total

# %%
@triton.jit
def finish(acc, m, total, ACC, M, TOTAL, OUT, at, wide, own, LAST: tl.constexpr):
    if LAST:
        total = tl.where(total == 0.0, 1.0, total)  # a row that saw nothing: out 0
        tl.store(OUT + wide, acc / total[:, None], mask=own[:, None])
    else:
        tl.store(ACC + wide, acc, mask=own[:, None])
        tl.store(M + at, m, mask=own)
        tl.store(TOTAL + at, total, mask=own)

# %% [markdown]
# The kernel itself gets shorter:

# %%
@triton.jit
def ends_kernel(Q, K, V, ACC, M, TOTAL, OUT, group, R, N, scale, D: tl.constexpr,
                BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    head, rows = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own, at, base = rows < R, head * R + rows, head // group * N
    wide = at[:, None] * D + tl.arange(0, D)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc, m, total = begin(ACC, M, TOTAL, at, wide, own, D, BLOCK, FIRST)
    for start in range(0, N, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        inside = keys < N
        acc, m, total = add_tile(
            acc, m, total, q, K, V, base, keys, inside, inside[None, :], scale, D)
    finish(acc, m, total, ACC, M, TOTAL, OUT, at, wide, own, LAST)

# %% [markdown]
# We fill state and out with NaN beforehand. Do the same in your own tests: fresh memory is often zero by luck, and then a
# first step that reads it looks right for weeks.

# %%
def fused(q, blocks):
    state, out = [x.fill_(math.nan) for x in nothing_seen(q)], torch.full_like(q, math.nan)
    for step, (k, v) in enumerate(blocks):
        ends = step == 0, step == len(blocks) - 1
        ends_kernel[(triton.cdiv(R, BLOCK), H)](
            q, k, v, *state, out, H, R, N, SCALE, D, BLOCK, *ends)
    return out

# %%
ends = report("first and last", fused, q, blocks)
print("NaN left in out:", bool(fused(q, blocks).isnan().any()))
# the state is written P - 1 times and read P - 1 times; out is written once, in bfloat16
print("the formula:", H * R * ((2 * P - 2) * (D + 2) * 4 + 2 * D) == ends)

# %%
show(ring_step.traffic(ladder, P), ring_step.describe_traffic(ladder, P))

# %% [markdown]
# ## 5 · Why the state is float32
#
# The state is most of what is left in the picture, and bfloat16 would halve it.
#
# Such numbers have eight significant bits, so each store rounds by up to 0.4 %. Must all three parts be float32? After all,
# m is only a point of reference: the weights relative to *any* number near the largest score give the same result.

# %% tags=["nbval-ignore-output"]
predict("12.state", "8 blocks, and base-2 scores of up to about 15. One part of the state is "
        "stored in bfloat16 between the steps, the two others in float32. Which one harms the "
        "result most?",
        choices=["acc", "m", "total"])

# %%
def drift(P, narrow):
    """Relative error of out after P blocks of 128 keys, with one part of the state in bfloat16."""
    torch.manual_seed(0)
    q, out = (3 * torch.randn(1, H, R, D)).bfloat16(), torch.empty(1, H, R, D)
    blocks = [[torch.randn(1, 1, N, D).bfloat16() for _ in "kv"] for _ in range(P)]
    parts = dict(zip(("acc", "m", "total"), nothing_seen(q), strict=True))
    state = [x.bfloat16() if name == narrow else x for name, x in parts.items()]
    for step, (k, v) in enumerate(blocks):
        ends_kernel[(triton.cdiv(R, BLOCK), H)](
            q, k, v, *state, out, H, R, N, SCALE, D, BLOCK, step == 0, step == P - 1)
    whole = (torch.cat(x, 2) for x in zip(*blocks, strict=True))
    right = torch.from_numpy(oracle.attention(q, *whole).out)
    return ((out - right).norm() / right.norm()).item()

# %%
RANKS, PARTS = (2, 4, 8), ("none", "acc", "m", "total")
errors = {part: [drift(ranks, part) for ranks in RANKS] for part in PARTS}
for part, values in errors.items():
    shown = [f"P = {P}: {value:.2%}" for P, value in zip(RANKS, values, strict=True)]
    print(f"in bfloat16: {part:5}", "  ".join(shown))
compare("12.state", max(errors, key=lambda part: errors[part][-1]))

# %% [markdown]
# **m**, although any number near the maximum would do. acc and total were added up relative to the *unrounded* m. If m is off
# by δ afterwards, the weight of everything that was seen is off by a factor of 2^δ. bfloat16 numbers between 8 and 16 are
# 1/16 apart, so δ is up to 1/32, and the weight is off by up to 2 %.
#
# In the last three lines the error climbs with P, because further steps round again. So acc, m and total are float32
# between steps. The *wire* may be bfloat16, or less, as K and V are rounded only once; the exercise sends int8.

# %% [markdown]
# ---
# **End of part 1. You may stop here.** You now know how a step of the ring becomes one launch: it carries acc, m and total
# in float32, reads no state in the first step and writes none in the last. You can already solve stages 12.tile, 12.ends
# and 12.step of [the exercise](../exercises/12_triton_ring_step.ipynb). If you return in a fresh kernel, run all cells up
# to here first.
#
# ---

# %% [markdown]
# ## Part 2 · The mask
#
# ## 6 · Which tiles the mask cuts
#
# Now the mask is causal. Our kernel would compute every tile and throw about half of its work away.
#
# Which tiles it may skip depends only on the **layout** (lesson 08). A rank's rows are ordered in *runs*, stretches of
# evenly spaced tokens; in a zig-zag its early stretch comes first, then its late one. So a tile of the score matrix is
# visible as a whole, hidden as a whole, or cut by the mask. The pictures use 1,024 tokens, so that there are more tiles.

# %% tags=["nbval-ignore-output"]
predict("12.masked", "1,024 tokens, 4 ranks, zig-zag, tiles of 64 × 64: how many tiles of rank 1 "
        "does the causal mask cut, all four steps together?", unit="tiles")

# %%
zig = [ring_step.step_picture(zigzag(1024, 4), 1, step, name="zig-zag") for step in range(4)]
show(ring_step.grid(zig), ring_step.describe_grid(zig))
compare("12.masked", sum(picture.count("masked") for picture in zig))

# %% [markdown]
# **Four**: the diagonal of its own block, in step 0, and none after that. Rank 1 owns stretches 1 and 6 of 0 … 7. In step 1
# a block with stretches 0 and 7 arrives: all of rank 1's rows see stretch 0, and none sees 7. In step 2 one with 3 and 4
# arrives: the early half of the rows sees neither, the late half both.
#
# In step 3 the early rows see nothing either, but they keep a program, because this is the last step and out must be
# written.
#
# Other layouts cut other tiles. Here are four at step 1; in a live notebook, move the sliders over step and rank.

# %%
four = ring_step.layouts_at(1024, 4, rank=1, step=1)
show(ring_step.grid(four), ring_step.describe_grid(four))

# %% tags=["nbval-ignore-output"]
ring_step.player()

# %% [markdown]
# Striped and token fold mask diagonals in *every* step.
#
# ## 7 · Fourth version: tiles by a table
#
# One kernel should serve all these layouts, without loading a position. So the host writes down what each program visits,
# in two tables, from which the pictures are drawn.
#
# A line of `PROGRAMS` says which rows a program owns and which lines of
# `SEGMENTS` it visits; the longest walks come first. A line of `SEGMENTS` says from where to where a segment of keys goes,
# up to which key no mask is needed, and a *shift*: row i sees key j where **j ≤ i + shift**.

# %%
def launch_tables(layout, origin, every_row):
    """PROGRAMS and SEGMENTS where rank 1 meets the keys of rank `origin`."""
    met = tiles(layout, rank, origin)  # visible rectangles and triangles, from the runs of both
    return row_visits(met, R, BLOCK, BLOCK, every_row, q.device)  # cut for programs


def print_tables(visits):
    print("PROGRAMS     rows from  to   segments from  to")
    for number, (start, stop, first, last) in enumerate(visits.programs.tolist()):
        print(f"{number:8} {start:13} {stop:3} {first:15} {last:3}")
    print("SEGMENTS     keys from  unmasked up to   to   shift")
    for number, (start, split, stop, shift) in enumerate(visits.segments.tolist()):
        print(f"{number:8} {start:13} {split:15} {stop:4} {shift:7}")

# %% [markdown]
# At 512 tokens, zig-zag, step 0:

# %%
print_tables(launch_tables(layout, rank, every_row=True))

# %% [markdown]
# Both shifts are 0: row i and key i are the same token. Not so in a striped layout, when rank 1 meets the keys of rank 3:

# %%
stripes = striped(S, P)
print_tables(launch_tables(stripes, 3, every_row=False))
row, own, keys_at = 100, stripes.positions(rank), stripes.positions(3)
print(f"row {row} is token {own[row]}; key {row - 1} is token {keys_at[row - 1]}, "
      f"key {row} token {keys_at[row]}")

# %% [markdown]
# With a shift of −1, the last key that a row sees is the last token before its own. So the kernel loads no position, and
# another layout is only another table. Here is one segment:

# %%
@triton.jit
def walk(acc, m, total, q, K, V, SEGMENT, base, rows, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """(acc, m, total) after the keys of one segment."""
    start, split = tl.load(SEGMENT), tl.load(SEGMENT + 1)
    stop, shift = tl.load(SEGMENT + 2), tl.load(SEGMENT + 3)
    for key in range(start, stop, BLOCK):
        keys = key + tl.arange(0, BLOCK)
        inside = keys < stop
        visible = inside[None, :]
        if key >= split:
            visible = visible & (keys[None, :] <= rows[:, None] + shift)
        acc, m, total = add_tile(acc, m, total, q, K, V, base, keys, inside, visible, scale, D)
    return acc, m, total

# %% [markdown]
# And the kernel, which differs from the third version in two places: its rows and its keys come from the tables.

# %%
@triton.jit
def table_kernel(Q, K, V, ACC, M, TOTAL, OUT, PROGRAMS, SEGMENTS, group, R, N, scale,
                 D: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    head, program = tl.program_id(1), PROGRAMS + 4 * tl.program_id(0)
    rows, row_stop = tl.load(program) + tl.arange(0, BLOCK), tl.load(program + 1)
    own, at, base = rows < row_stop, head * R + rows, head // group * N
    wide = at[:, None] * D + tl.arange(0, D)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc, m, total = begin(ACC, M, TOTAL, at, wide, own, D, BLOCK, FIRST)
    for number in range(tl.load(program + 2), tl.load(program + 3)):
        segment = SEGMENTS + 4 * number
        acc, m, total = walk(acc, m, total, q, K, V, segment, base, rows, scale, D, BLOCK)
    finish(acc, m, total, ACC, M, TOTAL, OUT, at, wide, own, LAST)

# %% [markdown]
# Two details cost people days. `i` is the row of the *shard*, not of the tile. And a program must not write beyond its
# `row_stop`, because the rows after it belong to another program. Whichever of the two stores last wins, and the other's
# tiles are lost.

# %%
def by_table(q, blocks):
    state, out = [x.fill_(math.nan) for x in nothing_seen(q)], torch.full_like(q, math.nan)
    for step, (k, v) in enumerate(blocks):
        ends = step == 0, step == len(blocks) - 1
        # rows that see nothing need a program too in the first and in the last step
        tables = launch_tables(layout, (rank - step) % P, any(ends))
        table_kernel[(len(tables.programs), H)](
            q, k, v, *state, out, *tables, H, R, N, SCALE, D, BLOCK, *ends)
    return out

# %%
whole = oracle.attention(*text, causal=True)
mine = oracle.Result(layout.shard(whole.out, rank), layout.shard(whole.lse, rank, dim=-1))
table = report("causal, table", by_table, q, blocks, expected=mine)
print("tiles if every one were computed and then masked:", P * H * (R // BLOCK) * (N // BLOCK))

# %%
show(ring_step.traffic(ladder, P), ring_step.describe_traffic(ladder, P))

# %% [markdown]
# Hidden tiles are not computed and not even read. Half of the rows see nothing in step 2 and have no program there, so their
# state is not moved: 186 KiB in place of 220.
#
# ## 8 · The same as ringlab's
#
# The kernel that ringlab ships is built like yours, so one check and one look at it are enough.
#
# `block="triton"` gives it every step of the ring. Here are four virtual ranks, real text in float32, against the float64
# oracle of the whole sequence:

# %%
def program(ring):
    own = layout.shard(exact, ring.rank)
    return ring_attention(*own, ring=ring, layout=layout, causal=True, block="triton")


exact = corpus.qkv(S, heads=H, kv_heads=1, head_dim=D)
got = layout.unshard(VirtualCluster(P).run(program).results)
right = oracle.attention(*exact, causal=True).out
error = (got - torch.from_numpy(right)).abs().max() / abs(right).max()
print(f"relative error below 1e-5: {bool(error < 1e-5)}")

# %% [markdown]
# Read on in [kernels.py](../ringlab/blocks/triton/kernels.py): `forward_step` is `table_kernel`, and its `_attend` is
# `add_tile`. The page [Triton kernels and GPUs](../docs/guide/triton.md) says what it adds, and why the backward has two
# kernels.
#
# The interpreter does not say how fast a kernel is; lesson 13 shows how to measure. But without a GPU one can still ask the
# compiler how much room it takes. Here is the shipped kernel for an H100-class chip, with tiles of 128 rows × 64 keys. It
# divides a program's work among 8 **warps**, groups of 32 threads; then among 4.

# %% tags=["nbval-ignore-output"]
shipped = configs.choose("forward_step", "sm_90", 128, "bfloat16")
fewer_warps = replace(shipped, num_warps=shipped.num_warps // 2)
jobs = [offline.Job("forward_step", "sm_90", 128, "bfloat16", config)
        for config in (shipped, fewer_warps)]
for job, made in zip(jobs, offline.compile_all(jobs), strict=True):
    print(f"{job.config!s:28} {made.registers} registers a thread, {made.spill_bytes:3} bytes "
          f"spilled, {made.shared_bytes / 1024:.0f} KiB of shared memory")

# %% [markdown]
# acc, scores and weights are in **registers**, of which a thread has at most 255; the rest is **spilled** to memory. q and
# the K and V tiles are in **shared memory**.
#
# ## Recap
#
# - A ring step moves its K/V block once, and a state of D + 2 float32 numbers for each row and head **both ways**: twice
#   the block in bfloat16, more with grouped heads.
# - Block and merge apart: two launches, four passes over out. State carried: one launch, two passes, less in the first and
#   in the last step.
# - The state is float32, m above all, or the error grows with P.
# - Layouts are tables: rows of a program, segments of keys, a shift. Hidden tiles are not even read.
#
# ## Self-check
#
# <details><summary>1. Why should <code>finish</code> not write OUT before the last step, although the last step overwrites
# it?</summary>
#
# The result would be right, but it costs a pass over out in every step.
# </details>
#
# <details><summary>2. In the last step a causal rank may see nothing of the block that is here. Can its rows go without a
# program?</summary>
#
# No: acc has to be divided and OUT written. These rows have programs without segments.
# </details>
#
# <details><summary>3. Your state is right on 2 ranks and wrong on 3. Which step do two ranks not have?</summary>
#
# A middle one, which both reads and writes the state.
# </details>
#
# Now build a step that this lesson did not have: [exercise 12](../exercises/12_triton_ring_step.ipynb), with int8 blocks, a
# result to go on from, and sliding windows.
