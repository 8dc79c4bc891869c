# %% [markdown]
# # Exercise 04 · Two kernels
#
# **You build** a softmax kernel, the forward pass of flash attention, and its causal form, which leaves alone the tiles
# that nobody sees. **You need** [lesson 04](../notebooks/04_triton_from_zero.ipynb). **Minutes** 75.
#
# | stage | function | what is looked at |
# |---|---|---|
# | 04.softmax | `softmax` | values, rows that do not fill a block, −inf, float16, what is read and written |
# | 04.flash | `flash` | out and lse, several tiles and heads, ragged lengths, how often K is read |
# | 04.causal | `causal_flash` | masks shifted by a few tokens, rows that see nothing, tiles that are skipped |
#
# Kernels run in Triton's interpreter here and when you are graded, with or without a GPU. So you may `print` inside
# them. `check` runs the visible checks, in seconds. `hint("04.softmax")` gives a question, then a direction, then a line of
# mathematics. Keep the names of the kernels' parameters: the checks of reads and writes go by them.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from ringlab import oracle
from ringlab_course import check, hint, needs_triton, progress

needs_triton()
import triton
import triton.language as tl

from ringlab.blocks.triton.interpreter import repair

print("kernels run in the interpreter:", repair())  # with its bfloat16 made exact

# %% [markdown]
# ## 04.softmax · One program, one row
#
# `x` and `out` are (rows, stride), of float32, float16 or bfloat16. Only the first `columns` entries of a row are in use:
# write their softmax into the same places of `out`, and leave everything else in `out` as it is. Return `out`.
#
# - What stands behind the columns in use is not yours to read: it may be anything, NaN too.
# - Entries may be −inf. A row of nothing else gives 0 everywhere.
# - Calculate in float32. Load each element of `x` once.


# %% grade="04.softmax"
@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, stride, BLOCK: tl.constexpr):
    """One row: load it, maximum, exponentials, sum, store."""
    # BEGIN SOLUTION the kernel: one program, one row
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    maximum = tl.max(x, 0)
    powers = tl.exp(x - tl.where(maximum == -float("inf"), 0.0, maximum))
    total = tl.sum(powers, 0)
    result = powers / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * stride + column, result, mask=inside)
    # END SOLUTION


def softmax(x, out, columns):
    """Launch the kernel on all rows and return `out`."""
    # BEGIN SOLUTION the launch: which grid, which BLOCK?
    rows, stride = x.shape
    softmax_kernel[(rows,)](x, out, columns, stride, BLOCK=triton.next_power_of_2(columns))
    return out
    # END SOLUTION


# %%
check("04.softmax")

# %% [markdown]
# ## 04.flash · One program, one block of queries
#
# `q`, `k`, `v` and `out` are (H, capacity, D), `lse` is (H, capacity) in float32. They have room for `capacity` tokens, of
# which the first `S` are in use. Write attention without a mask: `out` in its own dtype, `lse` as a natural logarithm,
# rows 0 to S − 1 of every head, nothing behind them. `scale` is 1/√D.
#
# The launch is given: grid axis 0 counts blocks of BLOCK_M queries, axis 1 heads. Row i of head h begins at element
# (h · capacity + i) · D, its lse stands at h · capacity + i.
#
# - Load q once, K and V once per block of queries, BLOCK_N keys at a time. S is a multiple of nothing.
# - What is carried from tile to tile is float32. D, BLOCK_M and BLOCK_N are powers of two, 16 or more.
# - `tl.dot(a, b, input_precision="ieee")` multiplies in full float32, also on a GPU. Its inputs have one dtype: bring the
#   weights to v's with `.to(v.dtype)`.


# %% grade="04.flash"
@triton.jit
def flash_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, capacity, scale,
                 D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One block of queries of one head, over all keys."""
    # BEGIN SOLUTION the kernel: q once, then tile by tile of k and v
    base = tl.program_id(1) * capacity
    rows, dims = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    here = (base + rows)[:, None] * D + dims
    q = tl.load(q_ptr + here, mask=rows[:, None] < S, other=0.0)
    m, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for first in range(0, S, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        there = (base + keys)[:, None] * D + dims
        k = tl.load(k_ptr + there, mask=keys[:, None] < S, other=0.0)
        v = tl.load(v_ptr + there, mask=keys[:, None] < S, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(keys < S, scores, -float("inf"))
        new = tl.maximum(m, tl.max(scores, 1))
        factor, powers = tl.exp(m - new), tl.exp(scores - new[:, None])
        total = total * factor + tl.sum(powers, 1)
        acc = acc * factor[:, None] + tl.dot(powers.to(v.dtype), v, input_precision="ieee")
        m = new
    tl.store(out_ptr + here, acc / total[:, None], mask=rows[:, None] < S)
    tl.store(lse_ptr + base + rows, m + tl.log(total), mask=rows < S)
    # END SOLUTION


def flash(q, k, v, out, lse, S, block_m, block_n):
    """Launch one program per block of queries and head; return (out, lse)."""
    H, capacity, D = q.shape
    grid = (triton.cdiv(S, block_m), H)
    flash_kernel[grid](q, k, v, out, lse, S, capacity, D**-0.5, D=D, BLOCK_M=block_m, BLOCK_N=block_n)
    return out, lse


# %%
check("04.flash")

# %% [markdown]
# ## 04.causal · Stop at the diagonal
#
# As before, but row i sees key j only where j ≤ i + `shift`. With shift = 0 that is the causal mask; on a ring, two shards
# may be shifted by a token against each other, in either direction.
#
# - A row that sees no key has out 0 and lse −inf. It is written like any other.
# - Do not visit a tile of which no row of the block sees a key: half of the work lies there.


# %% grade="04.causal"
@triton.jit
def causal_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, capacity, shift, scale,
                  D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One block of queries of one head, over the keys that its last row sees."""
    # BEGIN SOLUTION your flash kernel, with another end of the loop, one more condition, and two guards
    base = tl.program_id(1) * capacity
    rows, dims = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    here = (base + rows)[:, None] * D + dims
    q = tl.load(q_ptr + here, mask=rows[:, None] < S, other=0.0)
    m, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    stop = tl.minimum(S, (tl.program_id(0) + 1) * BLOCK_M + shift)
    for first in range(0, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        there = (base + keys)[:, None] * D + dims
        k = tl.load(k_ptr + there, mask=keys[:, None] < S, other=0.0)
        v = tl.load(v_ptr + there, mask=keys[:, None] < S, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((keys < S) & (keys <= rows[:, None] + shift), scores, -float("inf"))
        new = tl.maximum(m, tl.max(scores, 1))
        anchor = tl.where(new == -float("inf"), 0.0, new)
        factor, powers = tl.exp(m - anchor), tl.exp(scores - anchor[:, None])
        total = total * factor + tl.sum(powers, 1)
        acc = acc * factor[:, None] + tl.dot(powers.to(v.dtype), v, input_precision="ieee")
        m = new
    tl.store(out_ptr + here, acc / tl.where(total == 0.0, 1.0, total)[:, None], mask=rows[:, None] < S)
    tl.store(lse_ptr + base + rows, m + tl.log(tl.where(total == 0.0, 1.0, total)), mask=rows < S)
    # END SOLUTION


def causal_flash(q, k, v, out, lse, S, shift, block_m, block_n):
    """Launch one program per block of queries and head; return (out, lse)."""
    H, capacity, D = q.shape
    grid = (triton.cdiv(S, block_m), H)
    causal_kernel[grid](
        q, k, v, out, lse, S, capacity, shift, D**-0.5, D=D, BLOCK_M=block_m, BLOCK_N=block_n
    )
    return out, lse


# %%
check("04.causal")

# %% [markdown]
# ## All of it at once
#
# 100 tokens, two heads, as a layer of a model would call it.

# %%
torch.manual_seed(0)
q, k, v = (torch.randn(2, 128, 32) for _ in range(3))
truth = oracle.attention(*(x[None, :, :100] for x in (q, k, v)), causal=True)
try:
    out, lse = causal_flash(q, k, v, torch.zeros_like(q), torch.zeros(2, 128), 100, 0, 32, 32)
    error = abs(out[:, :100].numpy() - truth.out[0]).max()
    print("largest error:", "below 1e-6" if error < 1e-6 else "too large")
except Exception as missing:
    print("not written yet:", missing)

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# `ringlab grade exercises/04_triton_from_zero.ipynb` runs the hidden checks as well. Next:
# [lesson 05](../notebooks/05_emulated_ring.ipynb), or straight on to lesson 12, where this kernel learns to carry its
# state from one ring step to the next.
