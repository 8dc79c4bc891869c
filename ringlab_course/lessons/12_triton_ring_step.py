# %% [markdown]
# # 12 · The Triton ring step
#
# **Afterwards you can** fuse block attention and merge in one kernel, carry its state between the steps of the ring, say
# what a step reads and writes, and read the kernels that ringlab ships.
#
# **You need first** [lesson 04](04_triton_from_zero.ipynb), a flash kernel in Triton, and
# [lesson 05](05_emulated_ring.ipynb), the ring; from section 5 on [lesson 08](08_striped_and_zigzag.ipynb), layouts, and
# [lesson 09](09_backward_ring.ipynb), delta and the global lse.
#
# **Minutes** 75 to read and run; the exercise takes another 90.
#
# So far a step of the ring was two things: attention on the block that is here, then a merge. On a GPU that is two kernels,
# and everything goes through memory between them. In this lesson the two become one kernel, in four small steps. Kernels run
# in Triton's interpreter, on the CPU, because the interpreter can *count*. Its seconds mean nothing; bytes, tiles and
# launches do.

# %%
import difflib
import inspect
import math
import os
import re
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from ringlab_course import compare, corpus, needs_triton, predict

needs_triton()
import triton
import triton.language as tl

from ringlab import VirtualCluster, dealt, oracle, ring_attention, zigzag
from ringlab.blocks.triton import configs, kernels, offline
from ringlab_course.checking.accesses import record_accesses
from ringlab.blocks.triton.visits import row_visits
from ringlab.plan import tiles
from ringlab.viz.style import BLUE, GREEN, INK, RED, new_figure, show, styled
from ringlab_course.figures import ring_step

# %% [markdown]
# ## 1 · What one step reads and writes
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
# moved both ways. It is easily forgotten, because it does not travel over the wire. For each row and head a step computes
# 4·n·D FLOPs for n keys, and moves 8·(D + 2) bytes of state. Take an H200's peaks from its data sheet, 989 TFLOP/s and 4.8
# TB/s. (All of this is computed, nothing timed.)

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
# We use real text: 512 tokens on 4 ranks, 2 query heads on 1 K/V head, bfloat16. We play rank 1: its queries stay, and the
# blocks come by in the order of the ring. First the arithmetic of one tile, which is the same in all four versions.

# %%
rank, P, S, H, D, BLOCK = 1, 4, 512, 2, 32, 64
layout = zigzag(S, P)  # which tokens a rank owns: it does not matter before section 5
text = tuple(x.bfloat16() for x in corpus.qkv(S, heads=H, kv_heads=1, head_dim=D))
shards = [layout.shard(text, each) for each in range(P)]
q, blocks = shards[rank][0], [shards[(rank - step) % P][1:] for step in range(P)]
# R rows of queries on this rank, N keys in a block
R, N, SCALE = q.shape[2], blocks[0][0].shape[2], math.log2(math.e) / math.sqrt(D)
truth = oracle.attention(q, *text[1:])
print(f"q {tuple(q.shape)}, a block's k {tuple(blocks[0][0].shape)}")

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
# ln 2 = 0.6931… turns a log₂ into the natural lse. `scale` multiplies the float32 scores. If it were multiplied into a
# bfloat16 q beforehand, that product would be rounded. The block kernel around the tile has one program for 64 rows of one
# head; `group` is how many query heads share a K/V head, here all H.

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
# `record_accesses()` records every load and store of every program. From it we count launches, tiles, and the bytes of
# partials, state and results. q, k and v are left out: the first three versions read the same of them.

# %%
def counted(steps, *args):
    """Run it; return (out, tiles visited, for each launch the bytes (read, written) for rows)."""
    with record_accesses() as accesses:
        out = steps(*args)
    launches, before = [], False
    for a in accesses:
        first = a.program == (0, 0, 0)
        if first and not before:  # back at program (0, 0, 0): a new launch
            launches.append({"load": 0, "store": 0})
        before = first
        if a.argument not in ("Q", "K", "V", "PROGRAMS", "SEGMENTS"):
            launches[-1][a.kind] += len(a.offsets) * (2 if a.argument == "OUT" else 4)
    tile_count = sum(a.argument == "K" for a in accesses)
    return out, tile_count, [(each["load"], each["store"]) for each in launches]

# %%
ladder = {}


def report(name, out, tile_count, launches, expected=truth):
    right = torch.from_numpy(expected.out)
    error = (out.double() - right).norm() / right.norm()
    ladder[name] = launches
    row_bytes = sum(read + written for read, written in launches)
    print(f"{name:16} {len(launches)} launches, {tile_count:2} tiles, {row_bytes / 1024:4.0f} KiB "
          f"for rows, error below 0.5 %: {bool(error < 5e-3)}")
    return row_bytes

# %%
apart = report("block, merge", *counted(separate, q, blocks))
print("4 steps of 4·(D + 1) float32 numbers a row:", 4 * H * R * 4 * (D + 1) * 4 == apart)

# %% [markdown]
# K and V are not in this count: every program reads them, and programs that run side by side share them through the cache.
# The state of a row is read by one program only, so no cache helps. There are four passes over something as large as out:
# the block kernel writes its partial; the merge reads the partial, reads the running out, and writes the new one.
#
# ## 3 · Second version: carry the state
#
# The block kernel begins with nothing, works, and divides. The merge weighs two results that have been divided. Both
# divisions can go: let the kernel *begin with the state of the step before*. Then a further block is nothing but further
# tiles.

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

# %%
def nothing_seen(q, dtype=torch.float32):
    acc = q.new_zeros(q.shape, dtype=dtype)
    return acc, acc.new_full(q.shape[:-1], -math.inf), acc.new_zeros(q.shape[:-1])


def carried(q, blocks):
    state = nothing_seen(q)
    for k, v in blocks:
        carry_kernel[(triton.cdiv(R, BLOCK), H)](q, k, v, *state, H, R, N, SCALE, D, BLOCK)
    acc, _, total = state
    return (acc / total[..., None]).to(q.dtype)


carry = report("carried state", *counted(carried, q, blocks))
formula = P * state_bytes(R, H, D)
print(f"{apart / carry:.2f} times fewer bytes for rows; the formula:", formula == carry)

# %% [markdown]
# One launch instead of two, nearly half the bytes, and no merge at all. (The last division, in torch, is not counted; the
# next version includes it.)
#
# Is carrying always the cheapest? Suppose that a step writes its *normalised* out in bfloat16, and that all P partials are
# kept and merged in one pass at the end.

# %% tags=["nbval-ignore-output"]
predict("12.partials", "P = 8. Keeping P bfloat16 partials and merging them once moves, compared "
        "with the carried float32 state, …", choices=["fewer bytes", "as many", "more bytes"])

# %%
def carried_bytes(P, D, e=4):
    """A row's state through P steps; the first reads nothing, the last writes out and lse."""
    return (2 * P - 2) * (D + 2) * e + 2 * D + 4


def kept_bytes(P, D, e):
    """P partials of a row, e bytes an element, written and read once; the result written."""
    return 2 * P * (e * D + 4) + 2 * D + 4


print("bytes a row    carried float32   kept bfloat16   kept float32")
for ranks in (2, 3, 8):
    row = carried_bytes(ranks, 128), kept_bytes(ranks, 128, 2), kept_bytes(ranks, 128, 4)
    print(f"P = {ranks}          {row[0]:15,} {row[1]:15,} {row[2]:14,}")
fewer = kept_bytes(8, 128, 2) < carried_bytes(8, 128)
compare("12.partials", "fewer bytes" if fewer else "more bytes")

# %% [markdown]
# **Fewer**, from P = 3 on. But the dtype alone makes the difference: partials kept in float32 move more bytes than a carried
# float32 state. And the price is memory: P · (2·D + 4) bytes a row, against 4·(D + 2). With long shards the bytes moved do
# not matter (section 1), but the memory held does. So the state is carried, and in float32 (section 6).
#
# ## 4 · Third version: the first and the last step
#
# Before the first step no state has been written, and after the last one none will be read. `FIRST` and `LAST` are
# `tl.constexpr`: Triton makes a kernel of its own for each combination, in which the other branch does not exist.

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


@triton.jit
def finish(acc, m, total, ACC, M, TOTAL, OUT, at, wide, own, LAST: tl.constexpr):
    if LAST:
        total = tl.where(total == 0.0, 1.0, total)  # a row that saw nothing: out 0
        tl.store(OUT + wide, acc / total[:, None], mask=own[:, None])
    else:
        tl.store(ACC + wide, acc, mask=own[:, None])
        tl.store(M + at, m, mask=own)
        tl.store(TOTAL + at, total, mask=own)

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

# %%
def fused(q, blocks):
    state, out = [x.fill_(math.nan) for x in nothing_seen(q)], torch.full_like(q, math.nan)
    for step, (k, v) in enumerate(blocks):
        ends = step == 0, step == len(blocks) - 1
        ends_kernel[(triton.cdiv(R, BLOCK), H)](
            q, k, v, *state, out, H, R, N, SCALE, D, BLOCK, *ends)
    return out


ends = report("first and last", *counted(fused, q, blocks))
print("NaN left in out:", bool(fused(q, blocks).isnan().any()))
print("the formula:", H * R * (carried_bytes(P, D) - 4) == ends, " (no lse here, hence −4)")

# %%
show(ring_step.traffic(ladder, P), ring_step.describe_traffic(ladder, P))

# %% [markdown]
# State and out were filled with NaN beforehand. Do the same in your own tests: fresh memory is often zero by luck, and then
# a first step that reads it looks right for weeks.
#
# ## 5 · Fourth version: tiles by a table
#
# Now the causal mask. The kernel could load the positions of its queries and keys and compare them in every tile. But which
# tiles need that depends only on the **layout** (lesson 08). Zig-zag, for one, cuts the sequence into 2P stretches and gives
# rank r the r-th and the r-th from the end.
#
# A rank's rows are ordered in *runs*, stretches of evenly spaced tokens. With zig-zag its early stretch comes first, then
# its late one. With token fold the tokens of the forward rounds come first, then those of the backward rounds:

# %%
print("zig-zag, rank 0:   ", zigzag(32, 4).positions(0).tolist())
print("token fold, rank 0:", dealt(32, 4, chunk=1, folded=True).positions(0).tolist())

# %% [markdown]
# A tile of the score matrix is then visible as a whole, hidden as a whole, or cut by the mask. The pictures use 1,024
# tokens, so that there are more tiles.

# %% tags=["nbval-ignore-output"]
predict("12.masked", "1,024 tokens, 4 ranks, zig-zag, tiles of 64 × 64: how many tiles of rank 1 "
        "does the causal mask cut, all four steps together?", unit="tiles")

# %%
zig = [ring_step.step_picture(zigzag(1024, 4), 1, step) for step in range(4)]
for picture in zig:
    kinds = {"full": picture.count("full"), "masked": picture.count("masked"),
             "skipped": picture.skipped}
    idle = picture.rows_without_program
    print(f"step {picture.step}, keys of rank {picture.origin}: {kinds}, "
          f"rows without a program: {idle}")
compare("12.masked", sum(picture.count("masked") for picture in zig))

# %% [markdown]
# **Four**: the diagonal of its own block, in step 0, and none after that. Rank 1 owns stretches 1 and 6 of 0 … 7. Let
# a block with stretches 0 and 7 arrive: all of rank 1's rows see stretch 0, and none sees 7. Let one with 3 and 4 arrive:
# the early half of the rows sees neither, the late half both. In step 3 the early rows see nothing either, but they keep a
# program, because this is the last step and out must be written. So its line ends with `rows without a program: 0`. In
# general L/b tiles are cut, for L tokens a rank and tiles of b tokens, whatever P is.
#
# Here are all four layouts at one step; in a live notebook, move the sliders over step and rank.

# %% tags=["nbval-ignore-output"]
ring_step.player()

# %%
four = ring_step.layouts_at(1024, 4, rank=1, step=1)
show(ring_step.grid(four), ring_step.describe_grid(four))

# %%
later = ring_step.layouts_at(1024, 4, rank=1, step=2)
show(ring_step.grid(later), ring_step.describe_grid(later))

# %% [markdown]
# Striped and token fold mask diagonals in *every* step; contiguous, after the first step, has all tiles or none. In
# token fold two runs of queries meet two runs of keys, in four quarters, each with a diagonal of its own: eight
# masked tiles in place of four.
#
# The pictures are drawn from two tables that the kernels get. A line of `PROGRAMS` says which rows a program owns and which
# lines of `SEGMENTS` it visits; the longest walks come first. A line of `SEGMENTS` says from where to where a segment
# of keys goes, up to which key no mask is needed, and a *shift*: row i sees key j where **j ≤ i + shift**. At 512
# tokens, zig-zag, step 0:

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


print_tables(launch_tables(layout, rank, every_row=True))

# %% [markdown]
# Both shifts are 0: row i and key i are the same token. Not so in token fold, here in step 1 (the first picture, on the
# right). Follow row 100:

# %%
fold = dealt(S, P, chunk=1, folded=True)
visits = launch_tables(fold, 0, every_row=False)
print_tables(visits)
row, own, keys_at = 100, fold.positions(rank), fold.positions(0)
print(f"\nrow {row} is token {own[row]}")
for number in (2, 3):
    shift = visits.segments[number, 3].item()
    last = row + shift
    print(f"segment {number}: {row} − {-shift} = {last}; key {last} is token {keys_at[last]}, "
          f"key {last + 1} token {keys_at[last + 1]}")

# %% [markdown]
# Row 100 is in program 1, which visits segments 2 and 3. In each, the last key that it sees is the last token before
# its own. So the kernel loads no position, and another layout is only another table:

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
        start, split = tl.load(segment), tl.load(segment + 1)
        stop, shift = tl.load(segment + 2), tl.load(segment + 3)
        for key in range(start, stop, BLOCK):
            keys = key + tl.arange(0, BLOCK)
            inside = keys < stop
            visible = inside[None, :]
            if key >= split:
                visible = visible & (keys[None, :] <= rows[:, None] + shift)
            acc, m, total = add_tile(acc, m, total, q, K, V, base, keys, inside, visible, scale, D)
    finish(acc, m, total, ACC, M, TOTAL, OUT, at, wide, own, LAST)

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


whole = oracle.attention(*text, causal=True)
mine = oracle.Result(layout.shard(whole.out, rank), layout.shard(whole.lse, rank, dim=-1))
table = report("causal, table", *counted(by_table, q, blocks), mine)
print("tiles if every one were computed and then masked:", P * H * (R // BLOCK) * (N // BLOCK))

# %%
show(ring_step.traffic(ladder, P), ring_step.describe_traffic(ladder, P))

# %% [markdown]
# Hidden tiles are not computed and not even read. Half of the rows see nothing in step 2 and have no program there, so their
# state is not moved: 186 KiB in place of 220.
#
# Two details cost people days. `i` is the row of the *shard*, not of the tile. And a program must not write beyond its
# `row_stop`, because the rows after it belong to another program. Two programs would then store the same row. Whichever
# stores last wins, and the other's tiles are lost (or counted twice, if it read the row after the first store).
#
# ## 6 · Why the state is float32
#
# A state in bfloat16 would halve its bytes. Such numbers have eight significant bits, so each store rounds by up to 0.4 %.
# Must all three parts be float32? acc has D numbers a row, m and total one each. And m is only a point of reference: the
# weights relative to *any* number near the largest score give the same result.

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

# %%
with styled():
    figure = new_figure((6.4, 3.2))
    ax = figure.subplots()
    for part, mark, color, va in (("none", "o-", INK, "center"), ("acc", "s--", BLUE, "bottom"),
                                  ("m", "^-.", RED, "center"), ("total", "d:", GREEN, "top")):
        ax.plot(RANKS, [100 * value for value in errors[part]], mark, color=color)
        ax.text(8.2, 100 * errors[part][-1], f"{part} in bfloat16", va=va, color=color)
    ax.set(xlabel="P (blocks)", ylabel="relative error of out (%)", xlim=(1.5, 11), ylim=(0, None),
           xticks=RANKS, title="Error of the result, by the part of the state that is rounded")
show(figure, "Error of the result with one part of the state in bfloat16, over the number of "
     "blocks. With none it stays near 0.07 percent. With acc or total it climbs to about 0.3 "
     "percent at P = 8, and with m to 0.66 percent.")

# %% [markdown]
# **m**, although any number near the maximum would do. acc and total were added up relative to the *unrounded* m. If m is off
# by δ afterwards, the weight of everything that was seen is off by a factor of 2^δ. bfloat16 numbers between 8 and 16 are
# 1/16 apart, so δ is up to 1/32, and the weight is off by up to 2 %. All three curves climb, because further steps round again. So acc,
# m and total are float32 between steps. (The flat curve is the error of rounding the weights to bfloat16 before the product
# with V; it does not grow with P.) The *wire* may be bfloat16, or less, as K and V are rounded only once; the exercise sends int8.
#
# ## 7 · The same as ringlab's
#
# `block="triton"` gives a ring step to kernels like yours. Four virtual ranks, zig-zag, real text in float32, forward and
# gradients against the float64 oracle of the whole sequence:

# %%
def program(ring, q, k, v, dout):
    """This rank's out and the gradients of its q, k, v."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, ring=ring, layout=layout, causal=True, block="triton")
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


torch.manual_seed(0)
exact = corpus.qkv(S, heads=H, kv_heads=1, head_dim=D)
dout = torch.randn_like(exact[0])
inputs = [layout.shard((*exact, dout), each) for each in range(P)]
run = VirtualCluster(P).run(lambda ring: program(ring, *inputs[ring.rank]))

# %%
forward = oracle.attention(*exact, causal=True)
backward = oracle.gradients(*exact, dout, causal=True)
rights = {"out": forward.out, "dq": backward.dq, "dk": backward.dk, "dv": backward.dv}
for (name, right), got in zip(rights.items(), layout.unshard(run.results), strict=True):
    error = (got - torch.from_numpy(right)).abs().max() / abs(right).max()
    print(f"{name:3} relative error below 1e-5: {bool(error < 1e-5)}")

# %% [markdown]
# ## 8 · Read the shipped kernels
#
# `ringlab/blocks/triton/kernels.py` holds three kernels. You can read `forward_step` now: it is the fourth version, with
# strides, head dims that are not powers of two, and 64-bit offsets, as a long sequence has more than 2³¹ elements. New names:
#
# - `_attend` is `add_tile`, `unit` its `scale`; `_tile` loads a tile of k or v;
# - `k_base`, `v_base`: the first token of a K/V head; `k_l`, `v_l`: the stride from a token to the next.
#
# (Two options, SOFTCAP and DROPOUT, are not printed.)

# %% tags=["nbval-ignore-output"]
OPTIONS = " inner, rows_at, KEYS_AT, draw,", ", SOFTCAP, DROPOUT"  # arguments


def excerpt(kernel, first, last):
    """Print a kernel from the line that begins with `first` to the one before `last`."""
    lines = inspect.getsource(kernel.fn).splitlines()
    starts = [line.strip() for line in lines]
    begin = next(n for n, line in enumerate(starts) if line.startswith(first))
    ends = (n for n, line in enumerate(starts) if n > begin and last and line.startswith(last))
    text = "\n".join(lines[begin:next(ends, None)])
    for arguments in OPTIONS:
        text = text.replace(arguments, "")
    print(re.sub(r"    if (SOFTCAP|DROPOUT):\n(        .*\n)+", "", text))


excerpt(kernels.forward_step, "for segment", "offsets")

# %% [markdown]
# There are two loops over one body: `False` and `True` say whether it is masked. They are constants, so the compiler makes
# the first loop without a comparison. `NON_FINITE` says that v may hold inf or NaN, which a weight of 0 does not remove.
#
# The backward needs, for each tile, q, k, v, dO, and two numbers a row: the **final** lse and **one** delta = rowsum(dO ∘ O),
# computed once before the ring starts. There is nothing to merge: the weights, e^(score − lse), are right at once, whatever other
# blocks hold. (The kernel takes powers of two: its `lse` and `unit` contain log₂e.) So dQ is a plain sum over
# the steps, carried like acc. One tile of it, in the letters of lesson 09: `p` are the weights W, `dp` is dO·Vᵀ, `ds` is dS.

# %% tags=["nbval-ignore-output"]
excerpt(kernels._add_to_dq, "keys =", None)

# %% [markdown]
# Why two backward kernels? dQ is a sum over keys; dK and dV are sums over rows. A program that owns rows can add up dQ in
# registers, but many programs would have to add to the same dK, by atomics, in an order that changes from run to run.
# `backward_dkv` owns *keys* instead, and walks over the rows, through all query heads that share its K/V head. It computes the
# weights a second time. In return every sum has one owner and one order.
#
# ## 9 · What a compiler makes of it
#
# The interpreter shows what a kernel does, not how fast it is. Without a GPU one can still ask the compiler, as
# `ringlab kernels --offline` does for every shipped configuration. A **configuration** is the size of a tile, written rows ×
# keys (in the sources BLOCK_M × BLOCK_N), the number of **warps**, groups of 32 threads among which a program's work is
# divided, and the number of **stages**, the K and V tiles that are in flight at once. Here is the shipped one for an
# H100-class chip (sm_90), then with half as many warps.

# %% tags=["nbval-ignore-output"]
shipped = configs.choose("forward_step", "sm_90", 128, "bfloat16")
fewer_warps = replace(shipped, num_warps=shipped.num_warps // 2)
jobs = [offline.Job("forward_step", "sm_90", 128, "bfloat16", config)
        for config in (shipped, fewer_warps)]
for job, made in zip(jobs, offline.compile_all(jobs), strict=True):
    shared = f"{made.shared_bytes / 1024:.0f} KiB shared"
    print(f"{job.config!s:28} {made.registers} registers, {made.spill_bytes:3} bytes spilled, "
          f"{shared}, {made.tensor_core_count} × {made.tensor_core}")

# %% [markdown]
# Each *thread* holds its part of acc, of the scores and of the weights in **registers**, and it can have at most 255. What
# does not fit is **spilled**: written to memory, and read again where it is needed. With half as many warps each thread has
# twice as much to hold, and 464 bytes of each thread do not fit.
#
# q and the K and V tiles are in **shared memory**, from which this chip's matrix instruction, **wgmma**, reads them. The 128
# KiB are 3 stages × 32 KiB, and 32 KiB of q. A program may use 227 KiB. One wgmma multiplies 64 rows, over a depth of 16. So
# a tile takes 8 for q·kᵀ, whose depth is D = 128, and 4 for weights times v, whose depth is 64 keys; in the two loops, 24.
# Four warps execute one together: eight warps share the tile's 128 rows, four need every instruction twice.
#
# Whether a kernel is fast, only a GPU can say; lesson 13 shows how to measure.
#
# ## Recap
#
# - A ring step moves its K/V block once, and a state of D + 2 float32 numbers for each row and head **both ways**: twice
#   the block in bfloat16, more with grouped heads.
# - Block and merge apart: two launches, four passes over out. State carried: one launch, two passes; none to read on the
#   first step, and out instead of state on the last.
# - Layouts are tables: rows of a program, segments of keys, a shift. The causal mask cuts L/b tiles of a zig-zag rank in all
#   steps together.
# - The state is float32, m above all, or the error grows with P.
# - The backward has nothing to merge: global lse, one delta, dQ owned by rows, dK and dV owned by keys.
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
