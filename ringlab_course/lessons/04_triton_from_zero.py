# %% [markdown]
# # 04 · Triton from zero
#
# **Afterwards you can** read and write a Triton kernel, run it on a CPU, say what each of its programs reads and writes,
# and climb from three plain kernels to one flash forward that skips what a causal mask hides.
#
# **You need first** [lesson 02](02_online_softmax.ipynb), the running maximum, and
# [lesson 03](03_tiled_attention.ipynb), attention by tiles. **Minutes** 75. A GPU is not needed.
#
# Lesson 03 cut attention into tiles, in PyTorch. Every line there, a product, a maximum, an exponential, is a kernel of its
# own: it fetches its inputs from memory and puts its result back. But the tile was small so that it could *stay*, in
# the few hundred KiB beside the arithmetic units. PyTorch gives you no word for "stay". **Triton** does: you say
# what is read and when, and all that is never stored never leaves the chip.

# %%
import math
import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from ringlab import oracle
from ringlab_course import compare, needs_triton, predict
from ringlab_course.figures import kernel_access
from ringlab.viz.style import show

needs_triton()
import triton
import triton.language as tl

from ringlab.blocks.triton.accesses import record_accesses
from ringlab.blocks.triton.interpreter import repair

torch.manual_seed(4)
print("kernels run in the interpreter:", repair())

# %% [markdown]
# ## 1 · One function, many programs
#
# A kernel is a function that runs many times at once. Each run is a **program**; it asks for its number and takes its
# share. Within a program you write arithmetic on whole **blocks**, as in NumPy. There is no loop over elements and no
# thread. A kernel gets *pointers*, the addresses of first elements, and what you add to one is an offset in elements.

# %%
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    y = tl.load(y_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, x + y, mask=at < n)

# %% [markdown]
# - `tl.constexpr` marks what is known when the kernel is compiled. Block sizes must be known then, and be powers of two.
# - `kernel[grid](…)` starts it. `grid` says how many programs: here enough blocks of 4 for 10 elements.
# - The last block sticks out, by 2 lanes. `mask` says which lanes may touch memory, `other` what the rest hold.

# %%
x, y, out = torch.arange(10.0), torch.full((10,), 100.0), torch.zeros(10)
grid = (triton.cdiv(10, 4),)
with record_accesses() as accesses:
    add_kernel[grid](x, y, out, 10, BLOCK=4)
print(grid, out.tolist())

# %% [markdown]
# `record_accesses` is ours: while it is open, each load and store is written down. This is what the three programs did;
# the number in a box is its turn, dashed are the two masked lanes.

# %%
ten = {"x_ptr": (1, 10), "y_ptr": (1, 10), "out_ptr": (1, 10)}
show(kernel_access.all_programs(accesses, ten), kernel_access.describe(accesses, ten))

# %%
for access in accesses[-3:]:
    print(access.program, access.kind, access.argument, access.offsets.tolist(), "masked lanes:", access.masked)

# %% [markdown]
# Nobody writes what another reads, so the programs may run in any order, or all at once. That is the whole contract: *you*
# cut the work so that it is true. Suppose you forget the masks. Below, `out` is the first 10 of 12 numbers.

# %% tags=["nbval-ignore-output"]
predict("04.mask", "Without masks: what happens to the 2 numbers behind out?",
        choices=["nothing", "they are overwritten", "there is an error"])

# %%
@triton.jit
def careless_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + 1)


memory = torch.zeros(12)
careless_kernel[(3,)](torch.arange(12.0)[:10], memory[:10], BLOCK=4)
compare("04.mask", "they are overwritten" if memory[10:].any() else "nothing")
print("behind out:", memory[10:].tolist())

# %% [markdown]
# No error, no warning: a pointer knows where it begins and not where it ends. On a GPU these two numbers are somebody's
# weights. Hence the habit: **every load and store has a mask, unless you can say why not.**
#
# ## 2 · The interpreter, and what it hides
#
# Where did this run? With `TRITON_INTERPRET=1`, set *before* Triton is imported, each program is executed in NumPy, one after
# the other. So you can `print` inside a kernel, and everything in this course runs on a laptop.

# %%
@triton.jit
def talking_kernel(x_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    print("program", tl.program_id(0), "holds", x, "with the maximum", tl.max(x, 0))


talking_kernel[(2,)](torch.tensor([3.0, 1.0, 4.0, 1.0]), BLOCK=2)

# %% [markdown]
# | | interpreter | GPU |
# |---|---|---|
# | values, masks, order within a program | exact | exact, up to rounding |
# | bfloat16 | wrong as Triton ships it; `repair()` mends it | exact |
# | a masked load without `other` | 0; after `repair()` NaN for floats | undefined |
# | two programs write one place | one after the other, always the same | a race: anything |
# | out of bounds | reads and writes your memory; `record_accesses` raises an error, but only beyond the *storage*: not in `memory[:10]` above | the same, or a fault |
# | seconds, and whether a block fits on the chip | say nothing | are what it is about |
#
# A race is what hides best. In the next kernel all programs add to the same counter.

# %%
@triton.jit
def racing_kernel(counter_ptr):
    tl.store(counter_ptr, tl.load(counter_ptr) + 1)


counter = torch.zeros(1)
racing_kernel[(8,)](counter)
print("8 programs, one after the other:", counter.item())

# %% [markdown]
# On a GPU all of them may load before anyone has stored. Then the result is 1, or whatever chance makes of it. Nor are
# seconds of the interpreter evidence: they go into interpreting, not into arithmetic. What it *can* tell is **traffic**:
# how many bytes go between memory and chip. It decides how fast such kernels are, and below we count it.
#
# ## 3 · Softmax: what the missing lanes hold
#
# One program, one row. A row of 5 in a block of 8 leaves three lanes over.

# %%
@triton.jit
def softmax_kernel(x_ptr, out_ptr, n, stride, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + column, mask=column < n, other=OTHER).to(tl.float32)
    top = tl.max(x, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    powers = tl.exp(x - top)
    total = tl.sum(powers, 0)
    result = powers / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + row * stride + column, result, mask=column < n)


def softmax(x, other=-math.inf):
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    softmax_kernel[(len(x),)](x, out, x.shape[1], x.stride(0), OTHER=other, BLOCK=block)
    return out

# %% tags=["nbval-ignore-output"]
predict("04.other", "other=0.0 instead of -inf, and a row of negative numbers: its softmax adds up to …",
        choices=["less than 1", "1", "more than 1"])

# %%
x = torch.tensor([[-3.0, -1.0, -2.0, -4.0, -2.0], [-math.inf] * 5])
sums = {other: softmax(x, other).sum(1) for other in (0.0, -math.inf)}
compare("04.other", "less than 1" if sums[0.0][0] < 0.999 else "1")
for other, total in sums.items():
    print(f"other={other}: the rows add up to {total[0]:.3f} and {total[1]:.3f}")

# %% [markdown]
# A lane with a 0 has the weight e⁰, more than any real entry here, and takes it from them. What must a missing lane hold?
# The identity of whatever comes next: 0 for a sum, **−∞ for a maximum and a softmax**. The second row is −∞ throughout. As in
# lesson 02 it gives 0, since we measure it against 0 and do not divide by its empty sum.
#
# And the gain? The row is loaded once and stored once. In PyTorch's terms, maximum, difference, exp, sum and quotient, it
# would be read five times and written three times. What such borders cost attention we now count, from records.
#
# ## 4 · Plain attention: three kernels
#
# A block of 64 query rows against a tile of 64 keys. Two aranges make the offsets of a matrix: `[:, None]` says
# which row, `[None, :]` which column. (A plain `d` would broadcast as `d[None, :]` does, as in NumPy; we write it out.)
# `tl.dot` multiplies two blocks, each side 16 or more, and is what a tensor core does. We take one head; heads, on a second
# axis of the grid, come in the exercise.

# %%
@triton.jit
def scores_kernel(q_ptr, k_ptr, s_ptr, S, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :], mask=rows[:, None] < S, other=0.0)
    k = tl.load(k_ptr + keys[:, None] * D + d[None, :], mask=keys[:, None] < S, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    inside = (rows[:, None] < S) & (keys[None, :] < S)
    tl.store(s_ptr + rows[:, None] * S + keys[None, :], scores, mask=inside)

# %%
@triton.jit
def values_kernel(p_ptr, v_ptr, out_ptr, S, D: tl.constexpr, BLOCK: tl.constexpr):
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    acc = tl.zeros((BLOCK, D), tl.float32)
    for first in range(0, S, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        inside = (rows[:, None] < S) & (keys[None, :] < S)
        p = tl.load(p_ptr + rows[:, None] * S + keys[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + keys[:, None] * D + d[None, :], mask=keys[:, None] < S, other=0.0)
        acc += tl.dot(p, v, input_precision="ieee")
    tl.store(out_ptr + rows[:, None] * D + d[None, :], acc, mask=rows[:, None] < S)

# %% [markdown]
# `input_precision="ieee"` asks for exact float32 products; by default a GPU first rounds float32 inputs to about
# three decimal digits (TF32). The
# launches, and a meter:

# %%
S, D = 256, 32
q, k, v = (torch.randn(S, D) for _ in range(3))


def plain(q, k, v, block=64):
    S, D = q.shape
    scores, out, blocks = torch.empty(S, S), torch.empty(S, D), triton.cdiv(S, block)
    scores_kernel[(blocks, blocks)](q, k, scores, S, D**-0.5, D=D, BLOCK=block)
    values_kernel[(blocks,)](softmax(scores), v, out, S, D=D, BLOCK=block)
    return out


# %%
def kib(accesses, kind):
    return sum(access.offsets.size for access in accesses if access.kind == kind) * 4 / 1024


ladder = {}
with record_accesses() as ladder["three kernels"]:
    out = plain(q, k, v)
truth = oracle.attention(q[None, None], k[None, None], v[None, None])
print("error below 2e-6:", abs(out.numpy() - truth.out[0, 0]).max() < 2e-6)
for kind in ("load", "store"):
    print(f"{kind}: {kib(ladder['three kernels'], kind):.0f} KiB; all of Q, K and V: {3 * S * D * 4 / 1024:.0f} KiB")

# %% [markdown]
# Right, and wasteful: the S × S scores are written, read, written and read again. None of the three kernels is badly written. What costs is the border *between* kernels, for only memory crosses
# it. To get rid of the traffic, get rid of the borders: one kernel in which a tile of scores is made, used and dropped.
#
# ## 5 · Flash forward: the scores stay
#
# One program per block of queries. It loads its queries once, then walks over the keys. Each tile of scores lives
# between two lines of the loop and is forgotten. What is carried is the state of lesson 02, for 64 rows side by side.

# %%
@triton.jit
def flash_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, scale,
                 D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows, d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :], mask=rows[:, None] < S, other=0.0)
    m, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for first in range(0, S, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        k = tl.load(k_ptr + keys[:, None] * D + d[None, :], mask=keys[:, None] < S, other=0.0)
        v = tl.load(v_ptr + keys[:, None] * D + d[None, :], mask=keys[:, None] < S, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(keys[None, :] < S, scores, -float("inf"))
        new = tl.maximum(m, tl.max(scores, 1))
        factor, powers = tl.exp(m - new), tl.exp(scores - new[:, None])
        total = total * factor + tl.sum(powers, 1)
        acc = acc * factor[:, None] + tl.dot(powers, v, input_precision="ieee")
        m = new
    tl.store(out_ptr + rows[:, None] * D + d[None, :], acc / total[:, None], mask=rows[:, None] < S)
    tl.store(lse_ptr + rows, m + tl.log(total), mask=rows < S)

# %% [markdown]
# Read it beside lesson 02: `factor` shrinks what is old, total and acc alike; there is one division, at the end. What of the
# missing keys? The masks protect memory, `other=0` keeps NaN out of both products, and the `where` protects the result: the
# scores of zeros are 0, not −∞, and no `other` of a load can change what a product makes of it.

# %% tags=["nbval-ignore-output"]
predict("04.reads", "256 tokens, blocks of 64 queries and 64 keys: how often is each row of K read from memory?", unit="times")

# %%
def flash(q, k, v, kernel=flash_kernel, BLOCK_M=64, BLOCK_N=64):
    S, D = q.shape
    out, lse = torch.empty_like(q), torch.empty(S)
    kernel[(triton.cdiv(S, BLOCK_M),)](
        q, k, v, out, lse, S, D**-0.5, D=D, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    return out, lse


with record_accesses() as ladder["flash"]:
    out, lse = flash(q, k, v)
reads = kernel_access.counts(ladder["flash"], "k_ptr", "load", (S, D))
compare("04.reads", int(reads.max()))
print("error below 2e-6:", abs(out.numpy() - truth.out[0, 0]).max() < 2e-6, abs(lse.numpy() - truth.lse[0, 0]).max() < 2e-6)

# %% [markdown]
# **Once per block of queries**, ⌈S / BLOCK_M⌉ times: not once, though the kernel is "fused", and not once per query either. A
# program shares nothing with the next one. Move the slider over the programs; the number in a box is its turn.

# %% tags=["nbval-ignore-output"]
maps = {"q_ptr": (S, D), "k_ptr": (S, D), "v_ptr": (S, D), "out_ptr": (S, D), "lse_ptr": (S, 1)}
kernel_access.play(ladder["flash"], maps)

# %%
show(kernel_access.all_programs(ladder["flash"], maps), kernel_access.describe(ladder["flash"], maps))

# %% [markdown]
# Q and out: a staircase, everyone has their own. K and V: a wall, everyone reads all. So whoever wants less traffic
# makes the blocks of *queries* larger. BLOCK_N only says in how many bites K is eaten.

# %%
for block_m, block_n in ((32, 64), (64, 64), (64, 128), (128, 64)):
    with record_accesses() as accesses:
        flash(q, k, v, BLOCK_M=block_m, BLOCK_N=block_n)
    times = kernel_access.counts(accesses, "k_ptr", "load", (S, D)).max()
    print(f"BLOCK_M {block_m:3}, BLOCK_N {block_n:3}: K read {times} times, {kib(accesses, 'load'):.0f} KiB loaded")
    if block_m == 128:
        ladder["flash, BLOCK_M 128"] = accesses

# %% [markdown]
# Why not BLOCK_M = S? q, acc and the scores of a block must fit beside the arithmetic units, and fewer programs leave units
# without work. `ringlab kernels --offline --arch sm_90 --kernel forward_step` compiles the kernel that `ringlab` ships, not
# ours, and lists what its blocks take up: registers, shared memory, and *spills*, what did not fit and went to memory.
#
# ## 6 · Causal: leave alone what nobody sees
#
# Row i sees keys up to i. The smallest change is one more condition in the `where`. It is right, and it still computes
# tiles of which no row sees a single key.

# %% tags=["nbval-ignore-output"]
predict("04.tiles", "Of 4 × 4 square tiles: how many does a causal kernel have to visit?", unit="tiles")

# %% [markdown]
# The second change is the end of the loop: the block's last row sees no key behind its own place. The third: below the
# diagonal every row sees every key, so those tiles need no mask at all. One loop becomes two.

# %%
@triton.jit
def tile(m, total, acc, q, k_ptr, v_ptr, rows, first, S, scale, MASK: tl.constexpr,
         D: tl.constexpr, BLOCK_N: tl.constexpr):
    keys, d = first + tl.arange(0, BLOCK_N), tl.arange(0, D)
    k = tl.load(k_ptr + keys[:, None] * D + d[None, :], mask=keys[:, None] < S, other=0.0)
    v = tl.load(v_ptr + keys[:, None] * D + d[None, :], mask=keys[:, None] < S, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASK:
        visible = (keys[None, :] < S) & (keys[None, :] <= rows[:, None])
        scores = tl.where(visible, scores, -float("inf"))
    new = tl.maximum(m, tl.max(scores, 1))
    factor, powers = tl.exp(m - new), tl.exp(scores - new[:, None])
    acc = acc * factor[:, None] + tl.dot(powers, v, input_precision="ieee")
    return new, total * factor + tl.sum(powers, 1), acc

# %% [markdown]
# `tile` is the loop's body, moved out unchanged: a kernel may call other `@triton.jit` functions. `MASK` is a constexpr, so the
# compiler makes two versions and neither asks at run time. `STEP` is our ladder's rung. Take program 2, rows 128 to 191, at
# STEP 3: `stop` is 192, `full` is 128. Tiles 0 and 64 go without a mask, tile 128 with one, tile 192 is not visited.

# %%
@triton.jit
def causal_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, scale, STEP: tl.constexpr,
                  D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows, d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :], mask=rows[:, None] < S, other=0.0)
    m, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    stop, full = S, 0
    if STEP >= 2:  # no row of this block sees a key behind its last one
        stop = tl.minimum(S, (tl.program_id(0) + 1) * BLOCK_M)
    if STEP >= 3:  # all rows see the keys before its first one
        full = tl.program_id(0) * BLOCK_M // BLOCK_N * BLOCK_N
    for first in range(0, full, BLOCK_N):
        m, total, acc = tile(m, total, acc, q, k_ptr, v_ptr, rows, first, S, scale, False, D, BLOCK_N)
    for first in range(full, stop, BLOCK_N):
        m, total, acc = tile(m, total, acc, q, k_ptr, v_ptr, rows, first, S, scale, True, D, BLOCK_N)
    tl.store(out_ptr + rows[:, None] * D + d[None, :], acc / total[:, None], mask=rows[:, None] < S)
    tl.store(lse_ptr + rows, m + tl.log(total), mask=rows < S)

# %%
def causal(q, k, v, step, block=64):
    S, D = q.shape
    out, lse = torch.empty_like(q), torch.empty(S)
    causal_kernel[(triton.cdiv(S, block),)](
        q, k, v, out, lse, S, D**-0.5, STEP=step, D=D, BLOCK_M=block, BLOCK_N=block)
    return out, lse


causal_truth = oracle.attention(q[None, None], k[None, None], v[None, None], causal=True)
for step, name in ((1, "causal: mask all"), (2, "causal: skip"), (3, "causal: skip, mask the diagonal")):
    with record_accesses() as ladder[name]:
        out, lse = causal(q, k, v, step)
    print(f"{name:32} error below 2e-6: {abs(out.numpy() - causal_truth.out[0, 0]).max() < 2e-6}")

# %%
skipping = ladder["causal: skip"]
compare("04.tiles", sum(access.argument == "k_ptr" for access in skipping))
show(kernel_access.all_programs(skipping, maps), kernel_access.describe(skipping, maps))

# %% [markdown]
# No guard against −∞ was needed: every row sees key 0, so `m` is a number after the first tile. In the exercise there are rows
# that see nothing.
#
# The wall has become stairs, and the upper half of the tiles is gone. The first program is done after one tile, the last one after four: on a GPU, such programs
# run side by side and the long ones decide. It is the imbalance that lesson 07 meets again between ranks.
#
# ## 7 · The ladder
#
# All rungs, with what was counted. A tile of K is one load. The causal mask cuts it if its last key lies behind the
# program's first row; the last rung masks only tiles that are cut.

# %%
def tiles(accesses):
    """How many tiles of K the programs load, and how many of them a causal mask cuts."""
    first_row = {a.program: a.offsets.min() // D for a in accesses if a.argument == "q_ptr"}
    last_keys = [(a.program, a.offsets.max() // D) for a in accesses if a.argument == "k_ptr"]
    return len(last_keys), sum(last > first_row[program] for program, last in last_keys)


print(f"{'':32} KiB read  written  tiles  masked")
for name, accesses in ladder.items():
    count, cut = tiles(accesses)
    masked = 0 if "causal" not in name else cut if "diagonal" in name else count
    print(f"{name:32} {kib(accesses, 'load'):8.0f} {kib(accesses, 'store'):8.0f} {count:6} {masked:7}")

# %% [markdown]
# - **Three kernels → flash:** only out and lse are written, 33 KiB instead of 544, and this ratio grows with S. That of the
#   reads hardly does: flash still reads S · D · ⌈S / BLOCK_M⌉ elements each of K and V.
# - **Larger BLOCK_M:** half of those reads, and half as many tiles, each twice as large. But for a causal mask, nothing
#   else cuts them.
# - **Mask all → skip:** 10 tiles instead of 16. For many blocks this tends to one half.
# - **Mask only the diagonal:** the traffic is the same, but of 10 tiles only 4 compare positions. What this rung saves is
#   arithmetic: the cut tiles grow with S, all tiles with S², so the share that needs a mask falls.
#
# The shipped kernels of `ringlab` are this last one, with three more things: powers of two instead of e, since that is what
# the hardware has; tiles by a table, for any layout; and a state that is carried from one ring step to the next. Lesson 12
# builds them. On a GPU the text of a kernel stays as it is, but for `print`, which does not compile: leave
# TRITON_INTERPRET unset, give it CUDA tensors, and measure there.
#
# ## Recap
#
# - A program takes a block: number, offsets, mask, load, arithmetic, store. Nobody writes what another one touches.
# - A load's mask protects memory. What missing lanes hold decides the result: `other`, if they are used as loaded (−∞ before
#   a maximum or an exp, 0 before a sum or a product); a `where`, if something is computed first, as scores from keys of 0.
# - The interpreter is exact about values and blind to speed and races. Count bytes, not its seconds.
# - Flash forward writes out and lse only, and reads K and V ⌈S / BLOCK_M⌉ times.
# - Causal: end the loop at the block's last row, and mask the tiles on the diagonal only.
#
# ## Self-check
#
# <details><summary>1. 1,000 tokens, BLOCK_M 128, BLOCK_N 64: how often is K read, and in how many loads by each
# program?</summary>8 times (⌈1000/128⌉), in 16 loads (⌈1000/64⌉).</details>
#
# <details><summary>2. The last tile of K is loaded with other=0. Why is the result wrong without
# the where?</summary>A key
# of zeros has the score 0, and e⁰ is weight like any other.</details>
#
# <details><summary>3. A kernel adds each program's sum to one number. It passes every test in the interpreter.
# Then?</summary>It races on a GPU: load and store of different programs interleave. Use one place per program, or
# tl.atomic_add.</details>
#
# <details><summary>4. Which of the two block sizes would you double if K traffic were the problem, and what stops
# you?</summary>BLOCK_M. Its q, acc and scores must fit on the chip, and there must be programs enough for all of it.</details>
#
# **Now you:** [exercise 04](../exercises/04_triton_from_zero.ipynb), a softmax kernel, a flash forward, and its causal form.
