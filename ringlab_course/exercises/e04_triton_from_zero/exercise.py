# %% [markdown]
# # Exercise 04 · Three kernels
#
# **You build** a softmax kernel, then the forward pass of flash attention for grouped heads, which reads a tile of K once
# for all query heads that share it, and its causal form, which skips the tiles that nobody sees. **You need**
# [lesson 04](../notebooks/04_triton_from_zero.ipynb), and grouped heads from
# [lesson 01](../notebooks/01_naive_attention.ipynb). **Minutes** 75.
#
# | stage | function | what is checked |
# |---|---|---|
# | 04.softmax | `softmax` | values, rows that do not fill a block, −inf, float16, loads and stores |
# | 04.flash | `flash` | out and lse, several tiles and heads, ragged lengths, how often K is read |
# | 04.causal | `causal_flash` | shifted masks, rows that see nothing, tiles that are skipped |
#
# Kernels run in Triton's interpreter, here and when you are graded, with or without a GPU. So you may `print` inside
# them. `check` runs the visible checks, in seconds. `hint("04.softmax")` in a new cell shows a question, then a direction,
# then a line of mathematics. Keep the names of the kernels' parameters: the checks of loads and stores use them.
#
# **Not allowed:** PyTorch's and ringlab's attention. Your kernels have to store every result; torch may allocate and
# reshape tensors.

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
# `x` and `out` are (rows, stride), in float32, float16 or bfloat16. Only the first `columns` entries of a row are in use:
# write their softmax into the same places of `out`, and leave the rest of `out` as it is. Return `out`.
#
# - Do not read the entries after the columns in use: they may be anything, also NaN.
# - Entries may be −inf. A row of −inf alone gives 0 everywhere.
# - Compute in float32. Load each element of `x` once.


# %% grade="04.softmax"
@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, stride, BLOCK: tl.constexpr):
    """Write the softmax of one row."""
    # BEGIN SOLUTION the softmax kernel
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
    # BEGIN SOLUTION the launch
    rows, stride = x.shape
    softmax_kernel[(rows,)](x, out, columns, stride, BLOCK=triton.next_power_of_2(columns))
    return out
    # END SOLUTION


# %%
check("04.softmax")

# %% [markdown]
# ## 04.flash · One program, the rows of a group
#
# `q` and `out` are (H, capacity, D), `k` and `v` are (K, capacity, D), all four in the same dtype: float32, float16 or
# bfloat16. `lse` is (H, capacity) in float32. The first `S` of the `capacity` tokens are in use. H = K · G: as in lesson 01,
# query heads c · G to c · G + G − 1 read key head c. Write attention without a mask: `out` in its own dtype, `lse` as a
# natural logarithm, for tokens 0 to S − 1 of every query head. Leave the rest as it is. `scale` is 1/√D.
#
# The lesson's kernel, run for each query head, would read each key head G times. A tile of K does not care whose queries
# it meets, so you **pack**: the queries of the G heads of a group are one matrix of S · G rows, ordered by token, and
# within a token by head. A program computes BLOCK_M rows of it. For G = 2 and BLOCK_M = 16, the first program takes tokens
# 0 to 7 of both heads:
#
# ```text
# row     0  1  2  3  4  5  …  14  15
# token   0  0  1  1  2  2  …   7   7
# head    0  1  0  1  0  1  …   0   1      of the group
# ```
#
# Without a mask the order of the rows makes no difference. In 04.causal it does: a block of neighbouring tokens can end early.
#
# The launch is given: grid axis 0 counts blocks of BLOCK_M packed rows, axis 1 key heads; `group` is G. Token t of query
# head h begins at element (h · capacity + t) · D of q and out, and its lse is at h · capacity + t. Token t of key head c
# begins at element (c · capacity + t) · D of k and v.
#
# - Do not read q, k and v after token S − 1: what is there may be anything, also NaN.
# - Load q once, and K and V once per block of packed rows, BLOCK_N keys at a time.
# - S need not be a multiple of a block, nor BLOCK_M of G. D, BLOCK_M and BLOCK_N are powers of two, 16 or more.
# - Carry float32 from tile to tile. `tl.dot(a, b, input_precision="ieee")` multiplies in full float32, also on a GPU. Its
#   inputs need the same dtype: convert the weights with `.to(v.dtype)`.


# %% grade="04.flash"
@triton.jit
def flash_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, capacity, group, scale,
                 D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Attention of one block of packed rows, over all keys of their key head."""
    # BEGIN SOLUTION the kernel of 04.flash
    packed, dims = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    tokens, heads = packed // group, tl.program_id(1) * group + packed % group
    rows, base = heads * capacity + tokens, tl.program_id(1) * capacity
    q = tl.load(q_ptr + rows[:, None] * D + dims, mask=tokens[:, None] < S, other=0.0)
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
    tl.store(out_ptr + rows[:, None] * D + dims, acc / total[:, None], mask=tokens[:, None] < S)
    tl.store(lse_ptr + rows, m + tl.log(total), mask=tokens < S)
    # END SOLUTION


def flash(q, k, v, out, lse, S, block_m, block_n):
    """Launch one program per block of packed rows and key head; return (out, lse)."""
    H, capacity, D = q.shape
    group = H // len(k)
    grid = (triton.cdiv(S * group, block_m), len(k))
    flash_kernel[grid](q, k, v, out, lse, S, capacity, group, D**-0.5,
                       D=D, BLOCK_M=block_m, BLOCK_N=block_n)
    return out, lse


# %%
check("04.flash")

# %% [markdown]
# ## 04.causal · Stop at the diagonal
#
# As before, but token i sees key j only where j ≤ i + `shift`. With shift = 0 that is the causal mask. On a ring, the
# queries and the keys of two ranks may be shifted against each other, in either direction.
#
# - With some shifts a row, or a whole block, sees no key. Such a row has out 0 and lse −inf; write it like any other. The
#   lesson's causal kernel has no guards for it: m and total need those of `softmax_kernel`, and lse must not become NaN.
# - Do not visit a tile in which no row of the block sees a key. Packed rows S · group and later do not count.
# - You may mask every tile that you visit, as in the lesson's second step: no check asks whether a full tile is masked.


# %% grade="04.causal"
@triton.jit
def causal_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, capacity, group, shift, scale,
                  D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Attention of one block of packed rows, over the keys that they see."""
    # BEGIN SOLUTION the kernel of 04.causal
    packed, dims = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    tokens, heads = packed // group, tl.program_id(1) * group + packed % group
    rows, base = heads * capacity + tokens, tl.program_id(1) * capacity
    q = tl.load(q_ptr + rows[:, None] * D + dims, mask=tokens[:, None] < S, other=0.0)
    m, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    last = tl.minimum(S - 1, ((tl.program_id(0) + 1) * BLOCK_M - 1) // group)
    stop = tl.minimum(S, last + shift + 1)
    for first in range(0, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        there = (base + keys)[:, None] * D + dims
        k = tl.load(k_ptr + there, mask=keys[:, None] < S, other=0.0)
        v = tl.load(v_ptr + there, mask=keys[:, None] < S, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((keys < S) & (keys <= tokens[:, None] + shift), scores, -float("inf"))
        new = tl.maximum(m, tl.max(scores, 1))
        anchor = tl.where(new == -float("inf"), 0.0, new)
        factor, powers = tl.exp(m - anchor), tl.exp(scores - anchor[:, None])
        total = total * factor + tl.sum(powers, 1)
        acc = acc * factor[:, None] + tl.dot(powers.to(v.dtype), v, input_precision="ieee")
        m = new
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + rows[:, None] * D + dims, acc / total[:, None], mask=tokens[:, None] < S)
    tl.store(lse_ptr + rows, m + tl.log(total), mask=tokens < S)
    # END SOLUTION


def causal_flash(q, k, v, out, lse, S, shift, block_m, block_n):
    """Launch one program per block of packed rows and key head; return (out, lse)."""
    H, capacity, D = q.shape
    group = H // len(k)
    grid = (triton.cdiv(S * group, block_m), len(k))
    causal_kernel[grid](q, k, v, out, lse, S, capacity, group, shift, D**-0.5,
                        D=D, BLOCK_M=block_m, BLOCK_N=block_n)
    return out, lse


# %%
check("04.causal")

# %% [markdown]
# ## All of it at once
#
# 100 tokens, four query heads and two key heads, as a layer of a model would call it.

# %%
torch.manual_seed(0)
q, k, v = (torch.randn(heads, 128, 32) for heads in (4, 2, 2))
truth = oracle.attention(*(x[None, :, :100] for x in (q, k, v)), causal=True)
try:
    out, lse = causal_flash(q, k, v, torch.zeros_like(q), torch.zeros(4, 128), 100, 0, 32, 32)
    error = abs(out[:, :100].numpy() - truth.out[0]).max()
    print("largest error:", "below 1e-6" if error < 1e-6 else "too large")
except Exception as missing:
    print("not written yet:", missing)

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# `ringlab grade exercises/04_triton_from_zero.ipynb` runs the hidden checks as well. Next:
# [lesson 05](../notebooks/05_emulated_ring.ipynb). Or go straight on to
# [lesson 12](../notebooks/12_triton_ring_step.ipynb), where a kernel carries its state from one ring step to the next.
