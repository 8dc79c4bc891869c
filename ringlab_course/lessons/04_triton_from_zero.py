# %% [markdown]
# # 04 · Triton from zero
#
# **Afterwards you can** read and write a Triton kernel, run it on a CPU, say which memory each of its programs reads and
# writes, and turn three plain kernels into one flash forward that skips what a causal mask hides.
#
# **You need first** [lesson 02](02_online_softmax.ipynb), the running maximum, and
# [lesson 03](03_tiled_attention.ipynb), attention by tiles. **Minutes** 75. You do not need a GPU.
#
# Lesson 03 cut attention into tiles, in PyTorch. Every line there, a product, a maximum, an exponential, is a kernel of
# its own: it reads its inputs from memory and writes its result back. The tile was made small to *stay* on the chip,
# but PyTorch, line by line, cannot say "stay". **Triton** can: you say what is read and when, and what you do not store
# never leaves the chip.

# %%
import math
import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from ringlab import oracle
from ringlab_course import compare, needs_triton, predict
from ringlab_course.figures import kernel_access
from ringlab.viz.style import show

needs_triton()  # where Triton is missing, this says how to install it
import triton
import triton.language as tl

from ringlab_course.checking.accesses import record_accesses
from ringlab.blocks.triton.interpreter import repair

torch.manual_seed(4)
print("kernels run in the interpreter:", repair())  # on the CPU; section 2 is about it

# %% [markdown]
# ## 1 · One function, many programs
#
# A kernel is a function that runs many times at once. Each run is a **program**: it asks for its number and does its
# share of the work. (Here and in lesson 12 a program is *one run* of a kernel: lesson 03's thread block.) Inside a
# program you write arithmetic on whole **blocks**, as in NumPy, without a loop over elements and without threads. A
# kernel gets *pointers*, the addresses of first elements. Adding n to a pointer moves it n elements on.

# %%
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    y = tl.load(y_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, x + y, mask=at < n)

# %% [markdown]
# - `tl.constexpr` marks a value that is known when the kernel is compiled. Block sizes must be such values, and powers of two.
# - `kernel[grid](…)` starts the kernel. `grid` is the number of programs, here enough blocks of 4 for 10 elements. A grid has
#   up to three axes, and `tl.program_id(a)` is the program's number along axis a. This grid has only axis 0.
# - The places of a block are its **lanes**. The last block has 2 lanes too many: `mask` says which lanes may touch memory,
#   `other` which value the remaining lanes get.

# %%
x, y, out = torch.arange(10.0), torch.full((10,), 100.0), torch.zeros(10)
grid = (triton.cdiv(10, 4),)
with record_accesses() as accesses:
    add_kernel[grid](x, y, out, 10, BLOCK=4)
print(grid, out.tolist())

# %% [markdown]
# `record_accesses` is ours: inside its context, each load and store is recorded. The figure shows the accesses of the three
# programs. Each dashed box stands for two masked lanes.

# %%
ten = {"x_ptr": (1, 10), "y_ptr": (1, 10), "out_ptr": (1, 10)}
show(kernel_access.all_programs(accesses, ten, "add"), kernel_access.describe(accesses, ten))

# %%
for access in accesses[-3:]:
    print(access.program, access.kind, access.argument, access.offsets.tolist(),
          "masked lanes:", access.masked)

# %% [markdown]
# No program writes what another one reads or writes, so the programs may run in any order, or all at once. *You* must cut
# the work so that this holds.
#
# Now suppose you forget the masks. Below, the kernel is given only the first 10 of `memory`'s 12 numbers as its output.

# %%
@triton.jit
def careless_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + 1)


memory = torch.zeros(12)
careless_kernel[(3,)](torch.arange(12.0)[:10], memory[:10], BLOCK=4)
print("the last 2 numbers:", memory[10:].tolist())

# %% [markdown]
# No error, no warning: a pointer knows where an array begins, but not where it ends. On a GPU these two numbers may be the
# weights of a layer. Hence the habit: **every load and store has a mask, unless you can say why it needs none.**
#
# ## 2 · The interpreter, and what it hides
#
# Where did this run? If `TRITON_INTERPRET=1` is set *before* Triton is imported, NumPy executes the programs, one after the
# other. So you can `print` inside a kernel, and everything in this course runs on a laptop.

# %%
@triton.jit
def talking_kernel(x_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    print("program", tl.program_id(0), "holds", x, "with the maximum", tl.max(x, 0))


talking_kernel[(2,)](torch.tensor([3.0, 1.0, 4.0, 1.0]), BLOCK=2)

# %% [markdown]
# | | interpreter | GPU |
# |---|---|---|
# | values, masks, order of the operations within a program | as written | the same, with other rounding |
# | a masked load without `other` | 0; after `repair()` NaN for floats | undefined |
# | two programs write one place | one after the other, always the same result | a race: any result |
# | out of bounds | reads and writes other memory without an error | the same, or a fault |
# | seconds, and whether a block fits on the chip | meaningless | decisive |
#
# `repair()` also corrects bfloat16, which Triton's own interpreter gets wrong. `record_accesses` raises an error for an
# access beyond the *whole* tensor, but not for one beyond a slice such as `memory[:10]` above.
#
# Races hide best. In the next kernel all programs add to the same counter.

# %%
@triton.jit
def racing_kernel(counter_ptr):
    tl.store(counter_ptr, tl.load(counter_ptr) + 1)


counter = torch.zeros(1)
racing_kernel[(8,)](counter)
print("8 programs, one after the other:", counter.item())

# %% [markdown]
# On a GPU all of them may load before any has stored. Then the result is 1. With other timings it is any number from 1 to 8.
# The interpreter's seconds are no evidence either: they measure the interpreting, not the arithmetic. But it can count
# **traffic**, the bytes that programs load and store. (A GPU's cache serves some of the repeated loads; we count as if there
# were none.) Traffic is what slows plain kernels.
#
# ## 3 · Softmax: the lanes after the row
#
# One program computes one row. If a row of 5 sits in a block of 8, three lanes are left over.

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
predict("04.other",
        "other=0.0 instead of -inf, a row of negative numbers: the softmax adds up to …",
        choices=["less than 1", "1", "more than 1"])

# %%
x = torch.tensor([[-3.0, -1.0, -2.0, -4.0, -2.0], [-math.inf] * 5])
sums = {other: softmax(x, other).sum(1) for other in (0.0, -math.inf)}
compare("04.other", "less than 1" if sums[0.0][0] < 0.999 else "1")
for other, total in sums.items():
    print(f"other={other}: the rows add up to {total[0]:.3f} and {total[1]:.3f}")

# %% [markdown]
# A lane with a 0 has the weight e⁰, more than any real entry here, so the real weights become too small. A lane that is left
# over must hold the identity of the next operation: 0 for a sum, **−∞ for a maximum and a softmax**. The second row is −∞
# throughout. As in lesson 02 it gives 0, because we subtract 0 instead of its maximum and do not divide by its sum of 0.
#
# What have we gained? The kernel loads the row once and stores it once. In PyTorch, with maximum, difference, exp, sum and
# quotient, it would be read five times and written three times. The borders between kernels cost traffic. Next we count what
# they cost attention.
#
# ## 4 · Plain attention: three kernels
#
# A program of the first kernel takes a block of 64 query rows and a tile of 64 keys. So its grid has two axes, one for the
# blocks of rows and one for the tiles of keys. Two aranges make the offsets of a matrix: `[:, None]` gives the row and
# `[None, :]` the column. `tl.dot` multiplies two blocks, each side 16 or more. With 16-bit inputs it runs on the matrix
# units of a GPU (*tensor cores*). We take one head; the exercise has several.

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
# `input_precision="ieee"` asks for full float32 products, computed without the tensor cores; by default a GPU first rounds
# float32 inputs to about three decimal digits (TF32). Here are the launches, and a meter. `ladder` keeps each kernel's
# record for the table in section 7.

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
with record_accesses() as accesses:
    out = plain(q, k, v)
ladder["three kernels"] = accesses
truth = oracle.attention(q[None, None], k[None, None], v[None, None])
print("error below 2e-6:", abs(out.numpy() - truth.out[0, 0]).max() < 2e-6)
for kind in ("load", "store"):
    print(f"{kind}: {kib(accesses, kind):.0f} KiB")
print(f"Q, K and V together: {3 * S * D * 4 / 1024:.0f} KiB, out: {S * D * 4 / 1024:.0f} KiB")

# %% [markdown]
# The result is right and the traffic wasteful: the S × S scores are written, read, written and read again. None of the three
# kernels is badly written. The border *between* two kernels is expensive, because data can cross it only through memory. To
# save the traffic, remove the borders: one kernel that makes a tile of scores, uses it and drops it.
#
# ## 5 · Flash forward: the scores stay
#
# There is one program per block of queries. It loads its queries once and then walks over the keys. Each tile of scores
# exists only inside one turn of the loop. The program carries the state of lesson 02 along, for 64 rows side by side.

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
# Compare it with lesson 02: `factor` shrinks both total and acc, and there is one division, at the end. The lanes after
# the last key need three things:
#
# - **masks** protect memory;
# - **`other`** protects from NaN: a lane of V past the end would have the weight 0, but 0 · NaN is NaN;
# - **`where`** protects the result: a key of zeros has a score of 0, not −∞. No value of `other` in the load of K could
#   help, because the score is computed from the key afterwards.

# %% tags=["nbval-ignore-output"]
predict("04.reads",
        "256 tokens, blocks of 64 queries and 64 keys: how often is a row of K read in all?",
        unit="times")

# %%
def flash(q, k, v, kernel=flash_kernel, BLOCK_M=64, BLOCK_N=64):
    S, D = q.shape
    out, lse = torch.empty_like(q), torch.empty(S)
    kernel[(triton.cdiv(S, BLOCK_M),)](
        q, k, v, out, lse, S, D**-0.5, D=D, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    return out, lse


with record_accesses() as accesses:
    out, lse = flash(q, k, v)
ladder["flash"] = accesses
reads = kernel_access.counts(accesses, "k_ptr", "load", (S, D))
compare("04.reads", int(reads.max()))
errors = abs(out.numpy() - truth.out[0, 0]).max(), abs(lse.numpy() - truth.lse[0, 0]).max()
print("errors below 2e-6:", [bool(error < 2e-6) for error in errors])

# %% [markdown]
# **Once per block of queries**, so ⌈S / BLOCK_M⌉ times: not once, although a single kernel does all the work, and not once
# per query either. No program can use a value that another one has loaded. Move the slider over the programs; in each array, boxes are
# numbered in the order in which the program reads or writes them.

# %% tags=["nbval-ignore-output"]
maps = {"q_ptr": (S, D), "k_ptr": (S, D), "v_ptr": (S, D), "out_ptr": (S, D), "lse_ptr": (S, 1)}
kernel_access.play(ladder["flash"], maps, still="programs 0 to 3: run this cell to step through "
                   "them; all four are below")

# %%
three = {name: maps[name] for name in ("q_ptr", "k_ptr", "out_ptr")}
flash_figure = kernel_access.all_programs(ladder["flash"], three, "flash")
show(flash_figure, kernel_access.describe(ladder["flash"], three))

# %% [markdown]
# Q and out form a diagonal: every program has its own rows. K forms a wall: every program reads all rows. (V is read like K,
# and lse is written like out.)

# %% tags=["nbval-ignore-output"]
predict("04.block", "Which of the two block sizes reduces the traffic if you double it?",
        choices=["BLOCK_M, queries", "BLOCK_N, keys", "both"])

# %%
loaded = {}
for block_m, block_n in ((32, 64), (64, 64), (64, 128), (128, 64)):
    with record_accesses() as accesses:
        flash(q, k, v, BLOCK_M=block_m, BLOCK_N=block_n)
    times = kernel_access.counts(accesses, "k_ptr", "load", (S, D)).max()
    loaded[block_m, block_n] = kib(accesses, "load")
    print(f"BLOCK_M {block_m:3}, BLOCK_N {block_n:3}: K read {times} times, "
          f"{loaded[block_m, block_n]:.0f} KiB loaded")
ladder["flash, BLOCK_M 128"] = accesses  # the last one
helps = [name for name, sizes in (("BLOCK_M, queries", (128, 64)), ("BLOCK_N, keys", (64, 128)))
         if loaded[sizes] < loaded[64, 64]]
compare("04.block", "both" if len(helps) == 2 else helps[0])

# %% [markdown]
# Only larger blocks of *queries* do; BLOCK_N says in how many pieces a program reads K. Why not BLOCK_M = S? q, acc and
# the scores of a block must fit beside the arithmetic units, and with fewer programs some units have no work.
# (`ringlab kernels --offline` asks a compiler how much room the blocks of ringlab's own kernels take.)
#
# ## 6 · Causal: skip what nobody sees
#
# Row i sees keys up to i. Three changes, each on top of the one before, bring that into the kernel:
#
# 1. **The `where`** gets one more condition. The result is right, but tiles in which no row sees any key are still computed.
# 2. **The end of the loop**: the block's last row sees no key after its own place.
# 3. **Two loops**: below the diagonal every row sees every key, so those tiles need no `where`.

# %%
@triton.jit
def add_tile(m, total, acc, q, k_ptr, v_ptr, rows, first, S, scale, MASK: tl.constexpr,
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
# `add_tile` is the body of the loop, moved out: a kernel may call other `@triton.jit` functions. Only the `where` has
# changed: it is now under `if MASK`, and it compares positions. `MASK` is a constexpr, so the compiler makes two versions,
# and neither version tests `MASK` while it runs. The kernel itself has a constexpr `STEP`, which says how many of the
# three changes are in.

# %%
@triton.jit
def causal_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, scale, STEP: tl.constexpr,
                  D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows, d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :], mask=rows[:, None] < S, other=0.0)
    m, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    stop, full = S, 0
    if STEP >= 2:  # no row of this block sees a key after the last row
        stop = tl.minimum(S, (tl.program_id(0) + 1) * BLOCK_M)
    if STEP >= 3:  # all rows see the keys before the first row
        full = tl.program_id(0) * BLOCK_M // BLOCK_N * BLOCK_N
    for first in range(0, full, BLOCK_N):
        m, total, acc = add_tile(
            m, total, acc, q, k_ptr, v_ptr, rows, first, S, scale, False, D, BLOCK_N)
    for first in range(full, stop, BLOCK_N):
        m, total, acc = add_tile(
            m, total, acc, q, k_ptr, v_ptr, rows, first, S, scale, True, D, BLOCK_N)
    tl.store(out_ptr + rows[:, None] * D + d[None, :], acc / total[:, None], mask=rows[:, None] < S)
    tl.store(lse_ptr + rows, m + tl.log(total), mask=rows < S)

# %% [markdown]
# Take program 2, rows 128 to 191, at STEP 3: `stop` is 192 and `full` is 128. The tiles at 0 and 64 have no causal mask, the
# tile at 128 has one, and the tile at 192 is not visited. The causal mask *cuts* a tile if the tile's last key comes after
# the program's first row, as at 128.
#
# With S = 256 and blocks of 64, `flash` visits 16 tiles and loads 288 KiB.

# %% tags=["nbval-ignore-output"]
predict("04.tiles", "The second change leaves 10 of the 16 tiles. How many KiB are still loaded?",
        unit="KiB")

# %%
def causal(q, k, v, step, block=64):
    S, D = q.shape
    out, lse = torch.empty_like(q), torch.empty(S)
    causal_kernel[(triton.cdiv(S, block),)](
        q, k, v, out, lse, S, D**-0.5, STEP=step, D=D, BLOCK_M=block, BLOCK_N=block)
    return out, lse


causal_truth = oracle.attention(q[None, None], k[None, None], v[None, None], causal=True)
names = "causal: mask all", "causal: skip", "causal: skip, mask the diagonal"
for step, name in enumerate(names, 1):
    with record_accesses() as accesses:
        out, lse = causal(q, k, v, step)
    ladder[name] = accesses
    error = abs(out.numpy() - causal_truth.out[0, 0]).max()
    print(f"{name:32} error below 2e-6: {error < 2e-6}")

# %%
skipping = ladder["causal: skip"]
visited = [sum(a.argument == "k_ptr" and a.program[0] == p for a in skipping) for p in range(4)]
print("tiles visited by programs 0 to 3:", visited, "together", sum(visited))
compare("04.tiles", kib(skipping, "load"))
for name in ("q_ptr", "k_ptr", "v_ptr"):
    print(name, f"{kib([a for a in skipping if a.argument == name], 'load'):.0f} KiB")
skip_figure = kernel_access.all_programs(skipping, three, "causal: skip")
show(skip_figure, kernel_access.describe(skipping, three))

# %% [markdown]
# Program p visits p + 1 tiles, 10 of 16 together. 10/16 of 288 KiB would be 180, but each program still loads its own Q.
# Only K and V shrink, from 128 KiB each to 80, and the 32 KiB of Q remain. In the picture the wall has become stairs. The
# first program is done after one tile, the last one after four. On a GPU the programs run side by side, and the long ones
# decide when the kernel is done. Lesson 07 finds the same imbalance between ranks.
#
# No guard against −∞ was needed: every row sees key 0, so `m` is finite after the first tile. In the exercise some rows see
# nothing.
#
# ## 7 · The ladder
#
# The table has all our kernels. Each load of K is one tile. The last column counts tiles that are compared with
# the causal mask. It is not measured, but follows from the kernel: no tile, every visited tile, or only the cut ones.

# %%
def tiles(accesses):
    """The number of tiles of K that the programs load, and how many of them a causal mask cuts."""
    first_row = {a.program: a.offsets.min() // D for a in accesses if a.argument == "q_ptr"}
    last_keys = [(a.program, a.offsets.max() // D) for a in accesses if a.argument == "k_ptr"]
    return len(last_keys), sum(last > first_row[program] for program, last in last_keys)


print(f"{'':32} KiB read  written  tiles  causal mask")
for name, accesses in ladder.items():
    count, cut = tiles(accesses)
    masked = 0 if "causal" not in name else cut if "diagonal" in name else count
    traffic = f"{kib(accesses, 'load'):8.0f} {kib(accesses, 'store'):8.0f}"
    print(f"{name:32} {traffic} {count:6} {masked:12}")

# %% [markdown]
# - **Three kernels → flash:** only out and lse are written, 33 KiB instead of 544, and this ratio grows with S. The
#   reads shrink only from 896 to 288 KiB. Flash still reads K and V ⌈S / BLOCK_M⌉ times each. With D = 32 and BLOCK_M =
#   64, K and V together are S² numbers, and Q is 32 · S. The three kernels read 3.5 · S². So the factor is 3.1 at 256
#   tokens and 3.5 at 8,192.
# - **Larger BLOCK_M:** half of the reads of K and V (Q is read once, as before), and half as many tiles, each twice as
#   large.
# - **Mask all → skip:** 10 tiles instead of 16. For many blocks the share of tiles visited tends to one half.
# - **Mask only the diagonal:** the traffic stays the same, but only 4 of 10 tiles compare positions. This change saves
#   arithmetic: the number of cut tiles grows like S and that of all tiles like S², so the share with a mask falls.
#
# The kernels that `ringlab` ships are this last one with three additions, which lesson 12 builds: powers of two instead of
# e, because the hardware computes those; a table of the tiles to visit; and a state that is carried from one ring step to
# the next. On a GPU the text of a kernel stays the same, with one exception: there `print` takes a string only as its first
# argument, and the `print` of section 2 has three. Leave TRITON_INTERPRET unset, pass CUDA tensors, and measure there.
#
# ## Recap
#
# - A program computes a block: number, offsets, mask, load, arithmetic, store. No program writes what another one touches.
# - The mask of a load protects memory. The content of the lanes left over decides the result. Choose it with `other` if they
#   are used as loaded: −∞ before a maximum or an exp, 0 before a sum or a product. Choose it with a `where` if something is
#   computed from them first, as scores are from keys of 0.
# - The interpreter is right about values (after `repair()`), and blind to speed and races. Count bytes, not its seconds.
# - Flash forward writes only out and lse, and reads K and V ⌈S / BLOCK_M⌉ times.
# - Causal: end the loop at the block's last row, and mask only the tiles on the diagonal.
#
# ## Self-check
#
# <details><summary>1. 1,000 tokens, BLOCK_M 128, BLOCK_N 64: how often is K read, and in how many loads by each
# program?</summary>8 times (⌈1000/128⌉), in 16 loads (⌈1000/64⌉).</details>
#
# <details><summary>2. The last tile of K is loaded with other=0. Why is the result wrong without the
# where?</summary>A key of zeros has the score 0, and e⁰ = 1 is a weight like any other.</details>
#
# <details><summary>3. A kernel adds each program's sum to one number. It passes every test in the interpreter. What happens
# on a GPU?</summary>It races: loads and stores of different programs interleave. Use one place per program, or
# tl.atomic_add.</details>
#
# <details><summary>4. Which of the two block sizes would you double to reduce the traffic of K, and what limits
# you?</summary>BLOCK_M. Its q, acc and scores must fit on the chip, and there must be enough programs to keep all units
# busy.</details>
#
# **Now you:** [exercise 04](../exercises/04_triton_from_zero.ipynb): a softmax kernel, a flash forward that reads K once for
# several query heads, and its causal form.
