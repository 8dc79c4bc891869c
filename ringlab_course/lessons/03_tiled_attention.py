# %% [markdown]
# # 03 · Tiled attention, forward and backward
#
# **Afterwards you can**
# - write attention that never holds more than one tile of the score matrix, with memory linear in S;
# - say, at any moment of the computation, what is in memory and why;
# - derive and write the backward from lse and delta, and say why both must be the final ones;
# - say what tiling saves, and what it does not.
#
# **You need first** [lesson 01](01_naive_attention.ipynb) (naive attention and the S² wall) and
# [lesson 02](02_online_softmax.ipynb) (lse, and the merge of `(out, lse)`).
#
# **Minutes** 90, of which the machine works for about one.
#
# Letters, as everywhere: B batch, H heads, S tokens, D head dim. Tensors are (B, H, S, D). New here: a *tile* is a run
# of queries times a run of keys, a rectangle of the score matrix.

# %%
import math

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from ringlab.blocks import get_block
from ringlab.blocks.blockwise import Blockwise
from ringlab.blocks.protocol import BackwardRows
from ringlab.comm.memory import MemoryMeter
from ringlab_course import compare, predict
from ringlab.merge import Partial, merge
from ringlab_course.figures import tile_scan
from ringlab.viz.style import new_figure, show, styled

torch.set_num_threads(1)  # tiles this small are not worth sharing out


# %%
def random_inputs(S, D=16, count=3, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(1, 1, S, D, dtype=dtype) for _ in range(count)]


q, k, v, dout = random_inputs(128, count=4, dtype=torch.float64)
scale = q.shape[-1] ** -0.5
print("q, k, v, dout:", tuple(q.shape), q.dtype)

# %% [markdown]
# ## 1 · The wall, measured
#
# Here is lesson 01 once more, now in torch: the partial result `(out, lse)` of these queries over these keys. Its mask
# counts from the corner of the scores, so it is right only where queries and keys begin at the same token, as they do
# here.


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
# `MemoryMeter` watches every tensor that torch makes inside its context, and remembers the most bytes that were alive
# at once. Inputs do not count: they were there before. We run the function for a ladder of lengths and fit the exponent
# p in *peak ∝ S^p*, a straight line through the logarithms.


# %%
def peak_bytes(function, *args):
    meter = MemoryMeter()
    with meter.watch():
        function(*args)
    return meter.report().peak_bytes


def fitted_exponent(sizes, peaks):
    return float(np.polyfit(np.log(sizes), np.log(peaks), 1)[0])


# %%
SIZES, D = (512, 1024, 2048), 64
naive_peaks = [peak_bytes(attend, *random_inputs(S, D), True, 0.125) for S in SIZES]
for S, peak in zip(SIZES, naive_peaks, strict=True):
    print(f"S = {S:5}   peak {peak / 2**20:6.1f} MiB   the scores alone {4 * S * S / 2**20:5.1f} MiB")
print(f"naive: peak grows as S^{fitted_exponent(SIZES, naive_peaks):.2f}")

# %% [markdown]
# Every doubling of S makes it four times as much. The peak is a few score matrices: the scores, then another matrix of
# the same size for the difference, another for its exponential. One head, one batch entry, and no layer has run yet.
#
# ## 2 · Cut the matrix into tiles
#
# Lesson 02 gave us the way out. A query that has seen some keys is fully described by `(out, lse)`, and two such
# descriptions merge into one. So nothing forces us to have all of a row's scores at the same time. Cut the S queries
# and the S keys into runs of `tile` tokens: the score matrix falls into squares, and each square can be computed,
# turned into a partial result, merged, and forgotten.
#
# With a causal mask the squares are of three kinds. Query i sees key j only if j ≤ i, and *these are positions in the
# sequence*, not places inside a tile.

# %% tags=["nbval-ignore-output"]
predict(
    "03.masked",
    "1,024 tokens, tiles of 128, causal: how many of the 64 tiles need a mask at all?",
    unit="tiles",
)


# %%
def kind(q_start, q_stop, k_start, k_stop):
    """What the causal mask makes of the tile of queries q_start… and keys k_start…"""
    if k_start >= q_stop:  # the first key is after the last query
        return "skip"
    return "full" if k_stop - 1 <= q_start else "diagonal"


spans = [(start, start + 128) for start in range(0, 1024, 128)]
grid = [[kind(*rows, *keys) for keys in spans] for rows in spans]
for row in grid:
    print(" ".join(f"{name:8}" for name in row))

# %%
counts = {name: sum(row.count(name) for row in grid) for name in ("full", "diagonal", "skip")}
compare("03.masked", counts["diagonal"])
print(counts)

# %% [markdown]
# Only the tiles on the diagonal hold both visible and hidden pairs. Below the diagonal a tile is seen whole and needs no
# mask; above it nothing is visible, and the tile need not be computed. Keep these three words, *skip, full, diagonal*:
# in the ring, when the keys of another rank arrive, the question will be the same.
#
# ## 3 · The forward
#
# One query tile stays. The key tiles pass by, and each leaves a partial result that is merged into what the query
# tile knows. The state starts as *nothing seen*, which is `(0, −inf)`. Merge and its identity are yours since lesson
# 02; from here on we import them. `attend` is asked for a mask on the diagonal only: there the query tile and the key
# tile begin at the same token, and a triangle inside the tile is the mask by position.


# %%
def tiled_forward(q, k, v, causal, scale, tile):
    """(out, lse) of attention, one tile of scores at a time."""
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
    """Whether a and b agree to `bound` of the largest entry: here, up to float64 rounding."""
    return bool((a - b).abs().max() <= bound * b.abs().max())


for tile in (128, 32, 50, 1):
    out, lse = tiled_forward(q, k, v, True, scale, tile)
    print(f"tile {tile:3}: out agrees: {agree(out, whole_out)}   lse agrees: {agree(lse, whole_lse)}")

# %% [markdown]
# The tile does not matter, not even 50, which leaves a short tile at the end, or 1. This is no approximation: the same
# terms are added in another order. ringlab's own block, the one that will run on every rank of the ring, does the same,
# in a short file that you can now read: `ringlab/blocks/blockwise.py`.

# %%
block = Blockwise(tile=32)
part = block.forward(q, k, v, causal=True, scale=scale)
print("ringlab's blockwise block:", agree(part.out, out), agree(part.lse, lse))
print("its backends, one interface:", [get_block(name, q).name for name in ("naive", "blockwise", "native")])

# %% [markdown]
# ## 4 · The live set
#
# What is in memory at one moment? Beside the inputs and the output, only what the present tile needs. That is the *live
# set*: a tile each of Q, K and V (on a GPU these are copies in a small, fast memory), one square of scores, which
# become the softmax weights P, and the running out and lse.

# %% tags=["nbval-ignore-output"]
predict(
    "03.live",
    "D = 64, float32, tile 128. How much more does the live set take at 32,768 tokens than at 1,024?",
    choices=["the same", "32 times", "1,024 times"],
)

# %%
scans = {S: tile_scan.scan(S, 128, 64) for S in (1024, 8192, 32768)}
for S, steps in scans.items():
    print(
        f"S = {S:6,}   live set {steps.peak_bytes / 2**10:.1f} KiB   "
        f"all scores {steps.whole_bytes / 2**20:7,.0f} MiB"
    )
ratio = scans[32768].peak_bytes / scans[1024].peak_bytes
compare("03.live", "the same" if ratio == 1 else f"{ratio:g} times")

# %% [markdown]
# Now look at it. Four moments of the causal scan over 1,024 tokens: above, the score matrix by tiles, with the Q tile
# and the K/V tile in use along its sides; below, what is live at that moment.

# %%
forward_scan = tile_scan.scan(1024, 128, 64)
show(tile_scan.strip(forward_scan), alt=tile_scan.describe_strip(forward_scan))

# %% [markdown]
# The bars are the same four times: that is the point. The blue area grows, but blue means *done and forgotten*. What
# remains of it is the out and lse of its rows. In a live notebook the next cell is a player: move the slider tile by
# tile, and switch to *backward* when you have read section 8.

# %% tags=["nbval-ignore-output"]
tile_scan.player()

# %% [markdown]
# ## 5 · Memory against S
#
# So the peak should be the output, which is linear in S, plus a live set that does not grow. Measure it with the same
# meter as the naive version. Its live part is another number than in the picture: the tile is 32 now, slices of the
# inputs do not count, and what `attend` and `merge` make on the way does. The point is that it stays the same.

# %%
TILE = 32
tiled_peaks = [peak_bytes(tiled_forward, *random_inputs(S, D), True, 0.125, TILE) for S in SIZES]
for S, peak in zip(SIZES, tiled_peaks, strict=True):
    results = 4 * S * (D + 1)
    print(
        f"S = {S:5}   peak {peak / 2**10:6.0f} KiB = out and lse {results / 2**10:6.0f} KiB "
        f"+ live {(peak - results) / 2**10:4.0f} KiB"
    )
print(
    f"naive: S^{fitted_exponent(SIZES, naive_peaks):.1f}   tiled: S^{fitted_exponent(SIZES, tiled_peaks):.1f}"
)

# %%
with styled():
    figure = new_figure((6.4, 3.8))
    ax = figure.subplots()
    for label, peaks, mark in (("naive", naive_peaks, "o-"), ("tiled", tiled_peaks, "s--")):
        ax.loglog(SIZES, [peak / 2**20 for peak in peaks], mark, label=label, base=2)
        slope = fitted_exponent(SIZES, peaks)
        ax.text(SIZES[-1] * 1.06, peaks[-1] / 2**20, f"{label}\nS^{slope:.1f}", va="center")
    ax.set(
        xlabel="S (tokens)", ylabel="peak memory beyond the inputs (MiB)", xlim=(470, 2700), ylim=(0.1, 100)
    )
    ax.set_xticks(SIZES, [f"{S:,}" for S in SIZES])
    ax.set_yticks([1 / 8, 1 / 2, 2, 8, 32], ["0.125", "0.5", "2", "8", "32"])
show(
    figure,
    alt="Peak memory against S, both axes logarithmic: the naive line climbs with slope two, from 3 to 48 "
    "MiB; the tiled line with slope about one, staying below 1 MiB.",
)

# %% [markdown]
# The exponent of the naive version is 2. The tiled one comes out a little under 1: a linear part, and a constant that
# weighs less and less. Lesson 01's wall is gone, and the answer is still exact.
#
# ## 6 · What about the work?
#
# Something so much smaller should also be less work. Should it?

# %% tags=["nbval-ignore-output"]
predict(
    "03.flops",
    "Without a mask: how many FLOPs does the tiled forward need, compared with the naive one?",
    choices=["far fewer", "about half", "exactly as many", "more"],
)


# %%
def flops(function, *args):
    """FLOPs of all matrix products in a call; a multiply-add is two."""
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops()


S = 1024
x = random_inputs(S)
naive, tiled = flops(attend, *x, False, 0.25), flops(tiled_forward, *x, False, 0.25, 128)
print(f"naive {naive:,}   tiled {tiled:,}   4·S²·D = {4 * S * S * 16:,}")
compare("03.flops", "exactly as many" if naive == tiled else "more" if tiled > naive else "far fewer")

# %% [markdown]
# To the last digit the same: **tiling does not reduce FLOPs.** Each of the S² scores is computed once, wherever it is
# computed. What tiling reduces is memory, and with it traffic: scores that never leave a tile need not be written to
# main memory and read again, and on a GPU that traffic, not the arithmetic, is what naive attention waits for. Ring
# attention will be no different: it divides work and memory among ranks, and it removes none of the work.
#
# The causal mask is another matter. Skipping *does* remove work.

# %% tags=["nbval-ignore-output"]
predict(
    "03.causal",
    "Causal, 1,024 tokens, tile 128: the tiled forward needs what percentage of those FLOPs?",
    unit="%",
)

# %%
share = 100 * flops(tiled_forward, *x, True, 0.25, 128) / naive
compare("03.causal", share)
print(
    f"naive, causal: {100 * flops(attend, *x, True, 0.25) / naive:.1f} %: it computes everything, then masks half"
)
for tile in (512, 128, 32):
    print(f"tiled, causal, tile {tile:3}: {100 * flops(tiled_forward, *x, True, 0.25, tile) / naive:.1f} %")

# %% [markdown]
# With n tiles along a side, n(n+1)/2 of n² are visited: the share is ½ + 1/2n. The ½ is the mask's; the rest is the
# hidden corner of the diagonal tiles, computed and thrown away. Small tiles waste less of it, but make more launches
# and more merges.
#
# ## 7 · The backward: why not autograd?
#
# `tiled_forward` is made of differentiable operations, so autograd can give its gradients today. What would it cost?

# %% tags=["nbval-ignore-output"]
predict(
    "03.autograd",
    "The same tiled forward, now with inputs that require gradients: its peak memory grows like…",
    choices=["S", "S log S", "S²"],
)


# %%
def recorded(q, k, v):
    """A tiled forward whose result could be differentiated."""
    return tiled_forward(*(x.requires_grad_() for x in (q, k, v)), False, 0.25, 64)


recorded_peaks = [peak_bytes(recorded, *random_inputs(S)) for S in SIZES]
exponent = fitted_exponent(SIZES, recorded_peaks)
print(f"peaks: {', '.join(f'{peak / 2**20:.1f} MiB' for peak in recorded_peaks)}   exponent {exponent:.1f}")
compare("03.autograd", "S²" if exponent > 1.5 else "S")

# %% [markdown]
# Autograd keeps what each operation will need in its backward, and for every tile that includes P, the softmax weights.
# All tiles together are the S × S matrix: the wall is back. The way out is **not to store P but to compute it again**,
# tile by tile, when the backward needs it. Lesson 02's lse makes that cheap.
#
# **P from lse.** Let $S_{ij}$ with its two indices be a score, as in every paper (S alone stays the number of tokens). The
# softmax of the *whole* row, looked at in one tile only, is
#
# $$P_{ij} = \frac{e^{S_{ij}}}{\sum_{j'} e^{S_{ij'}}} = e^{S_{ij} - \mathrm{lse}_i}.$$
#
# The sum runs over all keys, and its logarithm is the final lse: one number per row stands for all the other tiles. No
# running maximum is needed the second time.
#
# **The gradients.** Write $dX$ for the gradient of the loss with respect to $X$; $dO$ is `dout`. O = PV, so $dV = P^\top
# dO$ and $dP = dO\,V^\top$. The softmax of a row couples all its scores: $P_{ij}$ changes with $S_{ij}$ at the rate
# $P_{ij}(1 - P_{ij})$, and every other $P_{ij'}$ of the row at the rate $-P_{ij'} P_{ij}$. The chain rule sums over them:
#
# $$dS_{ij} = P_{ij}\Big(dP_{ij} - \sum_{j'} P_{ij'}\,dP_{ij'}\Big).$$
#
# That last sum runs over all keys again, which would need another pass over the tiles. But put $dP_{ij'} = \sum_d
# dO_{id} V_{j'd}$ into it and swap the sums: $\sum_d dO_{id} \sum_{j'} P_{ij'} V_{j'd} = \sum_d dO_{id}\, O_{id}$.
# So it is
#
# $$\delta_i = \mathrm{rowsum}(dO \circ O)_i,$$
#
# ($\circ$ multiplies element by element), known before the first tile, from the *final* out. With scores scale·QKᵀ the
# rest follows: $dS = P\circ(dP - \delta)$, $dQ = \mathrm{scale}\cdot dS\,K$, $dK = \mathrm{scale}\cdot dS^\top Q$.
# Check both claims before you build on them.

# %%
weights = torch.softmax(scale * (q @ k.mT), -1)  # no mask here
full_out, full_lse = attend(q, k, v, False, scale)
tile_again = torch.exp(scale * (q[..., :32, :] @ k[..., 64:96, :].mT) - full_lse[..., :32, None])
print("a tile of P, from lse alone:", agree(tile_again, weights[..., :32, 64:96]))

delta = (dout * full_out).sum(-1)
print("delta is rowsum(P·dP):", agree(delta, (weights * (dout @ v.mT)).sum(-1)))

# %% [markdown]
# ## 8 · The backward, written
#
# One tile needs its q, k, v and dO, and for its rows the final lse and delta, nothing else: no neighbour tile, no
# order. This is why the backward, too, can later be spread over ranks.


# %%
def attend_backward(dout, q, k, v, lse, delta, causal, scale):
    """What one tile adds to (dq, dk, dv); lse and delta are final, (B, H, rows, 1)."""
    weights = scale * (q @ k.mT)
    if causal:
        weights.masked_fill_(torch.ones(weights.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    weights = torch.exp(weights - lse)
    dscores = weights * (dout @ v.mT - delta)
    return scale * (dscores @ k), scale * (dscores.mT @ q), weights.mT @ dout


# %% [markdown]
# Around it, two loops. Here a key tile stays, with its dK and dV, and the query tiles pass by; dQ is added to on every
# visit. The other order works as well, with the roles exchanged.


# %%
def tiled_backward(dout, q, k, v, out, lse, causal, scale, tile):
    """(dq, dk, dv), one tile of P at a time."""
    S = q.shape[-2]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    delta = (dout * out).sum(-1, keepdim=True)  # once, from the final out
    for key in range(0, S, tile):
        keys = slice(key, min(key + tile, S))
        for row in range(key if causal else 0, S, tile):  # causal: start at the diagonal
            rows = slice(row, min(row + tile, S))
            of_rows, of_keys = (dout[..., rows, :], q[..., rows, :]), (k[..., keys, :], v[..., keys, :])
            state = lse[..., rows, None], delta[..., rows, :]
            parts = attend_backward(*of_rows, *of_keys, *state, causal and key == row, scale)
            dq[..., rows, :] += parts[0]
            dk[..., keys, :] += parts[1]
            dv[..., keys, :] += parts[2]
    return dq, dk, dv


# %%
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
right = torch.autograd.grad(attend(*leaves, True, scale)[0], leaves, dout)
mine = tiled_backward(dout, q, k, v, whole_out, whole_lse, True, scale, 32)
final_delta = (dout * whole_out).sum(-1)
rows = BackwardRows(dout, q, whole_out, whole_lse, final_delta)
theirs = block.backward(rows, k, v, causal=True, scale=scale)
for name, a, b, c in zip(("dq", "dk", "dv"), mine, right, theirs, strict=True):
    print(
        f"{name}: equal to autograd of the naive version: {agree(a, b)}   to ringlab's block: {agree(a, c)}"
    )


# %%
def without_autograd(q, k, v, dout):
    """Forward and backward of one head by tiles."""
    out, lse = tiled_forward(q, k, v, True, 0.125, TILE)
    return tiled_backward(dout, q, k, v, out, lse, True, 0.125, TILE)


both_peaks = [peak_bytes(without_autograd, *random_inputs(S, D, 4)) for S in SIZES]
print(f"forward and backward by tiles: peak grows as S^{fitted_exponent(SIZES, both_peaks):.1f}")
saved_weights, saved_lse = 4 * 8192**2 / 2**20, 4 * 8192 / 2**20
print(
    f"kept from forward to backward, one head, S = 8,192: P {saved_weights:.0f} MiB, lse {saved_lse:.3f} MiB"
)

# %% [markdown]
# And the live set? Larger than the forward's, as P, dS and three gradients are added, but just as constant:

# %%
backward_scan = tile_scan.scan(1024, 128, 64, direction="backward")
show(tile_scan.strip(backward_scan), alt=tile_scan.describe_strip(backward_scan))

# %% [markdown]
# The scan runs down the columns now. That order has a reason: dK and dV of a key tile are finished when its column is,
# and leave. Only dQ is written again and again.
#
# ## 9 · Final means final
#
# While the tiles pass by, it is tempting to compute delta where P and dP already are: rowsum(P·dP) of the tile. The
# formula is the same, only the sum is shorter. (In the code below it is the tile's own rowsum(dO∘O), times the tile's
# `share` of the row's softmax mass.)

# %% tags=["nbval-ignore-output"]
predict(
    "03.delta",
    "delta summed over each tile's own keys: which gradients come out wrong?",
    choices=["none", "dq and dk", "dv", "all three"],
)


# %%
def tile_by_tile(own_delta, own_lse, tile=32):
    """(dq, dk, dv) without a mask, with delta or lse taken from the tile itself if asked."""
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for row, key in ((r, c) for r in range(0, 128, tile) for c in range(0, 128, tile)):
        rows, keys = slice(row, row + tile), slice(key, key + tile)
        pair = dout[..., rows, :], q[..., rows, :], k[..., keys, :], v[..., keys, :]
        part_out, part_lse = attend(*pair[1:], False, scale)
        total = (part_lse if own_lse else full_lse[..., rows])[..., None]
        share = torch.exp(part_lse[..., None] - total)
        used = (pair[0] * part_out).sum(-1, keepdim=True) * share if own_delta else delta[..., rows, None]
        parts = attend_backward(*pair, total, used, False, scale)
        for grad, part, where in zip(grads, parts, (rows, keys, keys), strict=True):
            grad[..., where, :] += part
    return grads


# %%
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
right = torch.autograd.grad(attend(*leaves, False, scale)[0], leaves, dout)
for label, flags in (
    ("final lse, final delta", (0, 0)),
    ("final lse, tile's delta", (1, 0)),
    ("tile's lse, tile's delta", (1, 1)),
):
    errors = [(a - b).norm() / b.norm() for a, b in zip(tile_by_tile(*flags), right, strict=True)]
    print(f"{label:25}", "   ".join(f"{n} {e:.2f}" for n, e in zip(("dq", "dk", "dv"), errors, strict=True)))
    if flags == (1, 0):
        wrong = [name for name, error in zip(("dq", "dk", "dv"), errors, strict=True) if error > 0.01]
compare("03.delta", "all three" if len(wrong) == 3 else " and ".join(wrong) or "none")

# %% [markdown]
# Look at the middle line: a relative error around 0.2 in dQ and dK, while dV, which does not use delta, is exact. (With
# the tile's lse, in the last line, each tile takes itself for the whole row, and nothing is right.) The middle is the
# nasty kind of bug: nothing crashes, the loss goes down for a while, and one of three gradients passes every test. The
# reason is in the formula: raising one score lowers *all* the other weights of its row, also those in tiles that are
# elsewhere. In the ring they will be on other ranks, and the same rule holds: first finish the forward, then start the
# backward.
#
# ## 10 · The price
#
# Computing P again is not free. Count products of the size S × S × D: the forward has two (QKᵀ, PV), the ordinary
# backward four (dV, dP, dQ, dK), and the tiled backward one more.

# %% tags=["nbval-ignore-output"]
predict("03.price", "Forward and backward together, no mask: FLOPs of the tiled version over the naive one?")


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
print(
    f"naive {naive / unit:g} products, tiled {tiled / unit:g} products, {100 * (tiled / naive - 1):.0f} % more"
)
compare("03.price", tiled / naive)

# %% [markdown]
# A sixth more arithmetic, and the S² is gone from memory, forward and backward. On hardware that computes faster than
# it moves data this is often not even slower: reading P back from main memory can take longer than computing it again.
#
# ## Recap
#
# - The score matrix falls into tiles: **skip, full, diagonal**, decided by positions in the sequence. Each visible tile
#   is computed once, merged, forgotten.
# - The **live set** is a few tiles and does not grow with S. Peak memory is that plus the output: exponent 1, not 2.
# - **FLOPs are the same**; skipping under a causal mask halves them; the backward adds one product to six.
# - The backward of a tile needs q, k, v, dO and the **final** lse and delta. $P = e^{S-\mathrm{lse}}$,
#   $\delta = \mathrm{rowsum}(dO\circ O)$, $dS = P\circ(dP-\delta)$.
# - Tiles need nothing from each other. Lesson 05 puts them on different ranks.
#
# ## Self-check
#
# Answer aloud, then open.
#
# <details><summary>A colleague masks each tile with a lower-triangular matrix. Which tiles come out wrong?</summary>
# All full ones: their upper half is hidden though every key there is before every query. Only the diagonal is right.
# </details>
#
# <details><summary>Why is it enough to keep lse, and not the maximum and the sum as well?</summary>
# e^(S − m)/l = e^(S − m − ln l) = e^(S − lse): only their combination occurs.</details>
#
# <details><summary>You double the tile. What happens to the live set, to the FLOPs of a causal forward, and to the
# number of merges?</summary> The square of scores becomes four times as large, the tiles of Q, K, V and out twice; a few more FLOPs on the
# diagonal; about a quarter of the merges.</details>
#
# <details><summary>Can the backward of one tile run before the forward of another tile in the same row is done?</summary>
# No: lse and delta of the row would not be final.</details>
#
# Now build it yourself: [exercise 03](../exercises/03_tiled_attention.ipynb). Your forward and your backward will be
# checked for values, memory and work.
