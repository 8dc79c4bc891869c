# %% [markdown]
# # Exercise 12 · The Triton ring step
#
# **You build** the kernel of one ring step in four stages, each of which uses those before: one tile, the first and the
# last step, the whole step in one launch, tiles by a table.
# **You need** [lesson 12](../notebooks/12_triton_ring_step.ipynb). **Minutes** 90.
#
# | stage | function | what is looked at |
# |---|---|---|
# | 12.tile | `tile_step` | the running maximum, rescaling, rows that see nothing |
# | 12.ends | `ends_step` | the first step reads no state, the last one normalises, nothing stays unwritten |
# | 12.step | `ring_step` | several steps, short last tiles, grouped heads, float32 state |
# | 12.table | `table_step` | masks and skips by the table, in every layout; keys that no segment names are never read |
#
# You write what stands inside the kernels. The functions that launch them are given: they launch **once** and return
# tensors. `check` runs your kernels in Triton's interpreter, with or without a GPU, so you may `print` inside them. Keep the
# names of the kernels' parameters: the checks of reads and writes go by them. All tensors are contiguous; D is 16.

# %%
import math
import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from ringlab_course import check, hint, needs_triton

needs_triton()
import triton
import triton.language as tl

from ringlab.blocks.triton.interpreter import repair

repair()  # makes the interpreter's bfloat16 exact
BLOCK_M, BLOCK_N = 16, 16
LOG2E = math.log2(math.e)

# %% [markdown]
# ## 12.tile · One tile
#
# What a program knows of its rows is `acc` (rows, D), the sum of weights times values, **not** normalised; `m` (rows), the
# largest score so far, in base 2; and `total` (rows), the sum of the weights. All are float32. A weight is
# 2^(q·k · scale2 − m), with scale2 = log₂e / √D.
#
# `one_tile` takes that, and one more tile: q (rows, D), k and v (keys, D), and `visible` (rows, keys), which is true where
# a row sees a key. It returns the new (acc, m, total). A row that has seen nothing has acc = 0, m = −∞, total = 0, before and
# after. Weights are multiplied with v in v's dtype; ask `tl.dot` for `input_precision="ieee"`. (This is not checked: the
# interpreter computes in full either way. On a GPU float32 would be rounded to tf32 without it.)

# %% grade="12.tile"
@triton.jit
def one_tile(acc, m, total, q, k, v, visible, scale2):
    """Return (acc, m, total) after one more tile."""
    # BEGIN SOLUTION scores, the new maximum, rescale what was known, add the tile
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
    scores = tl.where(visible, scores, -float("inf"))
    top = tl.maximum(m, tl.max(scores, 1))
    safe = tl.where(top == -float("inf"), 0.0, top)  # −inf − (−inf) would be NaN
    weights, old = tl.math.exp2(scores - safe[:, None]), tl.math.exp2(m - safe)
    acc = acc * old[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, top, total * old + tl.sum(weights, 1)
    # END SOLUTION


@triton.jit
def tile_kernel(Q, K, V, VISIBLE, ACC, M, TOTAL, scale2, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows, keys, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    acc, m, total = tl.load(ACC + rows[:, None] * D + d), tl.load(M + rows), tl.load(TOTAL + rows)
    q, k, v = tl.load(Q + rows[:, None] * D + d), tl.load(K + keys[:, None] * D + d), tl.load(V + keys[:, None] * D + d)
    visible = tl.load(VISIBLE + rows[:, None] * BLOCK_N + keys) != 0
    acc, m, total = one_tile(acc, m, total, q, k, v, visible, scale2)
    tl.store(ACC + rows[:, None] * D + d, acc)
    tl.store(M + rows, m)
    tl.store(TOTAL + rows, total)


def tile_step(q, k, v, visible, acc, m, total):
    """Return (acc, m, total) of BLOCK_M rows after one tile of BLOCK_N keys; visible is int32. Given."""
    D = q.shape[-1]
    tile_kernel[(1,)](q, k, v, visible, acc, m, total, LOG2E / math.sqrt(D), D, BLOCK_M, BLOCK_N)
    return acc, m, total


# %%
check("12.tile")

# %% [markdown]
# Stuck? `hint("12.tile")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 12.ends · The first and the last step
#
# Between steps the state lies in memory: ACC (B, H, Lq, D), M and TOTAL (B, H, Lq), float32. On the first step there is nothing
# to read: the state begins in registers, and what lies in ACC, M and TOTAL is garbage. On the last step nobody will read the
# state again: leave it alone, and write OUT = acc / total in OUT's own dtype, and LSE = ln Σ e^score, float32, with the
# **natural** logarithm. A row that saw no key has OUT = 0 and LSE = −∞. With one rank the only step is both.
#
# `at` are the indices of a program's rows in M, TOTAL and LSE, `wide` those of its elements in ACC and OUT; `own` says which
# rows exist. Every masked load has an `other`: without one, masked lanes hold anything, and here NaN. (That is
# noticed only where such a lane reaches a result, as those of v do.) The step between the two ends does nothing yet.

# %% grade="12.ends"
@triton.jit
def begin(ACC, M, TOTAL, at, wide, own, BLOCK_M: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr):
    """Return (acc, m, total) of these rows before the step."""
    # BEGIN SOLUTION nothing seen yet on the first step, else what memory holds
    acc, total = tl.zeros((BLOCK_M, D), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    if not FIRST:
        acc = tl.load(ACC + wide, mask=own[:, None], other=0.0)
        m, total = tl.load(M + at, mask=own, other=-float("inf")), tl.load(TOTAL + at, mask=own, other=0.0)
    return acc, m, total
    # END SOLUTION


@triton.jit
def finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST: tl.constexpr):
    """Write the state, or on the last step OUT and LSE."""
    # BEGIN SOLUTION on the last step normalise, and turn the logarithm
    if LAST:
        total = tl.where(total == 0.0, 1.0, total)
        tl.store(OUT + wide, acc / total[:, None], mask=own[:, None])
        tl.store(LSE + at, (m + tl.math.log2(total)) * 0.6931471805599453, mask=own)
    else:
        tl.store(ACC + wide, acc, mask=own[:, None])
        tl.store(M + at, m, mask=own)
        tl.store(TOTAL + at, total, mask=own)
    # END SOLUTION


@triton.jit
def ends_kernel(ACC, M, TOTAL, OUT, LSE, N, D: tl.constexpr, BLOCK_M: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    at = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    wide, own = at[:, None] * D + tl.arange(0, D), at < N
    acc, m, total = begin(ACC, M, TOTAL, at, wide, own, BLOCK_M, D, FIRST)
    finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST)


def ends_step(acc, m, total, out, lse, first, last):  # given: a step that sees no key
    N, D = total.numel(), acc.shape[-1]
    ends_kernel[(triton.cdiv(N, BLOCK_M),)](acc, m, total, out, lse, N, D, BLOCK_M, first, last)
    return acc, m, total, out, lse


# %%
check("12.ends")

# %% [markdown]
# Stuck? `hint("12.ends")` in a new cell helps.

# %% [markdown]
# ## 12.step · Block and merge in one launch
#
# A program owns `BLOCK_M` query rows of one head: `program_id(0)` says which rows, and `program_id(1)` counts the B · H
# heads. It begins, visits all keys of the block, `BLOCK_N` at a time, and finishes. The merge is the same arithmetic as one
# more tile, so it costs no pass of its own.
#
# Q and OUT are (B, H, Lq, D), K and V (B, H / group, Lk, D). Query head h reads K/V head h // group. Lq and Lk are not
# multiples of the block sizes. `base` is the row of K and V at which the program's K/V head begins, if you count the rows
# of all heads, batch entry by batch entry.

# %% grade="12.step"
@triton.jit
def visit(acc, m, total, q, K, V, base, start, stop, scale2, D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (acc, m, total) after the keys start … stop − 1, all of them visible."""
    # BEGIN SOLUTION load k and v tile by tile, mask what lies beyond stop, call one_tile
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        wide, here = (base + keys)[:, None] * D + tl.arange(0, D), keys < stop
        k = tl.load(K + wide, mask=here[:, None], other=0.0)
        v = tl.load(V + wide, mask=here[:, None], other=0.0)
        acc, m, total = one_tile(acc, m, total, q, k, v, here[None, :], scale2)
    return acc, m, total
    # END SOLUTION


@triton.jit
def step_kernel(Q, K, V, ACC, M, TOTAL, OUT, LSE, group, Lq, Lk, scale2, D: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    head, rows = tl.program_id(1), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # BEGIN SOLUTION at, wide, own, base; begin, load q, visit all keys, finish
    at, own, base = head * Lq + rows, rows < Lq, head // group * Lk
    wide = at[:, None] * D + tl.arange(0, D)
    acc, m, total = begin(ACC, M, TOTAL, at, wide, own, BLOCK_M, D, FIRST)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc, m, total = visit(acc, m, total, q, K, V, base, 0, Lk, scale2, D, BLOCK_N)
    finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST)
    # END SOLUTION


def ring_step(q, k, v, acc, m, total, out, lse, first, last):
    """Return (acc, m, total, out, lse) after this block. Given."""
    B, H, Lq, D = q.shape
    grid, group, scale2 = (triton.cdiv(Lq, BLOCK_M), B * H), H // k.shape[1], LOG2E / math.sqrt(D)
    step_kernel[grid](q, k, v, acc, m, total, out, lse, group, Lq, k.shape[2], scale2, D, BLOCK_M, BLOCK_N, first, last)
    return acc, m, total, out, lse


# %%
check("12.step")

# %% [markdown]
# Stuck? `hint("12.step")` in a new cell helps.

# %% [markdown]
# ## 12.table · Tiles by the table
#
# Now the mask, for any layout, without a position in sight. Row p of PROGRAMS (int32, four columns) says: program p owns the
# rows `row_start` … `row_stop − 1` of every head, at most `BLOCK_M` of them, and the segments `first_segment` …
# `last_segment − 1`; long walks come first, so rows are not in order. Row s of SEGMENTS: keys `k_begin` … `k_full − 1` are seen by all rows
# of the program, and need no mask; of keys `k_full` … `k_end − 1`, **row i of the shard sees key j if j ≤ i + shift**. Other
# keys must not be read: they may hold anything, NaN too. A program may have no segment at all, and rows of the shard that
# have no program stay as they are.

# %% grade="12.table"
@triton.jit
def visit_masked(acc, m, total, q, K, V, base, start, stop, rows, shift, scale2, D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (acc, m, total) after the keys start … stop − 1; row i sees key j if j ≤ i + shift."""
    # BEGIN SOLUTION like visit, with the mask of the table
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        wide, here = (base + keys)[:, None] * D + tl.arange(0, D), keys < stop
        k = tl.load(K + wide, mask=here[:, None], other=0.0)
        v = tl.load(V + wide, mask=here[:, None], other=0.0)
        visible = here[None, :] & (keys[None, :] <= rows[:, None] + shift)
        acc, m, total = one_tile(acc, m, total, q, k, v, visible, scale2)
    return acc, m, total
    # END SOLUTION


@triton.jit
def table_kernel(Q, K, V, ACC, M, TOTAL, OUT, LSE, PROGRAMS, SEGMENTS, group, Lq, Lk, scale2, D: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    head, program = tl.program_id(1), PROGRAMS + 4 * tl.program_id(0)
    # BEGIN SOLUTION the rows of this program; begin, load q; visit every segment; finish
    rows = tl.load(program) + tl.arange(0, BLOCK_M)
    at, own, base = head * Lq + rows, rows < tl.load(program + 1), head // group * Lk
    wide = at[:, None] * D + tl.arange(0, D)
    acc, m, total = begin(ACC, M, TOTAL, at, wide, own, BLOCK_M, D, FIRST)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    for number in range(tl.load(program + 2), tl.load(program + 3)):
        segment = SEGMENTS + 4 * number
        k_full, shift = tl.load(segment + 1), tl.load(segment + 3)
        acc, m, total = visit(acc, m, total, q, K, V, base, tl.load(segment), k_full, scale2, D, BLOCK_N)
        acc, m, total = visit_masked(acc, m, total, q, K, V, base, k_full, tl.load(segment + 2), rows, shift, scale2, D, BLOCK_N)
    finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST)
    # END SOLUTION


def table_step(q, k, v, acc, m, total, out, lse, programs, segments, first, last):
    """Return (acc, m, total, out, lse) after this block, by the table. Given."""
    B, H, Lq, D = q.shape
    table_kernel[(len(programs), B * H)](q, k, v, acc, m, total, out, lse, programs, segments, H // k.shape[1], Lq, k.shape[2],
                                         LOG2E / math.sqrt(D), D, BLOCK_M, BLOCK_N, first, last)
    return acc, m, total, out, lse


# %%
check("12.table")

# %% [markdown]
# Stuck? `hint("12.table")` in a new cell helps.

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/12_triton_ring_step.ipynb` runs the hidden ones, on inputs of its
# own.
