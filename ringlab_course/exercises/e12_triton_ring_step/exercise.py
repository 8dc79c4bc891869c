# %% [markdown]
# # Exercise 12 · The Triton ring step
#
# **You build** the kernel of a ring step that the lesson did not have: its blocks travel in int8, it can go on from a
# finished result, and it knows sliding windows. There are four stages, and each uses those before it.
# **You need** [lesson 12](../notebooks/12_triton_ring_step.ipynb). **Minutes** 45.
#
# | stage | function | what is checked |
# |---|---|---|
# | 12.tile | `tile_step` | where two scales go, rescaling, rows that see nothing |
# | 12.ends | `ends_step` | three ways to begin, two ways to end, no store too many |
# | 12.step | `ring_step` | several steps, short tiles, grouped heads, float32 state |
# | 12.table | `table_step` | windows and layouts by a table; keys that no segment names are never read |
#
# You write the bodies of the kernels. The functions that launch them are given, two of them in the first cell. They
# launch **once** and return tensors. `check` runs your kernels in Triton's interpreter, with or without a GPU, so you may
# `print` in them. Keep the names of the kernels' parameters, because the checks of loads and stores go by these names. All
# tensors are contiguous; D is 16. A program owns `BLOCK_M` = 32 rows, and a tile has `BLOCK_N` = 16 keys.
#
# **Not allowed:** ringlab's kernels, and PyTorch's attention.

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
BLOCK_M, BLOCK_N = 32, 16
# for functions that launch; a compiled kernel may not read a global, so write the number there
LOG2E = math.log2(math.e)


@triton.jit
def ends_kernel(ACC, M, TOTAL, OUT, LSE, N, D: tl.constexpr,
                BLOCK_M: tl.constexpr, START: tl.constexpr, LAST: tl.constexpr):
    at = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    wide, own = at[:, None] * D + tl.arange(0, D), at < N
    acc, m, total = begin(ACC, M, TOTAL, OUT, LSE, at, wide, own, BLOCK_M, D, START)
    finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST)


def ends_step(acc, m, total, out, lse, start, last):
    N, tensors = total.numel(), (acc, m, total, out, lse)
    ends_kernel[(triton.cdiv(N, BLOCK_M),)](*tensors, N, acc.shape[-1], BLOCK_M, start, last)
    return tensors


def table_step(q, k, ks, v, vs, acc, m, total, out, lse, programs, segments, start, last):
    (B, H, Lq, D), tensors = q.shape, (q, k, ks, v, vs, acc, m, total, out, lse)
    sizes = H // k.shape[1], Lq, k.shape[2], LOG2E / math.sqrt(D), D, BLOCK_M, BLOCK_N
    table_kernel[(len(programs), B * H)](*tensors, programs, segments, *sizes, start, last)
    return acc, m, total, out, lse


# %% [markdown]
# ## 12.tile · A tile of int8 keys and values
#
# A K/V block is rounded once, before it leaves its owner, so it may travel in fewer bits than bfloat16. Here each key is
# D integers from −127 to 127 and one float32 **scale**: key j is `ks[j]` · `k[j]`, and value j is `vs[j]` · `v[j]`. At
# D = 128 that is 132 bytes in place of 256.
#
# A program holds `acc` (rows, D), the sum of weights times values, **not** normalised; `m` (rows), the largest score so
# far, in base 2; and `total` (rows), the sum of the weights. All three are float32. A weight is 2^(score − m), where the
# score in base 2 is q · key · scale2, with the whole key and with scale2 = log₂e / √D.
#
# `one_tile` takes this state and one more tile: q (rows, D), k and v (keys, D) in int8, ks and vs (keys), and `visible`
# (rows, keys), which is true where a row sees a key. It returns the new (acc, m, total). A row that had seen nothing
# and sees nothing in this tile keeps acc = 0, m = −∞, total = 0.
#
# About the two `tl.dot`:
#
# - Both operands have the dtype of q, which may be bfloat16. int8 numbers convert to it exactly.
# - Pass `input_precision="ieee"`. On a GPU float32 would be rounded to tf32 without it. The interpreter computes in full
#   precision anyway, so this is not checked.
# - `vs` may be multiplied into the weights or into v, before the product is rounded to the dtype of q. Both pass: where the
#   checks use a bfloat16 q, all weights are 1 and all scales powers of two, so nothing is rounded.
#
# All answers are compared with float64, up to the rounding of float32.


# %% grade="12.tile"
@triton.jit
def one_tile(acc, m, total, q, k, ks, v, vs, visible, scale2):
    """Return (acc, m, total) after one more tile."""
    # BEGIN SOLUTION the new state, from the old one and this tile
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * (ks * scale2)[None, :]
    scores = tl.where(visible, scores, -float("inf"))
    top = tl.maximum(m, tl.max(scores, 1))
    safe = tl.where(top == -float("inf"), 0.0, top)  # −inf − (−inf) would be NaN
    weights, old = tl.math.exp2(scores - safe[:, None]), tl.math.exp2(m - safe)
    scaled = (weights * vs[None, :]).to(q.dtype)  # total is the sum of the weights without vs
    acc = acc * old[:, None] + tl.dot(scaled, v.to(q.dtype), input_precision="ieee")
    return acc, top, total * old + tl.sum(weights, 1)
    # END SOLUTION


@triton.jit
def tile_kernel(Q, K, KS, V, VS, VISIBLE, ACC, M, TOTAL, scale2,
                D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # given
    rows, keys, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    at, place = rows[:, None] * D + d, keys[:, None] * D + d
    visible = tl.load(VISIBLE + rows[:, None] * BLOCK_N + keys) != 0
    acc, m, total = one_tile(
        tl.load(ACC + at), tl.load(M + rows), tl.load(TOTAL + rows), tl.load(Q + at),
        tl.load(K + place), tl.load(KS + keys), tl.load(V + place), tl.load(VS + keys),
        visible, scale2,
    )
    tl.store(ACC + at, acc)
    tl.store(M + rows, m)
    tl.store(TOTAL + rows, total)


def tile_step(q, k, ks, v, vs, visible, acc, m, total):  # given
    D, scale2 = q.shape[-1], LOG2E / math.sqrt(q.shape[-1])
    tile_kernel[(1,)](q, k, ks, v, vs, visible, acc, m, total, scale2, D, BLOCK_M, BLOCK_N)
    return acc, m, total


# %%
check("12.tile")

# %% [markdown]
# Stuck? `hint("12.tile")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 12.ends · Where a step begins, and what it leaves
#
# Between steps the state is in memory: ACC (B, H, Lq, D), M and TOTAL (B, H, Lq), float32. `START` says where a step
# begins:
#
# - **0, with nothing.** The state begins in registers; the content of ACC, M and TOTAL is garbage.
# - **1, from the state** that the step before has stored.
# - **2, from a result.** OUT and LSE hold what an earlier run returned for these rows, such as a result that was saved
#   before a rank died (exercise 11 has such a case): OUT normalised, LSE = ln Σ e^(q · key / √D). Both are float32. ACC, M and
#   TOTAL hold garbage.
#   The result must count as if its keys had been visited in this run.
#
# On the last step nothing will read the state again. Leave it alone, and store OUT = acc / total and
# LSE = ln Σ e^(q · key / √D), float32, with the **natural** logarithm. On all other steps store the state, and nothing else. A row
# that saw no key has OUT = 0 and LSE = −∞, also when such a result is read with START 2. With one rank the only step is both first and last.
#
# `at` are the indices of a program's rows in M, TOTAL and LSE, and `wide` those of its elements in ACC and OUT; `own` says
# which rows exist. Give every masked load an `other`: without one, masked lanes hold anything. To test these
# two alone, `ends_step`, in the first cell, visits no key: it calls `begin` and then `finish`.


# %% grade="12.ends"
@triton.jit
def begin(ACC, M, TOTAL, OUT, LSE, at, wide, own,
          BLOCK_M: tl.constexpr, D: tl.constexpr, START: tl.constexpr):
    """Return (acc, m, total) of these rows before the step."""
    # BEGIN SOLUTION three ways to begin
    acc, total = tl.zeros((BLOCK_M, D), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    if START == 1:
        acc = tl.load(ACC + wide, mask=own[:, None], other=0.0)
        m = tl.load(M + at, mask=own, other=-float("inf"))
        total = tl.load(TOTAL + at, mask=own, other=0.0)
    if START == 2:  # a mean, as one weight of 1 relative to the maximum lse
        acc = tl.load(OUT + wide, mask=own[:, None], other=0.0)
        m = tl.load(LSE + at, mask=own, other=-float("inf")) * 1.4426950408889634
        total = tl.where(m == -float("inf"), 0.0, 1.0)
    return acc, m, total
    # END SOLUTION


@triton.jit
def finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST: tl.constexpr):
    """Store the state, or on the last step OUT and LSE."""
    # BEGIN SOLUTION two ways to end
    if LAST:
        total = tl.where(total == 0.0, 1.0, total)
        tl.store(OUT + wide, acc / total[:, None], mask=own[:, None])
        tl.store(LSE + at, (m + tl.math.log2(total)) * 0.6931471805599453, mask=own)
    else:
        tl.store(ACC + wide, acc, mask=own[:, None])
        tl.store(M + at, m, mask=own)
        tl.store(TOTAL + at, total, mask=own)
    # END SOLUTION


# %%
check("12.ends")

# %% [markdown]
# Stuck? `hint("12.ends")` in a new cell helps.

# %% [markdown]
# ## 12.step · Block and merge in one launch
#
# A program owns `BLOCK_M` query rows of one head: `program_id(0)` says which rows, and `program_id(1)` counts the B · H
# heads. It begins, visits all keys of the block, `BLOCK_N` at a time, and finishes.
#
# Q and OUT are (B, H, Lq, D), K and V (B, H / group, Lk, D), KS and VS (B, H / group, Lk). Query head h reads K/V head
# h // group. Lq and Lk need not be multiples of the block sizes. `base` is the row of K and V at which the program's K/V
# head begins, if you count the rows of all heads, batch entry by batch entry.


# %% grade="12.step"
@triton.jit
def visit(acc, m, total, q, K, KS, V, VS, base, start, stop, scale2,
          D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (acc, m, total) after the keys start … stop − 1, all of them visible."""
    # BEGIN SOLUTION tile by tile
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        here, at = keys < stop, base + keys
        inside, wide = here[:, None], at[:, None] * D + tl.arange(0, D)
        k, v = tl.load(K + wide, mask=inside, other=0), tl.load(V + wide, mask=inside, other=0)
        ks, vs = tl.load(KS + at, mask=here, other=0.0), tl.load(VS + at, mask=here, other=0.0)
        acc, m, total = one_tile(acc, m, total, q, k, ks, v, vs, here[None, :], scale2)
    return acc, m, total
    # END SOLUTION


@triton.jit
def step_kernel(Q, K, KS, V, VS, ACC, M, TOTAL, OUT, LSE, group, Lq, Lk, scale2,
                D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                START: tl.constexpr, LAST: tl.constexpr):
    head, rows = tl.program_id(1), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # BEGIN SOLUTION one step, from beginning to end
    at, own, base = head * Lq + rows, rows < Lq, head // group * Lk
    wide = at[:, None] * D + tl.arange(0, D)
    acc, m, total = begin(ACC, M, TOTAL, OUT, LSE, at, wide, own, BLOCK_M, D, START)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc, m, total = visit(acc, m, total, q, K, KS, V, VS, base, 0, Lk, scale2, D, BLOCK_N)
    finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST)
    # END SOLUTION


def ring_step(q, k, ks, v, vs, acc, m, total, out, lse, start, last):  # given
    B, H, Lq, D = q.shape
    grid, group, Lk = (triton.cdiv(Lq, BLOCK_M), B * H), H // k.shape[1], k.shape[2]
    sizes = group, Lq, Lk, LOG2E / math.sqrt(D), D, BLOCK_M, BLOCK_N
    step_kernel[grid](q, k, ks, v, vs, acc, m, total, out, lse, *sizes, start, last)
    return acc, m, total, out, lse


# %%
check("12.step")

# %% [markdown]
# Stuck? `hint("12.step")` in a new cell helps.

# %% [markdown]
# ## 12.table · A sliding window by the table
#
# In many models a query sees only a **window**: the last W tokens, itself included. The mask then has a lower bound as
# well, and the table gets two more columns than the lesson's.
#
# Row p of PROGRAMS (int32, four columns): program p owns the rows `row_start` … `row_stop − 1` of every head, at most
# `BLOCK_M` of them, and the segments `first_segment` … `last_segment − 1`. Long walks come first, so the rows are not in
# order. A program may have no segment at all. If START is 0 or 2, or LAST is true, every row has a program. In other
# steps rows without one stay as they are.
#
# Row s of SEGMENTS (int32, six columns): `k_begin`, `full`, `full_end`, `k_end`, `low`, `high`.
#
# - Keys `full` … `full_end − 1` are seen by all rows of the program.
# - Of the keys before them, `k_begin` … `full − 1`, and of those after them, `full_end` … `k_end − 1`,
#   **row i of the shard sees key j if i + low ≤ j ≤ i + high**. Each of the three parts may be empty. None needs to begin
#   at a multiple of `BLOCK_N`, or to be a multiple of it long. The lesson's kernel asks once for each tile, at its first key,
#   whether to mask it. Here that is wrong for a tile that lies across two parts: mask all of it, or let no tile lie across.
# - Other keys must not be read: their scales may be anything, NaN too.
#
# The lesson's start, split, stop and shift are `k_begin`, `full_end`, `k_end` and `high`, with nothing before `full`.
# `visit_masked` is your `visit` with one condition more, so begin with a copy of it.
#
# Without a window `low` is −2³⁰. A mask over the middle part as well would change no answer and no byte. It costs
# arithmetic on a GPU, which the interpreter does not count, so it is not checked.


# %% grade="12.table"
@triton.jit
def visit_masked(acc, m, total, q, K, KS, V, VS, base, start, stop, rows, low, high, scale2,
                 D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (acc, m, total) after the keys start … stop − 1, of which a row sees a band."""
    # BEGIN SOLUTION tile by tile, under the mask of the table
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        here, at = keys < stop, base + keys
        inside, wide = here[:, None], at[:, None] * D + tl.arange(0, D)
        k, v = tl.load(K + wide, mask=inside, other=0), tl.load(V + wide, mask=inside, other=0)
        ks, vs = tl.load(KS + at, mask=here, other=0.0), tl.load(VS + at, mask=here, other=0.0)
        ahead = keys[None, :] - rows[:, None]
        visible = here[None, :] & (ahead >= low) & (ahead <= high)
        acc, m, total = one_tile(acc, m, total, q, k, ks, v, vs, visible, scale2)
    return acc, m, total
    # END SOLUTION


@triton.jit
def table_kernel(Q, K, KS, V, VS, ACC, M, TOTAL, OUT, LSE, PROGRAMS, SEGMENTS, group, Lq, Lk,
                 scale2, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 START: tl.constexpr, LAST: tl.constexpr):
    head, program = tl.program_id(1), PROGRAMS + 4 * tl.program_id(0)
    # BEGIN SOLUTION the rows of this program, and every segment that it visits
    rows = tl.load(program) + tl.arange(0, BLOCK_M)
    at, own, base = head * Lq + rows, rows < tl.load(program + 1), head // group * Lk
    wide = at[:, None] * D + tl.arange(0, D)
    acc, m, total = begin(ACC, M, TOTAL, OUT, LSE, at, wide, own, BLOCK_M, D, START)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    for number in range(tl.load(program + 2), tl.load(program + 3)):
        segment = SEGMENTS + 6 * number
        k_begin, full, tail = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
        k_end, low, high = tl.load(segment + 3), tl.load(segment + 4), tl.load(segment + 5)
        acc, m, total = visit_masked(acc, m, total, q, K, KS, V, VS, base, k_begin, full,
                                     rows, low, high, scale2, D, BLOCK_N)
        acc, m, total = visit(acc, m, total, q, K, KS, V, VS, base, full, tail, scale2, D, BLOCK_N)
        acc, m, total = visit_masked(acc, m, total, q, K, KS, V, VS, base, tail, k_end,
                                     rows, low, high, scale2, D, BLOCK_N)
    finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST)
    # END SOLUTION


# %%
check("12.table")

# %% [markdown]
# Stuck? `hint("12.table")` in a new cell helps.

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/12_triton_ring_step.ipynb` runs the hidden ones, on inputs of
# its own.
