# %% [markdown]
# # 03 · Tiled attention, forward and backward
#
# **Afterwards you can**
# - write attention that never holds more than one tile of the score matrix, with memory linear in S;
# - say what is in memory at any moment of the computation, and why;
# - derive and write the backward from lse and delta, and say why both must be final;
# - say what tiling saves and what it does not save.
#
# **You need first** [lesson 01](01_naive_attention.ipynb) (naive attention and the S² wall) and
# [lesson 02](02_online_softmax.ipynb) (lse, and the merge of `(out, lse)`).
#
# **Minutes** 75, in two parts of 35 and 40; the machine computes for about one.
#
# Lesson 01 ended at a wall: the score matrix of a long text does not fit into memory. Lesson 02 showed that its rows can
# be merged from parts. This lesson builds attention from such parts, and then does the harder half, the backward. The
# ideas are those of *FlashAttention* (arXiv 2205.14135), which keeps each tile of scores in fast memory and computes it
# again in the backward, and *Blockwise Parallel Transformer* (arXiv 2305.19370), which computes the whole
# layer block by block.
#
# Tensors are (B, H, S, D): one device holds all S tokens. New here: a *tile* is a rectangle of the score matrix, a run of
# queries times a run of keys.

# %%
import itertools
import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from ringlab.blocks.blockwise import Blockwise
from ringlab.blocks.protocol import BackwardRows
from ringlab.comm.memory import MemoryMeter
from ringlab_course import compare, predict
from ringlab.merge import Partial, merge
from ringlab_course.figures import tile_scan
from ringlab.viz.style import show

torch.set_num_threads(1)  # several threads do not pay for tiles this small


# %%
def random_inputs(S, D=16, count=3, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(1, 1, S, D, dtype=dtype) for _ in range(count)]


# dout: the gradient of some loss with respect to the output, for the backward in part 2
q, k, v, dout = random_inputs(128, count=4, dtype=torch.float64)
scale = q.shape[-1] ** -0.5
print("q, k, v, dout:", tuple(q.shape), q.dtype)

# %% [markdown]
# # Part 1 · The forward
#
# ## 1 · Cut the matrix into tiles
#
# Here is lesson 01 once more, now in torch: the partial result `(out, lse)` of some queries over some keys. Its causal
# mask counts from the corner of the scores, so it is right only if queries and keys begin at the same token, as here.


# %%
def attend(q, k, v, causal, scale):
    """Attention of these queries over these keys, all scores at once: (out, lse)."""
    scores = scale * (q @ k.mT)
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ v, lse


whole_out, whole_lse = attend(q, k, v, True, scale)
print("out", tuple(whole_out.shape), " lse", tuple(whole_lse.shape))

# %% [markdown]
# Like lesson 01's program it makes three matrices of S × S. Lesson 02 gave us the way out: `(out, lse)` is all that a merge
# needs from the keys seen so far. So we never need all scores of a row at the same time. Cut the S queries and the S keys
# into runs of `tile` tokens. The score matrix falls into squares, and we can compute a square, turn it into a partial
# result, merge that, and release the square.
#
# A causal mask treats these squares differently. Query i sees key j only if j ≤ i. Here i and j are *positions in the
# sequence*, not indices inside a tile. Here are 1,024 tokens in tiles of 128:

# %%
def kind(q_start, q_stop, k_start, k_stop):
    """Which kind of tile these queries and keys form under a causal mask."""
    if k_start >= q_stop:  # the first key is after the last query
        return "skip"
    return "full" if k_stop - 1 <= q_start else "diagonal"


spans = [(start, start + 128) for start in range(0, 1024, 128)]
grid = [[kind(*rows, *keys) for keys in spans] for rows in spans]
for row in grid:
    print(" ".join(f"{name:8}" for name in row))

# %% [markdown]
# Only the tiles on the diagonal hold both visible and hidden pairs. Below the diagonal every pair of a tile is visible,
# so the tile needs no mask. Above the diagonal no pair is visible, so the tile is not computed at all. Remember the three
# words *skip, full, diagonal*. In ring attention (lesson 05) each *rank*, a device with its share of the tokens, receives
# the keys of the others, and we ask the same question about them.
#
# ## 2 · The forward
#
# Take one query tile and let the key tiles pass by. Each key tile gives a partial result, which is merged into the
# query tile's state. The state starts as *nothing seen*, `(0, −inf)`. You wrote merge and its identity in lesson 02;
# from here on we import them. Only the diagonal tile needs the mask of `attend`. There the query tile and the key tile
# begin at the same token, so comparing indices inside the tile is the same as comparing positions.


# %%
def tiled_forward(q, k, v, causal, scale, tile):
    """Attention (out, lse), one tile of scores at a time."""
    S = q.shape[-2]
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    for row in range(0, S, tile):
        rows = slice(row, min(row + tile, S))
        state = Partial.identity(q[..., rows, :])
        for key in range(0, row + 1 if causal else S, tile):  # causal: stop at the diagonal
            keys = slice(key, min(key + tile, S))
            on_diagonal = causal and key == row
            part = attend(q[..., rows, :], k[..., keys, :], v[..., keys, :], on_diagonal, scale)
            state = merge(state, Partial(*part))
        out[..., rows, :], lse[..., rows] = state.out, state.lse
    return out, lse


# %%
def agree(a, b, bound=1e-13):
    """Whether a and b differ by at most `bound` of the largest entry: here, float64 rounding."""
    return bool((a - b).abs().max() <= bound * b.abs().max())


for tile in (128, 32, 50, 1):
    out, lse = tiled_forward(q, k, v, True, scale, tile)
    same = agree(out, whole_out), agree(lse, whole_lse)
    print(f"tile {tile:3}: out agrees: {same[0]}   lse agrees: {same[1]}")

# %% [markdown]
# The result does not depend on the tile, not even on 50, which leaves a short tile at the end, or on 1. Tiling is not an
# approximation: it adds the same terms in another order.
#
# Here every row of a diagonal tile sees its own token. In the exercise a row may see nothing; there `attend` would return
# NaN.

# %% [markdown]
# ## 3 · The live set
#
# What is in memory at one moment? Besides the inputs and the output, only what the current tile needs. This is the
# *live set*: one tile each of Q, K and V (on a GPU these are copies in a small, fast memory), one square of scores,
# which become the softmax weights, and the out and lse of the query tile so far.

# %% tags=["nbval-ignore-output"]
predict(
    "03.live",
    "D = 64, and the tile grows from 128 to 256 tokens. By what factor does the live set grow?",
    unit="times",
)

# %%
for tile in (128, 256):
    for S in (1024, 32768):
        steps = tile_scan.scan(S, tile, 64)
        print(
            f"tile {tile}, S = {S:6,}:   live set {steps.peak_bytes / 2**10:.1f} KiB   "
            f"all scores {steps.whole_bytes / 2**20:5,.0f} MiB"
        )
small, large = (tile_scan.scan(1024, tile, 64).peak_bytes for tile in (128, 256))
compare("03.live", round(large / small, 2))

# %% [markdown]
# Neither 2 nor 4: the tiles of Q, K, V and out double, the square of scores quadruples. And the live set does not depend
# on S at all.
#
# The fast memory is small, and the live set must fit into it. The figure shows two moments of the causal scan over
# 1,024 tokens: above, the score matrix by tiles, with the Q tile and the K/V tile in use along its sides; below, the
# live set. The dashed line is the 227 KiB that one *thread block*, a group of threads, can use on an H100.

# %%
forward_scan = tile_scan.scan(1024, 128, 64)
show(tile_scan.strip(forward_scan), alt=tile_scan.describe_strip(forward_scan))

# %% [markdown]
# The light blue area grows, the bars do not: a finished tile is released, and only out and lse of its rows remain.
# In float32 a tile of 128 just fits; the 513 KiB of a tile of 256 do not. (A kernel could hold some of it in registers instead.)
#
# In a live notebook the next cell is a player: move the slider tile by tile, and switch to *backward* when you have
# read section 6.

# %% tags=["nbval-ignore-output"]
tile_scan.play()

# %% [markdown]
# ## 4 · Memory and work
#
# So the peak should be the output, which is linear in S, plus a live set that does not grow. `MemoryMeter` watches every
# tensor that torch makes inside its context, and records the largest number of bytes that were alive at once. Inputs do not
# count, because they existed before. We measure the naive version, and the tiled one with tiles of 32.


# %%
def peak_bytes(function, *args):
    meter = MemoryMeter()
    with meter.watch():
        function(*args)
    return meter.report().peak_bytes


SIZES, D, TILE = (512, 1024, 2048), 64, 32
for S in SIZES:
    x = random_inputs(S, D)
    naive = peak_bytes(attend, *x, True, 0.125) / 2**10
    tiled = peak_bytes(tiled_forward, *x, True, 0.125, TILE) / 2**10
    results = 4 * S * (D + 1) / 2**10
    print(
        f"S = {S:5}   naive {naive:6,.0f} KiB   "
        f"tiled {tiled:4,.0f} KiB = out and lse {results:4,.0f} KiB + {tiled - results:.0f} KiB"
    )

# %% [markdown]
# Each doubling of S quadruples the naive peak. The tiled peak is out and lse, which double, and a part that stays. These 32 KiB
# are not section 3's live set: here the tiles of Q, K and V are no copies, and `attend` makes three squares. The wall of lesson 01 is gone, and the result is still exact.
#
# We save a large part of the memory. Do we also save work? We count the FLOPs of all matrix products, first without a mask:


# %%
def flops(function, *args):
    """The FLOPs of all matrix products in a call; a multiply-add is two."""
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops()


S = 1024
x = random_inputs(S)
naive, tiled = flops(attend, *x, False, 0.25), flops(tiled_forward, *x, False, 0.25, 128)
print(f"no mask: naive {naive:,}   tiled {tiled:,}")
print(f"naive, causal: {100 * flops(attend, *x, True, 0.25) / naive:.2f} %")
for tile in (512, 128, 32):
    share = 100 * flops(tiled_forward, *x, True, 0.25, tile) / naive
    print(f"tiled, causal, tile {tile:3}: {share:.2f} %")

# %% [markdown]
# Identical to the last digit: **tiling does not reduce FLOPs.** Each of the S² scores is still computed once. Tiling
# reduces memory, and with it traffic: scores that never leave a tile are not written to main memory and read back. On a
# GPU, naive attention waits for that traffic, not for the arithmetic. Ring attention is no different: it divides work and
# memory among ranks, and removes none of the work.
#
# Skipping the tiles above the diagonal does remove work; the naive version computes everything, then masks half. With n
# tiles along a side, n(n+1)/2 of the n² tiles are visited: a share of ½ + 1/(2n). The ½ is the work that the mask leaves.
# Almost all of the rest is the hidden half of the diagonal tiles, which is computed and thrown away. Small tiles waste
# less, but need more calls and more merges.

# %% [markdown]
# ---
# **End of part 1. This is a good place to stop.** You can already solve stage 03.forward of [the
# exercise](../exercises/03_tiled_attention.ipynb). If you return in a fresh kernel, run all cells up to here first.
#
# ---

# %% [markdown]
# # Part 2 · The backward
#
# ## 5 · What the backward needs
#
# `tiled_forward` consists of differentiable operations, so autograd already gives its gradients. We measure it without a
# mask, with D = 16 and tiles of 64.

# %%
def recorded(q, k, v):
    """A tiled forward whose result could be differentiated."""
    return tiled_forward(*(x.requires_grad_() for x in (q, k, v)), False, 0.25, 64)


recorded_peaks = [peak_bytes(recorded, *random_inputs(S)) for S in SIZES]
for S, peak in zip(SIZES, recorded_peaks, strict=True):
    print(f"S = {S:5}   peak {peak / 2**20:5.1f} MiB   S × S floats {4 * S * S / 2**20:5.1f} MiB")

# %% [markdown]
# The peak grows with S² again. Autograd keeps whatever each operation needs in its backward. For every tile it keeps the scores and the weights. Over all
# tiles these add up to two whole S × S matrices: the wall is back. The way out is **not to store the weights but to compute
# them again**, tile by tile, when the backward needs them. The lse makes that cheap.
#
# As in the papers, $S_{ij}$ is a score in the formulas of this part, and $P_{ij}$ its softmax weight. (S alone remains
# the number of tokens.) The softmax over the *whole* row is
#
# $$P_{ij} = \frac{e^{S_{ij}}}{\sum_{j'} e^{S_{ij'}}} = e^{S_{ij} - \mathrm{lse}_i}.$$
#
# The sum runs over all keys, and its logarithm is the final lse. So one number per row replaces all the other tiles,
# and this time no running maximum is needed. Here is the tile of rows 0–31 and keys 64–95, without the others:

# %%
weights = torch.softmax(scale * (q @ k.mT), -1)  # no mask here
full_out, full_lse = attend(q, k, v, False, scale)
tile_again = torch.exp(scale * (q[..., :32, :] @ k[..., 64:96, :].mT) - full_lse[..., :32, None])
print("a tile of P, from lse alone:", agree(tile_again, weights[..., :32, 64:96]))

# %% [markdown]
# **The gradients.** Write $dX$ for the gradient of the loss with respect to $X$; $O$ is `out` and $dO$ is `dout`. We want
# dS of a tile without the other tiles. Four steps lead there.
#
# *One: from O = PV.*
#
# $$dV = P^\top dO, \qquad dP = dO\,V^\top.$$
#
# *Two: through the softmax.* If one score of a row grows, its own weight grows and all others of the row shrink, at the
# rates $P_{ij}(1 - P_{ij})$ and $-P_{ij}P_{ij'}$. So the chain rule sums over the row:
#
# $$dS_{ij} = P_{ij}\Big(dP_{ij} - \sum_{j'} P_{ij'}\,dP_{ij'}\Big).$$
#
# *Three: get rid of the sum.* It runs over all keys, and would need another pass over the tiles. Insert
# $dP_{ij'} = \sum_d dO_{id} V_{j'd}$ and swap the two sums:
#
# $$\sum_{j'} P_{ij'}\,dP_{ij'} = \sum_d dO_{id} \sum_{j'} P_{ij'} V_{j'd} = \sum_d dO_{id}\,O_{id} = \delta_i.$$
#
# *Four: put it together.* Here $\circ$ multiplies element by element, and scores are scale·QKᵀ:
#
# $$\boxed{\;dS = P \circ (dP - \delta)\;} \qquad dQ = \mathrm{scale}\cdot dS\,K, \qquad dK = \mathrm{scale}\cdot dS^\top Q.$$
#
# So $\delta = \mathrm{rowsum}(dO \circ O)$ is known before the first tile, from the *final* out. We check that the two sums
# of step three are equal before we build on that:

# %%
delta = (dout * full_out).sum(-1)
print("delta is rowsum(P⊙dP):", agree(delta, (weights * (dout @ v.mT)).sum(-1)))

# %% [markdown]
# ## 6 · The backward, written
#
# One tile needs its q, k, v and dO, and the final lse and delta of its rows. It needs no other tile, and the tiles may
# come in any order. This is why the backward, too, can be spread over ranks later.


# %%
def attend_backward(dout, q, k, v, lse, delta, causal, scale):
    """The part of one tile in (dq, dk, dv); lse and delta are final, (B, H, rows, 1)."""
    scores = scale * (q @ k.mT)
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    weights = torch.exp(scores - lse)
    dscores = weights * (dout @ v.mT - delta)
    return scale * (dscores @ k), scale * (dscores.mT @ q), weights.mT @ dout


# %% [markdown]
# Around it are two loops. Here a key tile stays, with its dK and dV, while the query tiles pass by, and every visit adds
# to dQ. The other order works as well, with the roles exchanged.


# %%
def tiled_backward(dout, q, k, v, out, lse, causal, scale, tile):
    """The gradients (dq, dk, dv), one tile of P at a time."""
    S = q.shape[-2]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    delta = (dout * out).sum(-1, keepdim=True)  # once, from the final out
    for key in range(0, S, tile):
        keys = slice(key, min(key + tile, S))
        for row in range(key if causal else 0, S, tile):  # causal: start at the diagonal
            rows = slice(row, min(row + tile, S))
            tiles = dout[..., rows, :], q[..., rows, :], k[..., keys, :], v[..., keys, :]
            final = lse[..., rows, None], delta[..., rows, :]
            parts = attend_backward(*tiles, *final, causal and key == row, scale)
            dq[..., rows, :] += parts[0]
            dk[..., keys, :] += parts[1]
            dv[..., keys, :] += parts[2]
    return dq, dk, dv


# %% [markdown]
# ringlab's `Blockwise` does the same, forward and backward; you can now read it, in `ringlab/blocks/blockwise.py`. Its
# backward takes all that belongs to the rows as one `BackwardRows`.

# %%
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
right = torch.autograd.grad(attend(*leaves, True, scale)[0], leaves, dout)
mine = tiled_backward(dout, q, k, v, whole_out, whole_lse, True, scale, 32)
final_delta = (dout * whole_out).sum(-1)
block = Blockwise(tile=32)
rows = BackwardRows(dout, q, whole_out, whole_lse, final_delta)
theirs = block.backward(rows, k, v, causal=True, scale=scale)
for name, a, b, c in zip(("dq", "dk", "dv"), mine, right, theirs, strict=True):
    print(f"{name}: equal to naive autograd: {agree(a, b)}   to ringlab's block: {agree(a, c)}")


# %%
def without_autograd(q, k, v, dout):
    """Forward and backward of one head by tiles."""
    out, lse = tiled_forward(q, k, v, True, 0.125, TILE)
    return tiled_backward(dout, q, k, v, out, lse, True, 0.125, TILE)


both_peaks = [peak_bytes(without_autograd, *random_inputs(S, D, 4)) for S in SIZES]
print("forward and backward by tiles:", *(f"{peak / 2**10:,.0f} KiB" for peak in both_peaks))

# %% [markdown]
# The peak doubles exactly: it is reached before the first tile, when dout · out of all rows is made for delta. The tiles need less.
# Their live set is larger than in the forward: two squares instead of one, a tile of dO, delta, and three gradients in place of
# out. But it is just as constant:

# %%
backward_scan = tile_scan.scan(1024, 128, 64, direction="backward")
show(tile_scan.strip(backward_scan), alt=tile_scan.describe_strip(backward_scan))

# %% [markdown]
# The backward passes the line: 353 KiB do not fit into 227. So a backward kernel takes smaller tiles, or numbers of 16 bits.
#
# The scan now runs down the columns. This order has a reason: when a column is finished, so are dK and dV of its key
# tile, and they leave the live set. Only dQ is read and written again in every column.
#
# ## 7 · Final means final
#
# In the loop over the tiles, where P and dP are at hand, it is tempting to compute delta as rowsum(P⊙dP) of the tile. The
# formula is the same, but the sum runs over the tile's keys only.

# %% tags=["nbval-ignore-output"]
predict(
    "03.delta",
    "delta summed over each tile's own keys: which gradients come out wrong?",
    choices=["none", "dq and dk", "dv", "all three"],
)


# %%
def with_own_delta(tile=32):
    """The gradients without a mask, with a delta that each tile sums over its own keys."""
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for row, key in itertools.product(range(0, 128, tile), repeat=2):
        rows, keys = slice(row, row + tile), slice(key, key + tile)
        tiles = dout[..., rows, :], q[..., rows, :], k[..., keys, :], v[..., keys, :]
        own = (weights[..., rows, keys] * (tiles[0] @ tiles[3].mT)).sum(-1, keepdim=True)
        parts = attend_backward(*tiles, full_lse[..., rows, None], own, False, scale)
        for grad, part, where in zip(grads, parts, (rows, keys, keys), strict=True):
            grad[..., where, :] += part
    return grads

# %%
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
right = torch.autograd.grad(attend(*leaves, False, scale)[0], leaves, dout)
final = tiled_backward(dout, q, k, v, full_out, full_lse, False, scale, 32)
for label, grads in (("final delta", final), ("tile's delta", with_own_delta())):
    pairs = zip(("dq", "dk", "dv"), grads, right, strict=True)
    errors = {name: (a - b).norm() / b.norm() for name, a, b in pairs}
    print(f"{label:13}", "   ".join(f"{name} {error:.2f}" for name, error in errors.items()))
wrong = [name for name, error in errors.items() if error > 0.01]
compare("03.delta", "all three" if len(wrong) == 3 else " and ".join(wrong) or "none")

# %% [markdown]
# The formula gives the reason: raising one score lowers *all* other weights of its row, including those in other tiles.
# dV does not use delta, and is exact.
#
# This is a nasty bug: nothing crashes, the gradients have plausible sizes, and one of the three passes every test. In the
# ring the other tiles are on other ranks, and the same rule holds for delta and for lse: finish the forward before you
# start the backward.
#
# ## 8 · The price
#
# Computing P again is not free. Count the matrix products of size S × S × D: the forward has two, QKᵀ and PV. An ordinary
# backward has four: dV, dP, dQ and dK.

# %% tags=["nbval-ignore-output"]
predict(
    "03.price",
    "Tiled forward and backward together, no mask: how many times the FLOPs of the naive ones?",
    unit="times",
)


# %%
def naive_both(q, k, v, dout):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(attend(*leaves, False, 0.25)[0], leaves, dout)


def tiled_both(q, k, v, dout):
    out, lse = tiled_forward(q, k, v, False, 0.25, 128)
    tiled_backward(dout, q, k, v, out, lse, False, 0.25, 128)


x = random_inputs(1024, count=4)
unit = 2 * 1024 * 1024 * 16
naive, tiled = flops(naive_both, *x), flops(tiled_both, *x)
more = 100 * (tiled / naive - 1)
print(f"naive {naive / unit:g} products, tiled {tiled / unit:g} products, {more:.0f} % more")
compare("03.price", tiled / naive)

# %% [markdown]
# The backward computes QKᵀ again: seven products instead of six. That buys a backward without S² in memory. On hardware
# that computes faster than it moves data it is often not even slower, because reading P from main memory can take longer
# than computing it again.
#
# ## Recap
#
# - The score matrix falls into tiles: **skip, full, diagonal**, decided by positions in the sequence. Each visible tile
#   is computed once, merged and released.
# - The **live set** is a few tiles and does not grow with S. The forward's peak is the live set plus the output. It is linear in S,
#   not quadratic, and so is the backward's.
# - The forward's **FLOPs stay the same**; under a causal mask, skipping saves almost half. Forward and backward together
#   need seven products instead of six.
# - The backward of a tile needs q, k, v, dO and the **final** lse and delta. $P_{ij} = e^{S_{ij}-\mathrm{lse}_i}$,
#   $\delta = \mathrm{rowsum}(dO\circ O)$, $dS = P\circ(dP-\delta)$.
# - Given the final lse and delta, tiles need nothing from each other. Lesson 05 puts them on different ranks.
#
# ## Self-check
#
# Answer aloud, then open.
#
# <details><summary>A colleague masks each visited tile with a lower-triangular matrix. Which tiles are wrong?</summary>
# All full ones: the matrix hides almost half of their pairs, although the queries may see every key. Only the diagonal tiles are right.</details>
#
# <details><summary>Why is it enough to keep lse, and not the maximum and the sum as well?</summary>
# With a score s: e^(s − m)/total = e^(s − m − ln total) = e^(s − lse): only this combination of them is used.</details>
#
# <details><summary>You double the tile. What happens to the FLOPs of a causal forward, and to the number of
# merges?</summary>A few more FLOPs on the diagonal; about a quarter of the merges.</details>
#
# <details><summary>Can the backward of one tile run before the forward of another tile in the same row is done?</summary>
# No: lse and delta of the row would not be final.</details>
#
# Now build it yourself: [exercise 03](../exercises/03_tiled_attention.ipynb). It asks for more than this lesson: queries
# that begin in the middle of the text, and grouped heads. Values, memory and work are checked.
