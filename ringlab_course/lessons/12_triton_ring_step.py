# %% [markdown]
# # 12 · The Triton ring step
#
# **Afterwards you can** fuse block attention and merge in one kernel, carry its state between the steps of the ring, say
# what a step reads and writes, and let it skip tiles by a table.
#
# **You need first** [lesson 04](04_triton_from_zero.ipynb), a flash kernel in Triton, and
# [lesson 05](05_emulated_ring.ipynb), the ring; for part 2 [lesson 08](08_striped_and_zigzag.ipynb), layouts.
#
# **Minutes** 60 to read and run; the exercise takes another 45.
#
# So far a step of the ring was two things: attention on the block that is here, then a merge. On a GPU that is two kernels,
# and everything goes through memory between them. Here the two become one kernel. Four versions of the step lead there:
#
# - Part 1, the state: (1) block and merge apart; (2) the state is carried; (3) the first and the last step.
# - Part 2, the mask: (4) tiles by a table.
#
# Kernels run in Triton's interpreter, on the CPU, because the interpreter can *count* bytes, tiles and launches. Its
# seconds mean nothing.

# %%
import math
import os
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from ringlab_course import compare, corpus, needs_triton, predict

needs_triton()
import triton
import triton.language as tl

from ringlab import VirtualCluster, dealt, oracle, ring_attention, striped, zigzag
from ringlab.blocks.triton import configs, offline
from ringlab.blocks.triton.interpreter import repair
from ringlab.blocks.triton.visits import row_visits
from ringlab.plan import tiles as launches  # lesson 08
from ringlab.viz.style import show
from ringlab_course.figures import ring_step, step_report

print("bfloat16 is exact in the interpreter:", repair())  # lesson 04

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
# an H200's peaks from its data sheet, 989 TFLOP/s and 4.8 TB/s. Nothing is timed.

# %%
for n in (512, 2048, 8192, 32768):
    compute, move = 4 * n * 128 / 989e12, 8 * 130 / 4.8e12
    print(f"n = {n:6,} keys in a block: moving the state takes {move / compute:6.1%} of the "
          f"arithmetic's time; 32 heads have {n * 32 * 130 * 4 / 1e6:5.1f} MB of state")

# %% [markdown]
# With few tokens per rank, moving the state takes nearly as long as the attention; with tens of thousands it is negligible.
# (The first rows are upper bounds: a GPU's cache holds tens of megabytes, so a small state may stay in it.) A kernel should
# read the state once in a step, and write it once.
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


def at_rank(layout):
    """The queries of rank 1, and the K/V blocks in the order in which it meets them."""
    shards = [layout.shard(text, each) for each in range(P)]
    return shards[rank][0], [shards[(rank - step) % P][1:] for step in range(P)]


q, blocks = at_rank(layout)
# R rows of queries on this rank, N keys in a block
R, N, SCALE = q.shape[2], blocks[0][0].shape[2], math.log2(math.e) / math.sqrt(D)
truth = oracle.attention(q, *text[1:]).out  # in float64, over all keys
print(f"q {tuple(q.shape)}, a block's k {tuple(blocks[0][0].shape)}")

# %% [markdown]
# The arithmetic of one tile is the same in all four versions:

# %%
@triton.jit
def add_tile(acc, m, total, q, K, V, base, keys, inside, visible, scale, D: tl.constexpr):
    """(acc, m, total) after one more tile of keys: lesson 04's, but in powers of two."""
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
    for key in range(0, N, BLOCK):
        keys = key + tl.arange(0, BLOCK)
        inside = keys < N
        acc, m, total = add_tile(
            acc, m, total, q, K, V, base, keys, inside, inside[None, :], scale, D)
    tl.store(PART + wide, acc / total[:, None], mask=own[:, None])
    lse = (m + tl.math.log2(total)) * 0.6931471805599453  # times ln 2
    tl.store(PART_LSE + at, lse, mask=own)

# %% [markdown]
# That is attention already, on one block:

# %%
def attend(q, k, v):
    """(out, lse) of one block, in float32."""
    part, lse = torch.empty(q.shape), torch.empty(q.shape[:-1])
    block_kernel[(triton.cdiv(R, BLOCK), H)](q, k, v, part, lse, H, R, N, SCALE, D, BLOCK)
    return part, lse


part, lse = attend(q, *blocks[0])
alone = oracle.attention(q, *blocks[0])
right = torch.from_numpy(alone.out)
print(f"grid {triton.cdiv(R, BLOCK), H}; block 0 alone, against the oracle: error of out "
      f"{(part - right).norm() / right.norm():.2%}, lse within 1e-5: "
      f"{bool(abs(lse.numpy() - alone.lse).max() < 1e-5)}")
part, _ = attend(q.float(), *(x.float() for x in blocks[0]))
small = (part - right).norm() / right.norm() < 1e-6
print("the same numbers in float32, weights not rounded: error below 1e-6:", bool(small))

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
# Every step launches both, one after the other. `report` runs all steps under lesson 04's `record_accesses`. It adds up the
# bytes of what belongs to *rows*: partials, state and results. All versions without a mask read the same q, k and v, so we
# leave those bytes out. We also count tiles: one for each tile whose keys are loaded.

# %%
def separate(q, blocks):
    """All steps, with block and merge apart; returns out in the dtype of q."""
    run, run_lse = torch.zeros(q.shape), torch.full(q.shape[:-1], -math.inf)
    for k, v in blocks:
        merge_kernel[(triton.cdiv(H * R, BLOCK),)](run, run_lse, *attend(q, k, v), H * R, D, BLOCK)
    return run.to(q.dtype)


ladder = {}  # the launches of each version, for the pictures
apart = step_report.report(ladder, "block, merge", truth, separate, q, blocks)
formula = P * H * R * 4 * (D + 1) * 4
print(f"by the formula, P steps of 4·(D + 1) float32 numbers a row: {formula / 1024:.0f} KiB")

# %% [markdown]
# A **pass** moves something as large as out once. Each step has four: the block kernel writes its partial; the merge reads
# the partial, reads the running out, and writes the new one.
#
# The error of 0.17 % is the rounding of out to bfloat16. Block 0 alone was returned in float32. Its 0.03 % come from
# `add_tile`, which rounds the weights to bfloat16.
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
    for key in range(0, N, BLOCK):
        keys = key + tl.arange(0, BLOCK)
        inside = keys < N
        acc, m, total = add_tile(
            acc, m, total, q, K, V, base, keys, inside, inside[None, :], scale, D)
    tl.store(ACC + wide, acc, mask=own[:, None])
    tl.store(M + at, m, mask=own)
    tl.store(TOTAL + at, total, mask=own)

# %% [markdown]
# These lines of the body have changed:

# %%
step_report.changes(block_kernel, carry_kernel)

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
carry = step_report.report(ladder, "carried state", truth, carried, q, blocks)
print(f"by the formula, P times state_bytes: {P * state_bytes(R, H, D) / 1024:.0f} KiB; "
      f"with a merge {apart / carry:.2f} times as many")

# %% [markdown]
# One launch instead of two, about half the bytes, and no merge at all.
#
# ## 4 · Third version: the first and the last step
#
# Two trips of the state are still useless: before the first step there is nothing worth reading, and after the last one
# nobody reads it.
#
# `FIRST` and `LAST` are `tl.constexpr`: Triton makes a kernel of its own for each combination, in which the other branch
# does not exist.

# %%
@triton.jit
def begin(ACC, M, TOTAL, at, wide, own, D: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    acc, total = tl.zeros((BLOCK, D), tl.float32), tl.zeros((BLOCK,), tl.float32)
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    if not FIRST:
        # .to: in section 5 a part of the state is stored in bfloat16
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
    for key in range(0, N, BLOCK):
        keys = key + tl.arange(0, BLOCK)
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
ends = step_report.report(ladder, "first and last", truth, fused, q, blocks)
out = fused(q, blocks)
print("NaN left in out:", int(out.isnan().sum()), "of", out.numel())
# the state is written P - 1 times and read P - 1 times; out is written once, in bfloat16
formula = H * R * ((2 * P - 2) * (D + 2) * 4 + 2 * D)
# torch first writes run, or the state; at the end it reads run, or acc and total, and writes out
in_torch = H * R * (4 * (D + 1) + 4 * D + 2 * D), H * R * (4 * (D + 2) + 4 * (D + 1) + 2 * D)
print(f"by the formula: {formula / 1024:.0f} KiB")
print(f"with torch's part: block, merge {(apart + in_torch[0]) / 1024:.0f} KiB, "
      f"carried state {(carry + in_torch[1]) / 1024:.0f} KiB")

# %%
show(ring_step.traffic(ladder, P), ring_step.describe_traffic(ladder, P))

# %% [markdown]
# The picture is too kind to the first two versions: it leaves out what torch does for them before and after (zeros; a cast
# or a division). The third version needs no zeros, and writes the finished out itself.
#
# In section 1's terms, with D = 128, n = 512 and 4 steps:

# %%
compute = 4 * 512 * 128 / 989e12  # seconds for one row of one head in one step
each = {"block, merge": 4 * (128 + 1) * 4, "carried state": 2 * (128 + 2) * 4,
        "first and last": ((2 * P - 2) * (128 + 2) * 4 + 2 * 128) / P}
for name, bytes_of_row in each.items():
    print(f"{name:14} {bytes_of_row:5.0f} bytes a step for a row of a head, "
          f"{bytes_of_row / 4.8e12 / compute:4.0%} of the arithmetic's time")

# %% [markdown]
# If all of it goes to memory, the traffic of block and merge takes longer than the attention's arithmetic, at these peaks. That
# of the third version takes two thirds of the arithmetic's time. (A cache may keep some of both, as in section 1.)
#
# ## 5 · Why the state is float32
#
# The state is most of what is left in the picture, and bfloat16 would halve it.
#
# A bfloat16 number has eight significant bits, so each store rounds by up to 0.4 %. Must all three parts be float32? After
# all, m is only a point of reference: the weights relative to *any* number near the largest score give the same result.
#
# The test needs large scores, because bfloat16 numbers lie further apart the larger they are:

# %%
def sharp(P):
    """Queries with large scores, and P blocks of 128 keys; random, so that P can grow."""
    torch.manual_seed(0)
    q = (3 * torch.randn(1, H, R, D)).bfloat16()
    return q, [[torch.randn(1, 1, N, D).bfloat16() for _ in "kv"] for _ in range(P)]


sharp_q, sharp_blocks = sharp(8)
keys = torch.cat([k for k, _ in sharp_blocks], 2).float()
top = (sharp_q.float() @ keys.mT * SCALE).amax(-1)  # of each row, in base 2
print(f"largest score of a row: {top.min():.1f} to {top.max():.1f}; "
      f"above 16 in {(top > 16).float().mean():.0%} of the rows")

# %% tags=["nbval-ignore-output"]
predict("12.state", "8 blocks of this data. One part of the state is stored in bfloat16 between "
        "the steps, the two others in float32. Which one harms the result most?",
        choices=["acc", "m", "total"])

# %%
def drift(P, narrow="none", agree=False):
    """Relative error of out after P blocks, with one part of the state in bfloat16.

    agree: m is rounded after each step, and acc and total follow it.
    """
    q, blocks = sharp(P)
    out, whole = torch.empty(q.shape), (torch.cat(x, 2) for x in zip(*blocks, strict=True))
    parts = dict(zip(("acc", "m", "total"), nothing_seen(q), strict=True))
    state = [x.bfloat16() if name == narrow else x for name, x in parts.items()]
    for step, (k, v) in enumerate(blocks):
        ends_kernel[(triton.cdiv(R, BLOCK), H)](
            q, k, v, *state, out, H, R, N, SCALE, D, BLOCK, step == 0, step == P - 1)
        if agree:
            acc, m, total = state
            rounded = m.bfloat16().float()
            change = torch.exp2(m - rounded)
            state = acc * change[..., None], rounded, total * change
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
# **m.** Why? Take two keys with the *same* score, 20.06, in two steps. Each should count one half:

# %%
score = 20.06
m = torch.tensor(score).bfloat16().item()  # after the first key, total is 1, relative to m = 20.06
old, new = 1.0, 2 ** (score - m)
print(f"m is stored as {m}: the new key weighs 2^{score - m:.2f} = {new:.3f}, the old one {old}")
print(f"they count {old / (old + new):.3f} and {new / (old + new):.3f} of out")
old *= 2 ** (score - m)
print(f"old one rescaled to the stored m: {old / (old + new):.3f} and {new / (old + new):.3f}")
print(f"the 8 blocks, acc and total rescaled to the stored m: {drift(8, agree=True):.2%}")

# %% [markdown]
# What was added up is relative to 20.06, and m says 20. So the rounded number is not the fault. The fault is that acc and total
# no longer **match** m. If they follow it, as in the last two lines, there is no harm.
#
# On this data acc and total harm less. But the error climbs with P for any of the three, because further steps round again.
# (The error of `none` is the rounding of the weights.) So all three are float32 between steps. The *wire* may be bfloat16, or
# less, because K and V are rounded only once; the exercise sends int8.

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
# Which tiles it may skip depends only on the **layout** (lesson 08). A tile of the score matrix is **full** if all its rows
# see all its keys, **skipped** if no row sees any, and else **masked**: the mask cuts it. The pictures show one head of our
# 512 tokens.

# %% tags=["nbval-ignore-output"]
predict("12.masked", "512 tokens, 4 ranks, zig-zag, tiles of 64 × 64: how many tiles of one head "
        "of rank 1 does the causal mask cut, all four steps together?", unit="tiles")

# %%
zig = [ring_step.step_picture(zigzag(S, P), rank, step, name="zig-zag") for step in range(P)]
show(ring_step.grid(zig), ring_step.describe_grid(zig))
compare("12.masked", sum(picture.count("masked") for picture in zig))

# %% [markdown]
# **Two**: the diagonal of its own block, in step 0, and none after that. The sequence has 8 pieces of 64 tokens, and rank 1
# owns pieces 1 and 6.
#
# - Step 1 brings pieces 0 and 7. All rows see piece 0, and none sees piece 7.
# - Step 2 brings pieces 3 and 4. The late rows see both. The early rows see neither, so they need no program.
# - Step 3 brings pieces 2 and 5, and again the early rows see neither. But this is the last step and out must be written, so
#   they keep a program.
#
# Other layouts cut other tiles. Here are four at step 1; in a live notebook, move the sliders over step and rank.

# %%
four = ring_step.layouts_at(S, P, rank, step=1)
show(ring_step.grid(four), ring_step.describe_grid(four))

# %% [markdown]
# (The thin strip at the token fold's right edge is token 511, which no row sees.)

# %% tags=["nbval-ignore-output"]
ring_step.play()

# %%
by_step = [ring_step.layouts_at(S, P, rank, step) for step in range(P)]
for each in zip(*by_step, strict=True):
    counts = "  ".join(str(picture.count("masked")) for picture in each)
    print(f"{each[0].layout:12} masked tiles in steps 0 to {P - 1}:  {counts}")

# %% [markdown]
# Striped and token fold have masked tiles in *every* step.
#
# ## 7 · A segment: four numbers
#
# One kernel should serve all these layouts, without loading a token's position. So the host says in a table, before the launch, which
# keys a program visits. A line of it is a **segment**, a piece of neighbouring keys.
#
# First a picture. The example is small: 64 tokens, striped, tiles of 8 × 8. Rank 1 meets the keys of rank 3. Its row 0
# (token 1) sees none of them, so it gets no program. A program takes up to eight rows. One takes rows 1 to 8, and the other, ours,
# rows 9 to 15:

# %%
small, TILE, ours = striped(64, P), 8, (9, 16)
segment = 0, 8, 15, -1  # start, split, stop, shift
show(step_report.segment(small, 1, 3, ours, segment),
     step_report.describe_segment(small, 1, 3, ours, segment))

# %% [markdown]
# Four numbers describe it:
#
# - *start*, 0: the first key;
# - *split*, 8: from this key on, tiles are masked; every row of the program sees all keys before it;
# - *stop*, 15: the key before which the segment ends, as no row sees key 15;
# - *shift*, −1: under the mask, row i sees key j where **j ≤ i + shift**. Row i is token 4i + 1, and key i is token 4i + 3,
#   which is later. So the last key that row i sees is key i − 1.
#
# The same numbers from the layout's positions:

# %%
row_tokens, key_tokens = small.positions(1), small.positions(3)
seen = key_tokens <= row_tokens[slice(*ours), None]  # [row, key]
last = seen.sum(1) - 1  # the last key that each row sees
for row, key in ((ours[0], last[0]), (ours[1] - 1, last[-1])):
    print(f"row {row}, token {row_tokens[row]}: up to key {key}, token {key_tokens[key]}")
split = (int(last.min()) + 1) // TILE * TILE  # whole tiles only
found = 0, split, int(last.max()) + 1, int(last[0]) - ours[0]
print("start, split, stop, shift:", *found, " as in the picture:", found == segment)

# %% [markdown]
# ## 8 · Fourth version: tiles by a table
#
# `row_visits` writes these lines for a whole launch. `PROGRAMS` says which rows a program owns and which lines of
# `SEGMENTS` it visits.

# %%
def launch_tables(layout, origin, every_row, tile=BLOCK):
    """PROGRAMS and SEGMENTS where rank 1 meets the keys of rank `origin`.

    every_row: whether rows that see nothing have a program too.
    """
    rectangles = launches(layout, rank, origin)
    return row_visits(rectangles, layout.length(rank), tile, tile, every_row, q.device)


visits = launch_tables(small, 3, every_row=False, tile=TILE)
print("PROGRAMS     row_start  row_stop  segments from  to")
for number, (begins, ends_at, first, after) in enumerate(visits.programs.tolist()):
    print(f"{number:8} {begins:13} {ends_at:9} {first:14} {after:3}")
print("SEGMENTS     start  split  stop  shift")
for number, line in enumerate(visits.segments.tolist()):
    print(f"{number:8} {line[0]:9} {line[1]:6} {line[2]:5} {line[3]:6}")

# %% [markdown]
# Segment 0 is ours. Program 1, of rows 1 to 8, has a single tile, with a mask. The longest walk comes first.
#
# Another layout is only another table. This function walks over one segment:

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
# Three details are easy to get wrong:
#
# - In j ≤ i + shift, `i` is the row of the *shard*, not of the tile.
# - A program must store nothing beyond its `row_stop`. Those rows belong to another program; if both store them, one result
#   is lost.
# - `if key >= split` decides for a whole tile, so split − start must be a multiple of BLOCK. Otherwise the tile across the
#   split has no mask, and no error says so. `row_visits` rounds the split down, as we did.

# %%
def by_table(q, blocks, layout):
    state, out = [x.fill_(math.nan) for x in nothing_seen(q)], torch.full_like(q, math.nan)
    for step, (k, v) in enumerate(blocks):
        ends = step == 0, step == len(blocks) - 1
        # in the first and in the last step every row needs a program
        tables = launch_tables(layout, (rank - step) % P, any(ends))
        table_kernel[(len(tables.programs), H)](
            q, k, v, *state, out, *tables, H, R, N, SCALE, D, BLOCK, *ends)
    return out

# %%
whole = oracle.attention(*text, causal=True).out
step_report.report(ladder, "causal, table", layout.shard(whole, rank), by_table, q, blocks, layout)
print("tiles if every one were computed and then masked:", P * H * (R // BLOCK) * (N // BLOCK))

# %%
note = "two problems: the first three versions have no mask, the last one is causal"
show(ring_step.traffic(ladder, P, note), ring_step.describe_traffic(ladder, P, note))

# %% [markdown]
# Skipped tiles are not even read: 18 tiles are loaded, the pictures' 9 for each of 2 heads. Half of the rows see nothing in
# step 2 and have no program there, so their state is not moved: 186 KiB in place of 220.
#
# In lesson 08 each rectangle was a launch with a merge. A table holds any number of rectangles:

# %%
fold = dealt(S, P, chunk=1, folded=True)  # the token fold
for name, other in (("zig-zag", layout), ("token fold", fold)):
    rectangles = sum(len(launches(other, rank, origin)) for origin in range(P))
    print(f"{name}: {rectangles} launches by rectangles; by table")
    mine = other.shard(whole, rank)
    step_report.report({}, name, mine, by_table, *at_rank(other), other)

# %% [markdown]
# **One launch a step, whatever the layout**, and nothing to merge: 4 instead of 16. The zig-zag still wins: 18 tiles instead
# of 32. At this size every tile of the token fold is masked. (219 KiB, not 220: its row 0 sees nothing in step 2.)
#
# ## 9 · The same as ringlab's
#
# The kernel that ringlab ships is built like yours. `block="triton"` gives it every step of the ring. Here are four virtual
# ranks, real text in float32, against the float64 oracle of the whole sequence:

# %%
exact = corpus.qkv(S, heads=H, kv_heads=1, head_dim=D)


def on_each_rank(ring):
    shard = layout.shard(exact, ring.rank)
    return ring_attention(*shard, ring=ring, layout=layout, causal=True, block="triton")


got = layout.unshard(VirtualCluster(P).run(on_each_rank).results)
right = oracle.attention(*exact, causal=True).out
error = (got - torch.from_numpy(right)).abs().max() / abs(right).max()
print(f"the ring's out is the oracle's, for all {S} tokens, to 1e-5: {bool(error < 1e-5)}")

# %% [markdown]
# Read on in [kernels.py](../ringlab/blocks/triton/kernels.py). `forward_step` has the shape of `table_kernel`, and `_attend`
# that of `add_tile`. The page [Triton kernels and GPUs](../docs/guide/triton.md) says what they add, and why the backward has
# two kernels.
#
# ## Further · Do the tiles fit?
#
# You may skip this. Lesson 13 measures how fast a kernel is, but a compiler can say without a GPU whether a program's tiles
# fit:
#
# - A program's threads work in **warps**, groups of 32.
# - acc, scores and weights lie in **registers**. A thread has at most 255, and the compiler **spills** the rest to memory.
# - q and the K and V tiles lie in **shared memory**.
#
# ringlab gives a program of 128 rows 8 warps. With 4, each thread holds twice as much:

# %% tags=["nbval-ignore-output"]
# sm_90 is the compiler's name for the H100 and H200; 128 is the head dim
shipped = configs.choose("forward_step", "sm_90", 128, "bfloat16")
fewer_warps = replace(shipped, num_warps=shipped.num_warps // 2)
jobs = [offline.Job("forward_step", "sm_90", 128, "bfloat16", config)
        for config in (shipped, fewer_warps)]
for job, made in zip(jobs, offline.compile_all(jobs), strict=True):
    print(f"{job.config.block_m} rows, {job.config.num_warps} warps: "
          f"{made.registers} registers a thread, {made.spill_bytes} bytes spilled, "
          f"{made.shared_bytes / 1024:.0f} KiB of shared memory")

# %% [markdown]
# With 4 warps the registers run out, and part of what we kept out of memory goes back there. So if you enlarge a tile, look
# at the spills before you measure.
#
# ## Recap
#
# - A ring step sends its K/V block over the wire once. Between kernel and memory it moves a state of D + 2 float32 numbers for
#   each row and head, **both ways**: with as many rows as keys, twice the block in bfloat16, more with grouped heads.
# - Block and merge apart: two launches, four passes over out. State carried: one launch, two passes, less in the first and
#   in the last step.
# - The state is float32. Where scores are large, m matters most, because acc and total must match it.
# - Layouts are tables: rows of a program, segments of keys, a shift. Any layout is one launch a step, and skipped tiles are
#   not even read.
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
