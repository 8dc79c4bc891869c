# %% [markdown]
# # 12 · The Triton ring step
#
# **Afterwards you can** fuse block attention and merge in one kernel, carry its state between the steps of the ring, say
# what a step reads and writes, and let it skip tiles by a table.
#
# **You need first** [lesson 04](04_triton_from_zero.ipynb), a flash kernel in Triton, and
# [lesson 05](05_emulated_ring.ipynb), the ring; for part 2 [lesson 08](08_striped_and_zigzag.ipynb), layouts.
#
# **Minutes** 60 to read and run, in two parts; the exercise takes another 45.
#
# So far a step of the ring was two things: attention on the block that is here, then a merge. On a GPU that is two kernels,
# and everything that passes from one to the other goes through memory. Here the two become one kernel. Part 1 builds it,
# and counts what each change saves. Part 2 teaches it the causal mask, and says for which blocks a library's two kernels are
# still faster.
#
# The kernels run on the CPU, in Triton's interpreter. It can *count* bytes, tiles and launches. Its seconds mean nothing.

# %%
import math
import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from ringlab_course import compare, corpus, needs_triton, predict

needs_triton()
import triton
import triton.language as tl

from ringlab import VirtualCluster, dealt, oracle, ring_attention, striped, zigzag
from ringlab.blocks.triton.interpreter import repair
from ringlab.blocks.triton.visits import row_visits
from ringlab.cost.hardware import hardware
from ringlab.plan import tiles as rectangles  # lesson 08
from ringlab.viz.style import show
from ringlab_course.figures import ring_step, step_report, two_kernels

print("bfloat16 is exact in the interpreter:", repair())  # lesson 04

# %% [markdown]
# # Part 1 · One kernel
#
# ## 1 · What a step must remember
#
# A rank's queries stay, and P blocks of keys come by. After each block, every query row has seen some keys and not yet
# others. What must it remember until the next block arrives? The state of lesson 02:
#
# - `acc`, the sum of weights times values, not yet divided by anything: D numbers;
# - `m`, the largest score so far: one number;
# - `total`, the sum of the weights: one number.
#
# They are float32 (section 5 says why). Between two steps they are in the GPU's memory. So a step reads the state of each
# row of each head, and writes it back. It also reads one block of K and V, in bfloat16. (Several programs read it. We count it
# once, as if the cache kept it.)

# %% tags=["nbval-ignore-output"]
predict("12.bytes", "D = 128, as many K/V heads as query heads, as many rows as keys. For each "
        "byte of the K/V block, how many bytes of state does a step read and write?", unit="bytes")

# %%
def state_bytes(rows, H, D):
    """Bytes to read and write acc, m and total, float32."""
    return 2 * rows * H * (D + 2) * 4


def kv_bytes(keys, heads, D):
    """Bytes to read a K/V block in bfloat16."""
    return 2 * keys * heads * D * 2


compare("12.bytes", round(state_bytes(1, 8, 128) / kv_bytes(1, 8, 128), 2))
print(f"with 8 query heads on 1 K/V head: {state_bytes(1, 8, 128) / kv_bytes(1, 1, 128):.2f}")

# %% [markdown]
# **Twice the K/V block.** For a row of one head, acc has D numbers of 4 bytes and is moved both ways: 8·D bytes. For a key, K
# and V have 2·D numbers of 2 bytes: 4·D. With grouped heads the state is many times the block, because it has all query
# heads. So it pays to move the state as seldom as possible.
#
# ## 2 · The start: two kernels
#
# First something to beat: lesson 04's kernel on each block, then lesson 02's merge as a second kernel. You know both. They
# are in [two_kernels.py](../ringlab_course/figures/two_kernels.py).
#
# Our data is real text: 512 tokens on 4 ranks, 4 query heads on 2 K/V heads, bfloat16, no mask. We play rank 1.

# %%
rank, P, S, H, K, D, BLOCK = 1, 4, 512, 4, 2, 32, 64
layout = zigzag(S, P)  # which tokens a rank owns: it does not matter before part 2
text = tuple(x.bfloat16() for x in corpus.qkv(S, heads=H, kv_heads=K, head_dim=D))


def at_rank(layout):
    """The queries of rank 1, and the K/V blocks in the order in which it meets them."""
    shards = [layout.shard(text, each) for each in range(P)]
    return shards[rank][0], [shards[(rank - step) % P][1:] for step in range(P)]


q, blocks = at_rank(layout)
R, N = q.shape[2], blocks[0][0].shape[2]  # rows of queries on this rank, keys in a block
truth = oracle.attention(q, *text[1:]).out  # in float64, over all keys
print(f"q {tuple(q.shape)}; k of one block {tuple(blocks[0][0].shape)}")

# %% [markdown]
# `report` runs all four steps and counts launches and tiles. It also counts the bytes "for rows": those of partial results,
# state and out, read and written. It leaves out q, k and v, because every version in part 1 reads the same of them.

# %%
ladder = {}  # what each version moves, for the picture in section 4
apart = step_report.report(ladder, "two kernels", truth, two_kernels.separate, q, blocks)
formula = P * H * R * 4 * (D + 1) * 4
print(f"by the formula, P steps of 4·(D + 1) float32 numbers a row: {formula / 1024:.0f} KiB")

# %% [markdown]
# Why four times (out, lse) in each step? The first kernel writes its result for this block. The merge reads it again, reads
# the running result, and writes the new one. Each of the four is a *pass*: it moves something as large as out once. (The error is that of the final rounding to bfloat16.)
#
# ## 3 · Carry the state
#
# The first kernel normalises its result, and then the merge weighs it again. That is needless: let the kernel *begin with
# the state of the step before*. Then a further block is nothing but further tiles, and there is nothing to merge.
#
# Here is the work on one tile of keys. It is that of lesson 04, with one change: `exp2` in place of `exp`, because powers of
# two are what a GPU computes. Since eˣ is 2 to the power x·log₂e, the factor log₂e goes into `scale`. So the scores, and m
# with them, are now in base 2.

# %%
SCALE = math.log2(math.e) / math.sqrt(D)


@triton.jit
def add_tile(acc, m, total, q, K, V, base, keys, inside, visible, scale, D: tl.constexpr):
    """(acc, m, total) after one more tile of keys."""
    at = (base + keys)[:, None] * D + tl.arange(0, D)
    k = tl.load(K + at, mask=inside[:, None], other=0.0)
    v = tl.load(V + at, mask=inside[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, -float("inf"))
    new = tl.maximum(m, tl.max(scores, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)  # a row that has seen nothing
    weights, old = tl.math.exp2(scores - safe[:, None]), tl.math.exp2(m - safe)
    acc = acc * old[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, new, total * old + tl.sum(weights, 1)

# %% [markdown]
# `inside` says which keys exist, and `visible` which keys each row sees. `base` is the place of this K/V head's first key.
#
# Now the kernel around it. A program owns 64 rows of one head, and `group` query heads share a K/V head. Read its three
# parts: load the state, walk over the tiles, store the state.

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
# Before the first step torch creates the state of rows that have seen nothing. After the last one it divides:

# %%
def nothing_seen(q):
    """acc, m and total before the first step."""
    acc = q.new_zeros(q.shape, dtype=torch.float32)
    return acc, acc.new_full(q.shape[:-1], -math.inf), acc.new_zeros(q.shape[:-1])


def carried(q, blocks):
    """All steps; returns out."""
    state = nothing_seen(q)
    for k, v in blocks:
        carry_kernel[(triton.cdiv(R, BLOCK), H)](q, k, v, *state, H // K, R, N, SCALE, D, BLOCK)
    acc, _, total = state
    return (acc / total[..., None]).to(q.dtype)


carry = step_report.report(ladder, "carried state", truth, carried, q, blocks)
print(f"by the formula, P times state_bytes: {P * state_bytes(R, H, D) / 1024:.0f} KiB; "
      f"two kernels move {apart / carry:.2f} times as much")

# %% [markdown]
# One launch a step instead of two, and about half the bytes.
#
# ## 4 · The first and the last step
#
# Two trips of the state are still useless. Before the first step there is nothing worth reading. After the last one nobody
# reads the state: only out is wanted.
#
# So the kernel gets two switches, `FIRST` and `LAST`. They are `tl.constexpr`: Triton compiles a kernel of its own for each
# combination, and the branch not taken does not exist in it.

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
# The kernel is `carry_kernel` with these two in place of its loads and stores:

# %%
@triton.jit
def ends_kernel(Q, K, V, ACC, M, TOTAL, OUT, group, R, N, scale, D: tl.constexpr,
                BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    head, rows = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own, at, base = rows < R, head * R + rows, head // group * N
    wide = at[:, None] * D + tl.arange(0, D)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc, m, total = begin(ACC, M, TOTAL, at, wide, own, D, BLOCK, FIRST)  # new
    for key in range(0, N, BLOCK):
        keys = key + tl.arange(0, BLOCK)
        inside = keys < N
        acc, m, total = add_tile(
            acc, m, total, q, K, V, base, keys, inside, inside[None, :], scale, D)
    finish(acc, m, total, ACC, M, TOTAL, OUT, at, wide, own, LAST)  # new

# %% [markdown]
# Before we run it, we fill state and out with NaN. Do the same in your own tests: fresh memory is often zero by luck, and
# then a first step that reads it looks right for weeks.

# %%
def fused(q, blocks):
    """All steps; returns out."""
    state, out = [x.fill_(math.nan) for x in nothing_seen(q)], torch.full_like(q, math.nan)
    for step, (k, v) in enumerate(blocks):
        ends = step == 0, step == len(blocks) - 1
        ends_kernel[(triton.cdiv(R, BLOCK), H)](
            q, k, v, *state, out, H // K, R, N, SCALE, D, BLOCK, *ends)
    return out


ends = step_report.report(ladder, "first and last", truth, fused, q, blocks)
print("NaN left in out:", int(fused(q, blocks).isnan().sum()))
show(step_report.traffic(ladder, P), step_report.describe_traffic(ladder, P))

# %% [markdown]
# In step 0 the last version reads no state, and in step 3 it writes only out, in bfloat16. (Not drawn: what torch moves
# for the two earlier versions before step 0 and after step 3.) Where lse is wanted, too, `finish` also stores (m + log₂
# total) · ln 2: the factor turns base 2 back into the natural logarithm.
#
# Does it matter? Take an H200's peaks from its data sheet, 989 TFLOP/s and 4.8 TB/s, and D = 128. Nothing is timed here. We
# divide the time to move one row's bytes by the time of that row's arithmetic, for blocks of 512 and of 8,192 keys.

# %%
each = {"two kernels": 4 * (128 + 1) * 4, "carried state": 2 * (128 + 2) * 4,
        "first and last": ((2 * P - 2) * (128 + 2) * 4 + 2 * 128) / P}
for name, bytes_of_row in each.items():  # of one head, in one step
    shares = [bytes_of_row / 4.8e12 / (4 * n * 128 / 989e12) for n in (512, 8192)]
    print(f"{name:14} {bytes_of_row:5.0f} bytes a row: 512 keys {shares[0]:4.0%} of the "
          f"arithmetic's time, 8,192 keys {shares[1]:3.0%}")

# %% [markdown]
# With short blocks and two kernels, these bytes take longer than the attention itself. One kernel brings them below it, and
# a GPU can load while it computes. With long blocks they hardly count. (A cache may keep some of the bytes, and then
# they count less.)
#
# ## 5 · Why the state is float32
#
# The arrows of the state would be half as wide if it were bfloat16, like K and V.
#
# But K and V are rounded once, and the state in every step. Perhaps one part of it can bear that: m need not be exactly the
# largest score. Subtract any nearby number from all scores, and it cancels in acc / total.
#
# We test it where scores are large, on 8 blocks of random keys.

# %% tags=["nbval-ignore-output"]
predict("12.state", "One part of the state is stored in bfloat16 between the steps, the two "
        "others in float32. Which one harms the result most?", choices=["acc", "m", "total"])

# %%
torch.manual_seed(0)
sharp_q = (3 * torch.randn(1, H, R, D)).bfloat16()  # times 3: large scores
sharp_blocks = [[torch.randn(1, K, N, D).bfloat16() for _ in "kv"] for _ in range(8)]
keys, values = (torch.cat(x, 2) for x in zip(*sharp_blocks, strict=True))
sharp_truth = torch.from_numpy(oracle.attention(sharp_q, keys, values).out)


def error_with(narrow):
    """Relative error of out, with the part of the state named `narrow` in bfloat16."""
    out, names = torch.empty(sharp_q.shape), ("acc", "m", "total")
    state = [x.bfloat16() if name == narrow else x
             for name, x in zip(names, nothing_seen(sharp_q), strict=True)]
    for step, (k, v) in enumerate(sharp_blocks):
        ends_kernel[(triton.cdiv(R, BLOCK), H)](
            sharp_q, k, v, *state, out, H // K, R, N, SCALE, D, BLOCK, step == 0, step == 7)
    return ((out - sharp_truth).norm() / sharp_truth.norm()).item()


errors = {narrow: error_with(narrow) for narrow in ("nothing", "acc", "m", "total")}
for narrow, error in errors.items():
    print(f"{narrow:7} in bfloat16: error {error:.2%}")
compare("12.state", max(errors, key=errors.get))

# %% [markdown]
# **m**, about twice as much as the others. To see why, follow two keys with the *same* score, 20.06, in two steps. Each should count one half.
#
# After the first key m = 20.06 and total = 1: the first key weighs 2⁰ = 1, *relative to 20.06*. Now m is stored:

# %%
score = 20.06
stored = torch.tensor(score).bfloat16().item()
new = max(stored, score)  # the largest score after the second key
first, second = 2 ** (stored - new), 2 ** (score - new)
print(f"m is stored as {stored}; the first key now weighs 2^{stored - new:.2f} = {first:.3f}, "
      f"the second one {second:.0f}")
print(f"so they count {first / (first + second):.3f} and {second / (first + second):.3f}")

# %% [markdown]
# Step 2 believes the stored m: it rescales the first key's weight as if it were relative to 20. It was relative to 20.06. That is the fault: acc and
# total no longer *match* m.
#
# Rounding acc or total does less harm, but not none. So all three stay float32. K and V are rounded only once, before they
# travel. So on the *wire* they may be bfloat16, or less: the exercise sends int8.

# %% [markdown]
# ---
# **End of part 1. You may stop here.** You now know how a step of the ring becomes one launch: it carries acc, m and total
# in float32, reads no state in the first step, and writes none in the last. You can already solve stages 12.tile, 12.ends
# and 12.step of [the exercise](../exercises/12_triton_ring_step.ipynb). If you return in a fresh kernel, run all cells up
# to here first.
#
# ---

# %% [markdown]
# # Part 2 · The mask
#
# ## 6 · Which tiles the mask cuts
#
# Now the mask is causal. Our kernel would compute every tile and throw about half of its work away.
#
# Which tiles can it skip? A tile of the score matrix is **full** if all its rows see all its keys, **skipped** if no row sees
# any, and **masked** if the mask cuts through it. Which tile is which depends only on the *layout*, the choice of the tokens
# that a rank owns (lesson 08).

# %% tags=["nbval-ignore-output"]
predict("12.masked", "512 tokens, 4 ranks, zig-zag, tiles of 64 × 64: how many tiles of one head "
        "of rank 1 does the causal mask cut, all four steps together?", unit="tiles")

# %%
zig = [ring_step.step_picture(zigzag(S, P), rank, step, name="zig-zag") for step in range(P)]
show(ring_step.grid(zig), ring_step.describe_grid(zig))
compare("12.masked", sum(picture.count("masked") for picture in zig))

# %% [markdown]
# **Two**: the diagonal of its own block, in step 0. The sequence has 8 pieces of 64 tokens, and rank 1 owns pieces 1 and 6.
#
# - Step 1 brings pieces 0 and 7. All rows see piece 0, and none sees piece 7.
# - Step 2 brings pieces 3 and 4. The late rows see both. The early rows see neither, so they need no program.
# - Step 3 brings pieces 2 and 5, and again the early rows see neither. But this is the last step and out must be written, so
#   they keep a program.
#
# Other layouts cut other tiles. Here they are at step 1; below them a slider moves over the steps.

# %%
every_layout = ring_step.layouts_at(S, P, rank, step=1)
show(ring_step.grid(every_layout), ring_step.describe_grid(every_layout))

# %% [markdown]
# (The thin strip at the token fold's right edge is token 511, which no row sees.)

# %% tags=["nbval-ignore-output"]
ring_step.play()

# %% [markdown]
# ## 7 · A segment: four numbers
#
# One kernel should serve all these layouts. So the CPU works out, for each program, its rows and its keys, and passes
# two tables. Keys come as **segments**, runs of neighbouring keys.
#
# Take a small example: 64 tokens, striped, tiles of 8 × 8. Rank 1 meets the keys of rank 3. Rank 1's row 0 (token 1) sees none
# of them and needs no program. One program owns rows 9 to 15, shown here; another owns rows 1 to 8.

# %%
small, TILE, ours = striped(64, P), 8, (9, 16)
segment = 0, 8, 15, -1  # start, split, stop, shift
show(step_report.segment(small, 1, 3, ours, segment),
     step_report.describe_segment(small, 1, 3, ours, segment))

# %% [markdown]
# Four numbers describe the picture:
#
# - *start* = 0: the first key to visit;
# - *split* = 8: Row 9 sees keys 0 to 8, so keys before 9 need no mask; a tile is masked as a whole, so split is the tile's
#   edge before it;
# - *stop* = 15: no row sees key 15, so the visit ends before it;
# - *shift* = −1: under the mask, row i sees key j where **j ≤ i + shift**.
#
# Why −1? Row i is token 4i + 1, and key i is token 4i + 3, which is later. So the last key that row i sees is key i − 1.
#
# `row_visits` works out these numbers for a whole launch. A line of `PROGRAMS` is a program's first row, the row after its
# last, its first segment, and the segment after its last. A line of `SEGMENTS` has the four numbers. Here they are for our
# example, and for the same step under a token fold:

# %%
def launch_tables(layout, origin, every_row, tile=BLOCK):
    """PROGRAMS and SEGMENTS where rank 1 meets the keys of rank `origin`.

    every_row: whether rows that see nothing have a program too.
    """
    met = rectangles(layout, rank, origin)
    return row_visits(met, layout.length(rank), tile, tile, every_row, q.device)


def print_tables(layout):
    """Print both tables where rank 1 meets rank 3 in tiles of 8 × 8."""
    visits = launch_tables(layout, 3, every_row=False, tile=TILE)
    print("  PROGRAMS", *visits.programs.tolist())
    print("  SEGMENTS", *visits.segments.tolist())


print("striped")
print_tables(small)
print("token fold")
print_tables(dealt(64, P, chunk=1, folded=True))

# %% [markdown]
# Segment 0 of the striped layout is our picture. Under the token fold a rank holds two runs of tokens: rank 1 holds 1, 9, 17, …
# and 6, 14, 22, …, and rank 3 holds 3, 11, 19, … and 4, 12, 20, … So each program visits two segments, each with a shift of
# its own. In segment 3, for example, row 8 is token 6 and key 8 is token 4, which is earlier. So row i sees key i: shift 0.
#
# The longest walk, counted in tiles, stands first, so that no long program starts last.
#
# ## 8 · Tiles by a table
#
# Two changes teach our kernel to read tables. First, a function that walks over one segment. It masks only from `split` on:

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
# Second, the kernel takes its rows from PROGRAMS, and walks over its segments instead of over all keys:

# %%
@triton.jit
def table_kernel(Q, K, V, ACC, M, TOTAL, OUT, PROGRAMS, SEGMENTS, group, R, N, scale,
                 D: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    head, program = tl.program_id(1), PROGRAMS + 4 * tl.program_id(0)  # new
    rows, row_stop = tl.load(program) + tl.arange(0, BLOCK), tl.load(program + 1)  # new
    own, at, base = rows < row_stop, head * R + rows, head // group * N
    wide = at[:, None] * D + tl.arange(0, D)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc, m, total = begin(ACC, M, TOTAL, at, wide, own, D, BLOCK, FIRST)
    for number in range(tl.load(program + 2), tl.load(program + 3)):  # new
        segment = SEGMENTS + 4 * number
        acc, m, total = walk(acc, m, total, q, K, V, segment, base, rows, scale, D, BLOCK)
    finish(acc, m, total, ACC, M, TOTAL, OUT, at, wide, own, LAST)

# %% [markdown]
# Three details are easy to get wrong:
#
# - In j ≤ i + shift, i is the row of the *shard*, not of the tile.
# - A program must store nothing beyond its `row_stop`. Those rows belong to another program; if both store them, one result
#   is lost.
# - `if key >= split` decides for a whole tile. So a tile must not lie across the split: split − start must be a multiple of
#   BLOCK. `row_visits` rounds the split down so that this holds.

# %%
def by_table(q, blocks, layout):
    """All steps under the causal mask; returns out."""
    state, out = [x.fill_(math.nan) for x in nothing_seen(q)], torch.full_like(q, math.nan)
    for step, (k, v) in enumerate(blocks):
        ends = step == 0, step == len(blocks) - 1
        # in the first and in the last step every row needs a program
        tables = launch_tables(layout, (rank - step) % P, any(ends))
        table_kernel[(len(tables.programs), H)](
            q, k, v, *state, out, tables.programs, tables.segments,
            H // K, R, N, SCALE, D, BLOCK, *ends)
    return out


whole = oracle.attention(*text, causal=True).out
for name, each in (("zig-zag", layout), ("token fold", dealt(S, P, chunk=1, folded=True))):
    step_report.report({}, name, each.shard(whole, rank), by_table, *at_rank(each), each)
print("tiles if every one were computed and then masked:", P * H * (R // BLOCK) * (N // BLOCK))

# %% [markdown]
# **One launch a step, whatever the layout.** So lesson 08's last argument for the zig-zag, fewer launches, does not hold for
# this kernel. Under zig-zag 36 of 64 tiles are loaded: 9 for each of 4 heads, as in section 6's
# picture. A skipped tile is not even read. Under the token fold no tile can be skipped at this size, but the same kernel serves it.
#
# The state moves less than in section 4, too: under zig-zag half of the rows have no program in step 2, so their state stays
# where it is. (Under the token fold that is one row, token 1.)
#
# ## 9 · The same as ringlab's
#
# The kernel that ringlab ships is built like yours. `block="triton"` gives it every step of the ring. Here are four virtual
# ranks, real text in float32, against the float64 oracle of the whole sequence:

# %%
exact = corpus.qkv(S, heads=H, kv_heads=K, head_dim=D)


def on_each_rank(ring, block):
    shard = layout.shard(exact, ring.rank)
    return ring_attention(*shard, ring=ring, layout=layout, causal=True, block=block)


def is_right(block):
    got = layout.unshard(VirtualCluster(P).run(on_each_rank, block).results)
    right = oracle.attention(*exact, causal=True).out
    return bool((got - torch.from_numpy(right)).abs().max() / abs(right).max() < 1e-5)


print(f"the ring's out is the oracle's, for all {S} tokens, to 1e-5:", is_right("triton"))

# %% [markdown]
# Read on in [kernels.py](../ringlab/blocks/triton/kernels.py): `forward_step` has the shape of `table_kernel`, and `_attend`
# that of `add_tile`. The page [Triton kernels and GPUs](../docs/guide/triton.md) says what they add, how to ask a compiler
# without a GPU whether the tiles fit, and why the backward has two kernels.
#
# ## 10 · Which kernel a production ring takes
#
# The kernel is one argument of the ring. Here the same ring runs with torch's own kernel, and with plain torch operators:

# %%
for block in ("native", "blockwise"):
    print(f"{block}: the oracle's to 1e-5:", is_right(block))

# %% [markdown]
# On GPUs, production rings mostly take a kernel of a library: `block="cudnn"`, or `block="flash"` for flash-attn. Such a
# kernel returns out and lse of one block and cannot go on from a state. So each step is section 2 again, a kernel and a
# merge, with its four passes over out. Why is that often the better choice?
#
# Library kernels are written for one chip. On Hopper, FlashAttention-3 computes the softmax of one tile while the products
# of another tile run, which Triton's compiler does not find by itself. Its paper measured both on an H100, and the next cell
# takes its rates. The passes over out take as long as memory needs for their bytes, by the data sheet:

# %%
gpu, D_paper = hardware("h100"), 128
# FLOP/s on H100, forward, causal, 16k tokens, from arXiv 2407.08608
published = {"FlashAttention-3": 616e12, "Triton": 378e12}
passes = {"FlashAttention-3": 4, "Triton": 2}  # over out, in float32: sections 2 and 3

print("nanoseconds a row and head in one step of the ring: products + passes over out")
for c in (256, 1024, 8192):
    told = []
    for name, rate in published.items():
        products = 4 * c * D_paper / rate
        moving = passes[name] * 4 * D_paper / gpu.memory_bytes_per_s
        told.append(f"{name} {1e9 * products:6.2f} + {1e9 * moving:.2f}")
    print(f"{c:5} keys a block:  {',   '.join(told)}")

# %% [markdown]
# The passes cost the same for every block, but the products grow with its keys. Below about 600 keys the carried state
# wins; above, the faster kernel does. A ring of a million tokens has long blocks: 8,192 keys or more.
# (This is arithmetic with other people's figures. No kernel of this course has run on a GPU yet;
# [lesson 13](13_multi_gpu.ipynb) says how you measure your own.)
#
# Whatever you choose, a ring needs three things of a kernel, and many lack one: it **returns lse** forward, it takes the
# **final out and lse** in backward (lesson 09), and it knows the **mask of a tile**. A tile that the chosen kernel cannot compute
# goes to plain torch operators. With `block="auto"` the trace records the choice.
#
# ## Recap
#
# - Between kernel and memory a ring step moves a state of D + 2 float32 numbers for each row and head, **both ways**. With
#   as many rows as keys that is twice the K/V block in bfloat16; with grouped heads it is more.
# - Two kernels: two launches a step, four passes over out. State carried: one launch, two passes, and less in the first and
#   in the last step.
# - The state is float32. Of its parts m is the most delicate, because acc and total must match it.
# - Layouts are tables: rows of a program, segments of keys, a shift. Any layout is one launch a step, and skipped tiles are
#   not even read.
# - The kernel is one argument. Library kernels pay for a merge in each step. By published rates they are still faster
#   for blocks of 1,024 keys and more.
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
