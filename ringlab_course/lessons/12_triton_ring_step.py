# %% [markdown]
# # 12 · The Triton ring step
#
# **Afterwards you can** fuse block attention and merge in one kernel, carry its state between the steps of the ring, say
# what a step reads and writes, and read the kernels that ringlab ships.
#
# **You need first** [lesson 04](04_triton_from_zero.ipynb), a flash kernel in Triton, and
# [lesson 05](05_emulated_ring.ipynb), the ring and, in its section 7, contiguous and zig-zag layouts.
#
# **Minutes** 75 to read and run; the exercise takes another 90.
#
# So far a step of the ring was two things: attention on the block that is here, then a merge. On a GPU that is two
# kernels, and between them everything goes through memory. In this lesson the two become one kernel, in four small steps.
# Kernels run in Triton's interpreter, on the CPU, even where there is a GPU, because the interpreter can *count*. Its
# seconds mean nothing; bytes, tiles and launches do.

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

from ringlab import VirtualCluster, oracle, ring_attention, zigzag
from ringlab.blocks.triton import configs, kernels, offline
from ringlab.blocks.triton.accesses import record_accesses
from ringlab.blocks.triton.visits import row_visits
from ringlab.plan import tiles
from ringlab_course.figures import ring_step
from ringlab.viz.style import new_figure, show, styled

# %% [markdown]
# ## 1 · What one step reads and writes
#
# A rank's rows go through P steps. What they know in between is the state of lesson 02: `acc`, the sum of weights times
# values, *not* normalised; `m`, the largest score; `total`, the sum of the weights. D + 2 float32 numbers for each row of
# each head. If the state lives in memory between the steps, every step reads it and writes it back.

# %% tags=["nbval-ignore-output"]
predict("12.bytes", "D = 128, as many K/V heads as query heads. A step reads a bfloat16 K/V block, and reads and writes the "
        "float32 state of equally many rows. How many bytes of state for one byte of K/V?", unit="bytes")

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
# moved both ways. People count what travels over the wire and forget this. Is it a problem? Per row and head a step
# computes 4·n·D FLOPs for n keys, and moves 8·(D + 2) bytes of state. Take an H200's peaks from its data sheet, 989 TFLOP/s
# and 4.8 TB/s; nothing here was measured.

# %%
for n in (512, 2048, 8192, 32768):
    compute, move = 4 * n * 128 / 989e12, 8 * 130 / 4.8e12
    print(f"n = {n:6,} keys in a block: moving the state takes {move / compute:6.1%} of the arithmetic's time")

# %% [markdown]
# With few tokens per rank the state weighs as much as the attention; with tens of thousands it is noise. So: move it
# once per step, not more. Let us see what "not more" means.
#
# ## 2 · Rung one: a block kernel, and a merge
#
# Real text, 512 tokens on 4 ranks, 2 query heads on 1 K/V head, bfloat16. We play rank 1: its queries stay, the blocks
# come by in the order of the ring. First the arithmetic of one tile, the same on all rungs.

# %%
rank, P, S, H, D, BLOCK = 1, 4, 512, 2, 32, 64
layout = zigzag(S, P)
text = tuple(x.bfloat16() for x in corpus.qkv(S, heads=H, kv_heads=1, head_dim=D))
shards = [layout.shard(text, each) for each in range(P)]
q, blocks = shards[rank][0], [shards[(rank - step) % P][1:] for step in range(P)]
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
# The exponentials are powers of two, which is what the hardware has; `scale` holds log₂e. It multiplies the float32 scores:
# folded into a bfloat16 q it would be rounded. Around it the block kernel, one program for 64 rows of one head.

# %%
@triton.jit
def block_kernel(Q, K, V, PART, PART_LSE, group, R, N, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    head, rows = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own, at = rows < R, head * R + rows
    wide = at[:, None] * D + tl.arange(0, D)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc = tl.zeros((BLOCK, D), tl.float32)
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        inside = keys < N
        acc, m, total = add_tile(acc, m, total, q, K, V, head // group * N, keys, inside, inside[None, :], scale, D)
    tl.store(PART + wide, acc / total[:, None], mask=own[:, None])
    tl.store(PART_LSE + at, (m + tl.math.log2(total)) * 0.6931471805599453, mask=own)

# %%
@triton.jit
def merge_kernel(RUN, RUN_LSE, PART, PART_LSE, count, D: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own, wide = at < count, at[:, None] * D + tl.arange(0, D)
    run, part = tl.load(RUN + wide, mask=own[:, None], other=0.0), tl.load(PART + wide, mask=own[:, None], other=0.0)
    a, b = tl.load(RUN_LSE + at, mask=own, other=0.0), tl.load(PART_LSE + at, mask=own, other=0.0)
    top = tl.maximum(a, b)
    wa, wb = tl.exp(a - top), tl.exp(b - top)
    tl.store(RUN + wide, (run * wa[:, None] + part * wb[:, None]) / (wa + wb)[:, None], mask=own[:, None])
    tl.store(RUN_LSE + at, top + tl.log(wa + wb), mask=own)


def separate(q, blocks):
    """All steps, block and merge apart; returns out in the dtype of q."""
    part, run = q.new_empty(q.shape, dtype=torch.float32), q.new_zeros(q.shape, dtype=torch.float32)
    part_lse, run_lse = part.new_empty(part.shape[:-1]), part.new_full(part.shape[:-1], -math.inf)
    for k, v in blocks:
        block_kernel[(triton.cdiv(R, BLOCK), H)](q, k, v, part, part_lse, H, R, N, SCALE, D, BLOCK)
        merge_kernel[(triton.cdiv(H * R, BLOCK),)](run, run_lse, part, part_lse, H * R, D, BLOCK)
    return run.to(q.dtype)

# %% [markdown]
# `record_accesses()` writes down every load and store of every program. From it we count launches, tiles, and the bytes of
# everything that belongs to rows: partials, state, results.

# %%
def counted(steps, *args):
    """Run it; return (out, launches, tiles visited, bytes moved for rows)."""
    with record_accesses() as accesses:
        out = steps(*args)
    began = [a.program == (0, 0, 0) for a in accesses]
    launches = sum(now and not before for now, before in zip(began, [False, *began], strict=False))
    tile_count = sum(a.argument == "K" for a in accesses)
    rows = [a for a in accesses if a.argument not in ("Q", "K", "V", "PROGRAMS", "SEGMENTS")]
    return out, launches, tile_count, sum(len(a.offsets) * (2 if a.argument == "OUT" else 4) for a in rows)


ladder = []


def report(name, out, launches, tile_count, row_bytes, expected=truth):
    error = (out.double() - torch.from_numpy(expected.out)).norm() / torch.from_numpy(expected.out).norm()
    ladder.append(f"{name:16} {launches} launches, {tile_count:2} tiles, {row_bytes / 1024:4.0f} KiB for rows")
    print(f"{ladder[-1]}, error below 0.5 %: {bool(error < 5e-3)}")
    return row_bytes

# %%
apart = report("block, merge", *counted(separate, q, blocks))
print("the formula, 4 steps of 4·(D + 1) float32 numbers a row:", 4 * H * R * 4 * (D + 1) * 4 == apart)

# %% [markdown]
# K and V are not in this count: every program reads them, and programs that run side by side share them through the cache.
# State has one reader. Four passes over something as large as out: the block kernel writes its partial, the merge reads it, reads the running out,
# and writes it. Two launches a step.
#
# ## 3 · Rung two: carry the state
#
# The block kernel begins with nothing, works, and divides. The merge weighs two divided things. Both divisions can go:
# let the kernel *begin with the state of the step before*. A further block is then no more than further tiles. Here is
# the whole change.

# %%
@triton.jit
def carry_kernel(Q, K, V, ACC, M, TOTAL, group, R, N, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    head, rows = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own, at = rows < R, head * R + rows
    wide = at[:, None] * D + tl.arange(0, D)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc = tl.load(ACC + wide, mask=own[:, None], other=0.0)
    m = tl.load(M + at, mask=own, other=-float("inf"))
    total = tl.load(TOTAL + at, mask=own, other=0.0)
    for start in range(0, N, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        inside = keys < N
        acc, m, total = add_tile(acc, m, total, q, K, V, head // group * N, keys, inside, inside[None, :], scale, D)
    tl.store(ACC + wide, acc, mask=own[:, None])
    tl.store(M + at, m, mask=own)
    tl.store(TOTAL + at, total, mask=own)

# %%
def changes(old, new):
    """Print the lines that differ between two kernels."""
    lines = [inspect.getsource(kernel.fn).splitlines()[1:] for kernel in (old, new)]
    print("\n".join(line[:118] for line in difflib.ndiff(*lines) if line[0] in "+-"))


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
print(f"bytes for rows: {apart / carry:.2f} times fewer; formula:", P * state_bytes(R, H, D) == carry)

# %% [markdown]
# One launch instead of two, half of the bytes, and not one line of merge. (The last division, in torch, is not counted; the
# next rung takes it in.)
#
# Is carrying always the cheapest? Suppose a step writes its *normalised* out in bfloat16, and all P partials are kept and
# merged in one pass at the end.

# %% tags=["nbval-ignore-output"]
predict("12.partials", "P = 8. Keeping P bfloat16 partials and merging them once moves, against the carried float32 state, …",
        choices=["fewer bytes", "as many", "more bytes"])

# %%
def carried_bytes(P, D):
    """A row's state through P steps; the first reads nothing, the last writes out and lse."""
    return (2 * P - 2) * (D + 2) * 4 + 2 * D + 4


def kept_bytes(P, D):
    """P partials of a row written, then read once, and the result written."""
    return 2 * P * (2 * D + 4) + 2 * D + 4


for ranks in (2, 3, 8):
    print(f"P = {ranks}: carried {carried_bytes(ranks, 128):6,} bytes a row, kept {kept_bytes(ranks, 128):6,}")
compare("12.partials", "fewer bytes" if kept_bytes(8, 128) < carried_bytes(8, 128) else "more bytes")

# %% [markdown]
# **Fewer**: from P = 3 on, carrying float32 costs more traffic than merging bfloat16 partials once. What it buys is memory:
# kept partials are P times as large as out, and grow with the ring, which is what the ring was there to avoid. And each kept
# partial is rounded once. With long shards neither traffic shows; memory does. So the state is carried.
#
# ## 4 · Rung three: the first and the last step
#
# Nobody has written a state before the first step, and nobody reads it after the last. `FIRST` and `LAST` are
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
def ends_kernel(Q, K, V, ACC, M, TOTAL, OUT, group, R, N, scale,
                D: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    head, rows = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own, at = rows < R, head * R + rows
    wide = at[:, None] * D + tl.arange(0, D)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc, m, total = begin(ACC, M, TOTAL, at, wide, own, D, BLOCK, FIRST)
    for start in range(0, N, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        inside = keys < N
        acc, m, total = add_tile(acc, m, total, q, K, V, head // group * N, keys, inside, inside[None, :], scale, D)
    finish(acc, m, total, ACC, M, TOTAL, OUT, at, wide, own, LAST)

# %%
def fused(q, blocks):
    state, out = [x.fill_(math.nan) for x in nothing_seen(q)], torch.full_like(q, math.nan)
    for step, (k, v) in enumerate(blocks):
        first, last = step == 0, step == len(blocks) - 1
        ends_kernel[(triton.cdiv(R, BLOCK), H)](q, k, v, *state, out, H, R, N, SCALE, D, BLOCK, first, last)
    return out


ends = report("first and last", *counted(fused, q, blocks))
print("NaN left in out:", bool(fused(q, blocks).isnan().any()))
print("formula:", H * R * (carried_bytes(P, D) - 4) == ends, " no lse here, hence the −4")
changes(carry_kernel, ends_kernel)

# %% [markdown]
# State and out were filled with NaN beforehand. In your own tests do the same: fresh memory is often zero by luck, and a first
# step that reads it then looks right for weeks.
#
# ## 5 · Rung four: tiles by the table
#
# Now the causal mask. The kernel could load positions and compare them in every tile. But the plan of
# lesson 05's layouts says more: most tiles are visible as a whole or not at all.

# %% tags=["nbval-ignore-output"]
predict("12.masked", "1,024 tokens, 4 ranks, zig-zag, tiles of 64 × 64: how many tiles of one rank need a mask, all four steps "
        "together?", unit="tiles")

# %%
zig = [ring_step.step_picture(zigzag(1024, 4), 1, step) for step in range(4)]
for picture in zig:
    kinds = {"full": picture.count("full"), "masked": picture.count("masked"), "skipped": picture.skipped}
    print(f"step {picture.step}, keys of rank {picture.origin}: {kinds}, rows without a program: {picture.rows_without_program}")
compare("12.masked", sum(picture.count("masked") for picture in zig))

# %% [markdown]
# **Four**: the diagonal of its own block, in step 0, and none after that. In later steps a zig-zag rank sees half of the
# keys with all rows, or all keys with half of its rows. In general it is L/b tiles of b tokens for L tokens a rank, whatever
# P is. Here are four layouts at the same step; in a live notebook move the sliders over step and rank. Two of them are new:
#
# - **contiguous**: rank r owns the r-th stretch of S/P tokens;
# - **striped**: rank r owns tokens r, r + P, r + 2P, …, dealt like cards;
# - **zig-zag**: of 2P stretches rank r owns the r-th and the r-th from the end;
# - **token fold**: dealt like cards, but back and forth: 0, 1, …, P − 1, then P − 1, …, 1, 0, and again.

# %% tags=["nbval-ignore-output"]
ring_step.player()

# %%
four = ring_step.layouts_at(1024, 4, rank=1, step=1)
show(ring_step.grid(four), ring_step.describe_grid(four))

# %%
later = ring_step.layouts_at(1024, 4, rank=1, step=2)
show(ring_step.grid(later), ring_step.describe_grid(later))

# %% [markdown]
# Compare the steps: striped and token fold mask diagonals in *every* one; contiguous, after the first step, gives all or
# nothing. In step 2 the first half of a zig-zag rank's rows sees no key: no program there, no lines. The picture is drawn
# from the tables that the kernels get. `PROGRAMS` says which rows a program owns and which segments of keys it visits, the
# longest walk first, so that no long one begins when the others are done; `SEGMENTS` says from where to where, up to which
# key no mask is needed, and a *shift*: row i sees key j where **j ≤ i + shift**. No position is loaded, and a layout is
# nothing but another table.

# %%
visits = row_visits(tiles(layout, rank, rank), R, BLOCK, BLOCK, True, q.device)
print("programs: rows from, to, segments from, to\n", visits.programs.tolist())
print("segments: keys from, unmasked up to, to, shift\n", visits.segments.tolist())

# %%
@triton.jit
def table_kernel(Q, K, V, ACC, M, TOTAL, OUT, PROGRAMS, SEGMENTS, group, R, N, scale,
                 D: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    head, program = tl.program_id(1), PROGRAMS + 4 * tl.program_id(0)
    rows, row_stop = tl.load(program) + tl.arange(0, BLOCK), tl.load(program + 1)
    own, at = rows < row_stop, head * R + rows
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
            if key >= split:  # in the shipped kernel two loops, so that the first has no trace of a mask
                visible = visible & (keys[None, :] <= rows[:, None] + shift)
            acc, m, total = add_tile(acc, m, total, q, K, V, head // group * N, keys, inside, visible, scale, D)
    finish(acc, m, total, ACC, M, TOTAL, OUT, at, wide, own, LAST)

# %%
def by_table(q, blocks):
    state, out = [x.fill_(math.nan) for x in nothing_seen(q)], torch.full_like(q, math.nan)
    for step, (k, v) in enumerate(blocks):
        first, last = step == 0, step == len(blocks) - 1
        met = tiles(layout, rank, (rank - step) % P)
        programs, segments = row_visits(met, R, BLOCK, BLOCK, first or last, q.device)
        table_kernel[(len(programs), H)](q, k, v, *state, out, programs, segments, H, R, N, SCALE, D, BLOCK, first, last)
    return out


whole = oracle.attention(*text, causal=True)
mine = oracle.Result(layout.shard(whole.out, rank), layout.shard(whole.lse, rank, dim=-1))
table = report("causal, table", *counted(by_table, q, blocks), mine)
print("tiles if every one were computed and then masked:", P * H * (R // BLOCK) * (N // BLOCK))

# %%
changes(ends_kernel, table_kernel)

# %%
print(*ladder, sep="\n")

# %% [markdown]
# Hidden tiles are not computed, not read, not even visited. And a step leaves rows alone that see nothing in it: they have no
# program, and their state is not moved. That is where the last bytes went. Only the first and the last step have a program
# for every row, for somebody has to write each of them.
#
# Two details cost people days. `i` is the row of the *shard*, not of the tile. And a program must not write beyond its
# `row_stop`: the rows behind it belong to a neighbour, which would add its tiles to a state that has them already.
#
# ## 6 · Why the state is float32
#
# Half the bytes would do if the state were bfloat16. Its numbers have eight significant bits, so each store rounds by up to 0.4 %.

# %% tags=["nbval-ignore-output"]
predict("12.state", "The state in bfloat16 between steps. From P = 2 to P = 16 blocks, the error of the result …",
        choices=["stays the same", "grows by half or more", "averages out"])

# %%
def drift(P, dtype):
    """Relative error of out after P blocks of 128 keys, with the state in `dtype` between the steps."""
    torch.manual_seed(0)
    q, out = torch.randn(1, H, R, D).bfloat16(), torch.empty(1, H, R, D)
    blocks = [[torch.randn(1, 1, N, D).bfloat16() for _ in "kv"] for _ in range(P)]
    state = nothing_seen(q, dtype)
    for step, (k, v) in enumerate(blocks):
        ends_kernel[(triton.cdiv(R, BLOCK), H)](q, k, v, *state, out, H, R, N, SCALE, D, BLOCK, step == 0, step == P - 1)
    right = torch.from_numpy(oracle.attention(q, *(torch.cat(x, 2) for x in zip(*blocks, strict=True))).out)
    return ((out - right).norm() / right.norm()).item()

# %%
RANKS = (2, 4, 8, 16)
errors = {str(dtype)[6:]: [drift(ranks, dtype) for ranks in RANKS] for dtype in (torch.float32, torch.bfloat16)}
growth = {name: values[-1] / values[0] for name, values in errors.items()}
print("error at P = 16 over that at P = 2:", {name: round(factor, 1) for name, factor in growth.items()})
compare("12.state", "grows by half or more" if growth["bfloat16"] > 1.5 else "stays the same")

# %%
with styled():
    figure = new_figure((6.4, 3.2))
    ax = figure.subplots()
    for (name, values), mark in zip(errors.items(), ("o-", "s--"), strict=True):
        ax.plot(RANKS, [100 * value for value in values], mark, label=name)
        ax.text(16.4, 100 * values[-1], f"{name} state", va="center")
    ax.set(xlabel="P (blocks)", ylabel="relative error of out (%)", xlim=(1, 21), ylim=(0, None), xticks=RANKS)
show(figure, "Relative error of out against the number of blocks, bfloat16 inputs: a nearly flat line near 0.14 percent with "
     "float32 state; with bfloat16 state a line that starts at twice that and climbs steadily, to 0.7 percent at P = 16.")

# %% [markdown]
# The nearly flat line is the price of bfloat16 weights in front of V, paid once. The other one climbs, because each step rounds what
# the step before rounded. acc, m and total are float32 between steps; the *wire* may be bfloat16, as K and V are rounded only
# once.
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
forward, backward = oracle.attention(*exact, causal=True), oracle.gradients(*exact, dout, causal=True)
for name, got, right in zip(("out", "dq", "dk", "dv"), layout.unshard(run.results),
                            (forward.out, backward.dq, backward.dk, backward.dv), strict=True):
    error = (got - torch.from_numpy(right)).abs().max() / abs(right).max()
    print(f"{name:3} relative error below 1e-5: {bool(error < 1e-5)}")

# %% [markdown]
# ## 8 · Read the shipped kernels
#
# `ringlab/blocks/triton/kernels.py` holds three kernels. You can read `forward_step` now: it is rung four, with strides, head
# dims that are no power of two, and 64-bit offsets, as a long sequence has more than 2³¹ elements. Its heart:

# %% tags=["nbval-ignore-output"]
def excerpt(kernel, first, last):
    """Print the lines of a kernel from the one that begins with `first` to the one before `last`."""
    lines = inspect.getsource(kernel.fn).splitlines()
    begin = next(n for n, line in enumerate(lines) if line.strip().startswith(first))
    end = next((n for n, line in enumerate(lines) if n > begin and last and line.strip().startswith(last)), None)
    print("\n".join(lines[begin:end]))


excerpt(kernels.forward_step, "for segment", "offsets")

# %% [markdown]
# Two loops over one body: the `False` and the `True` say whether it is masked, and are constants, so the compiler makes the
# first without a comparison. `NON_FINITE` says that v may hold inf or NaN, which a weight of 0 does not undo. `SOFTCAP` and
# `DROPOUT` are constants too: what stands under a False one is not compiled. Find `begin`, `split`, `end` and `shift` in the
# tables you printed.
#
# The backward needs, for each tile, q, k, v, dO, and two numbers a row: the **final** lse and **one** delta = rowsum(dO ∘ O),
# computed once before the ring starts. There is nothing to merge: P = e^(S − lse) is right at once, whatever other blocks
# hold. (The kernel takes powers of two: its `lse` comes multiplied by log₂e, and so does its `scale`.) So dQ is a plain sum over the
# steps, carried like acc. One tile of it:

# %% tags=["nbval-ignore-output"]
excerpt(kernels._add_to_dq, "keys =", None)

# %% [markdown]
# Why two backward kernels? dQ sums over keys, dK and dV sum over rows. A program that owns rows can add up dQ in registers, but
# many programs would have to add to the same dK: atomics, in an order that changes from run to run. `backward_dkv` owns *keys*
# instead, and walks over the rows, through all query heads that share its K/V head. It computes P a second time; every sum has
# one owner and one order.

# %% [markdown]
# ## 9 · What a compiler makes of it
#
# The interpreter shows what a kernel does, not how fast. Without a GPU one can still ask the compiler. `ringlab kernels
# --offline` does so for every shipped configuration; here for one, on an H100-class chip (sm_90), then with a key tile twice
# as large, then with half as many warps. It takes some seconds, and runs nothing.

# %% tags=["nbval-ignore-output"]
shipped = configs.choose("forward_step", "sm_90", 128, "bfloat16")
others = [replace(shipped, block_n=2 * shipped.block_n), replace(shipped, num_warps=shipped.num_warps // 2)]
jobs = [offline.Job("forward_step", "sm_90", 128, "bfloat16", config) for config in (shipped, *others)]
for job, made in zip(jobs, offline.compile_all(jobs), strict=True):
    print(f"{job.config!s:28} {made.registers} registers, {made.spill_bytes:3} bytes spilled, "
          f"{made.shared_bytes / 1024:.0f} KiB shared, {made.tensor_core_count} × {made.tensor_core}")

# %% [markdown]
# The first line is the shipped one. Each *thread* holds its part of acc, of the scores and of the weights in **registers**,
# and 255 is the most that a thread can have. What does not fit is **spilled**: written to memory and read again, where it is
# needed. A key tile twice as large means twice as many scores at once: 255 registers, and 8 bytes spilled. Half as many warps
# have twice as much to hold each, and spill far more. q, and the K and V tiles, lie in **shared memory**, from where this
# chip's matrix instruction reads them; `stages` pairs of K and V tiles at once, so that loads run ahead of the products. The
# 128 KiB of the first line are 3 stages × 32 KiB, and 32 KiB of q. A program may use 227 KiB. **wgmma** is the
# matrix instruction of this chip; a kernel without it would leave most of the chip idle.
#
# No spill is necessary for a fast kernel, not sufficient. How fast it is, only a GPU can say: lesson 13.
#
# ## Recap
#
# - A ring step moves its K/V block once, and a state of D + 2 float32 numbers for each row and head **both ways**: twice
#   the block in bfloat16, more with grouped heads.
# - Block and merge apart: two launches, four passes over out. State carried: one launch, two passes; none to read on the first
#   step, out instead of state on the last.
# - Layouts are tables: rows of a program, segments of keys, a shift. Zig-zag masks L/b tiles in all steps together.
# - State is float32, or its error grows with P. Memory that nobody has written is NaN until proven otherwise.
# - The backward has nothing to merge: global lse, one delta, dQ owned by rows, dK and dV owned by keys.
#
# ## Self-check
#
# 1. Why must `finish` not write OUT before the last step, if the last one overwrites it? *(It may: the result is right. It
#    costs a pass over out in every step.)*
# 2. In the last step a causal rank may see nothing of the block that is here. Can its rows go without a program? *(No: somebody
#    has to divide and to write OUT. They have programs without segments.)*
# 3. Your state is right on 2 ranks and wrong on 3. Which step do two ranks not have? *(A middle one, which both reads and writes
#    the state.)*
# 4. Query heads double, K/V heads stay. What happens to the bytes of K/V and of the state? *(K/V stays, the state doubles.)*
#
# Now build it yourself: [exercise 12](../exercises/12_triton_ring_step.ipynb), one tile, the two ends, the step, the table.
