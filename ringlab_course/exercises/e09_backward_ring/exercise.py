# %% [markdown]
# # Exercise 09 · The backward ring
#
# **You build** the backward of ring attention in four stages: one number per row, what a block that is here adds, the couriers that
# carry gradients home, and the bytes of it all before anything runs.
# **You need** [lesson 09](../notebooks/09_backward_ring.ipynb). **Minutes** 75.
#
# | stage | function | what is looked at |
# |---|---|---|
# | 09.delta | `row_delta` | values, float32 also for a bfloat16 dO |
# | 09.block | `block_backward` | values from the final lse, masks, rows that see nothing, shared heads, large scores |
# | 09.couriers | `ring_backward` | values in any layout; hops and bytes of K/V and of dK/dV, memory, hidden hops |
# | 09.traffic | `bytes_sent` | the bytes of the forward and of the backward, to the byte |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded.

# %%
import math

import torch

from ringlab import VirtualCluster, launch, oracle, zigzag
from ringlab_course import check, corpus, hint

# %% [markdown]
# ## 09.delta · One number per row
#
# `dout` is the gradient of the loss with respect to `out`; both are (B, H, L, D). Return delta = rowsum(dO ∘ O), (B, H, L), in the
# dtype of `out`. `out` is float32 at least, `dout` may be bfloat16.

# %% grade="09.delta"
def row_delta(dout, out):
    """Return rowsum(dO ∘ O) in the dtype of out."""
    # BEGIN SOLUTION multiply element by element, sum over D
    return (dout.to(out.dtype) * out).sum(-1)
    # END SOLUTION


# %%
check("09.delta")

# %% [markdown]
# Stuck? `hint("09.delta")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 09.block · What a block that is here adds
#
# `q`, `dout` (B, H, Lq, D), `lse` and `delta` (B, H, Lq) belong to your rows, and are **final**: over all keys of all ranks. `k`, `v`
# (B, K, Lk, D) is one block. Return what it adds to `(dq, dk, dv)`, in the shapes of q, k and v.
#
# - The scale is 1/√D. `mask` (Lq, Lk), if given, is True where a query may see a key.
# - Query head h reads K/V head h // (H // K). What the heads that share one add, adds up.
# - Rows may see nothing of the block, or no key at all: then `lse` is −inf, and they add 0.
# - q, k, v and dout may be bfloat16. Compute in the dtype of `lse`, and return gradients in it.

# %% grade="09.block"
def block_backward(dout, q, k, v, lse, delta, mask=None):
    """Return what this block adds to (dq, dk, dv)."""
    # BEGIN SOLUTION the weights again from the final lse, then three products
    scale, shared = 1 / math.sqrt(q.shape[-1]), (k.shape[1], q.shape[1] // k.shape[1])
    dout, q, k, v = (x.to(lse.dtype) for x in (dout, q, k, v))
    dout, q, lse, delta = (x.unflatten(1, shared) for x in (dout, q, lse, delta))
    k, v = k[:, :, None], v[:, :, None]
    scores = scale * (q @ k.mT)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # rows that see no key: exp(s − inf) is 0
    weights = torch.exp(scores - lse[..., None])
    dscores = weights * (dout @ v.mT - delta[..., None])
    dk, dv = scale * (dscores.mT @ q).sum(2), (weights.mT @ dout).sum(2)
    return (scale * (dscores @ k)).flatten(1, 2), dk, dv
    # END SOLUTION


# %%
check("09.block")

# %% [markdown]
# Stuck? `hint("09.block")` in a new cell helps.

# %% [markdown]
# ## 09.couriers · The backward ring
#
# `dout`, `q`, `k`, `v`, `out`, `lse` are this rank's; `out` and `lse` are what the forward ring returned. `positions` is a list with
# one int64 tensor per rank: `positions[r][i]` is the global position of token i of rank r. A query sees the keys at or before its own
# position. Return this rank's `(dq, dk, dv)`, in the dtype of `lse`.
#
# - Everything goes to the next rank. K and V make P − 1 hops, in the dtype in which they came. dK and dV of a block go with it, in the dtype
#   of `lse`, from its owner on, and make P. Nothing else travels, and no heads are repeated. From P to 2P − 1 exchanges. **One rank alone
#   sends nothing**, not even to itself.
# - Shards may have different lengths, some may be empty: `ring.post(x, y, length=n)` says that what arrives has n tokens.
# - Memory: your shard, one block in use and one arriving, one courier, one arriving. It does not grow with the number of ranks.
# - Make each call of `block_backward` through `ring.compute(label, block_backward, …)`, once per block, so that a clock can see it. There
#   a block takes 1 s and a hop ½ s; every hop but the couriers' last can hide, P + ½ seconds in all.
#
# First make it right, then hide the hops. If values are wrong, look first whether the two stages above hold.

# %% grade="09.couriers"
def ring_backward(ring, dout, q, k, v, out, lse, positions):
    """Return this rank's (dq, dk, dv)."""
    # BEGIN SOLUTION P steps; couriers one hop behind their blocks
    P, delta = ring.world_size, row_delta(dout, out)
    dq, courier, sums = torch.zeros(q.shape, dtype=lse.dtype), None, None
    for step in range(P):
        here, due = ring.origin(step), len(positions[ring.origin(step + 1)])
        blocks = ring.post(k, v, length=due) if step < P - 1 else None
        mask = positions[ring.rank][:, None] >= positions[here][None, :]
        part = ring.compute(f"attend backward {step}", block_backward, dout, q, k, v, lse, delta, mask)
        dq += part[0]
        sums = part[1:]
        if courier is not None:  # what the ranks before this one have added up
            sums = tuple(arrived.add_(own) for arrived, own in zip(courier.wait(), sums, strict=True))
        courier = ring.post(*sums, length=due) if P > 1 else None
        if blocks is not None:
            k, v = blocks.wait()
    dk, dv = courier.wait() if courier is not None else sums
    return dq, dk, dv
    # END SOLUTION


# %%
check("09.couriers")

# %% [markdown]
# Stuck? `hint("09.couriers")` in a new cell helps.

# %% [markdown]
# ## 09.traffic · Bytes, before anything runs
#
# `lengths[r]` are the tokens of rank r, `itemsize` the bytes of an element of K and V: 2, 4 or 8. Return `(forward, backward)`: the
# bytes that `rank` sends in a forward ring (exercise 05) and in your backward ring. Sums travel in float32 at least, in float64 for
# float64. One rank alone sends nothing.

# %% grade="09.traffic"
def bytes_sent(lengths, rank, B, K, D, itemsize):
    """Return the bytes that this rank sends (forward, backward)."""
    # BEGIN SOLUTION P − 1 blocks, P couriers
    P, vectors = len(lengths), 2 * B * K * D
    if P == 1:
        return 0, 0
    blocks = itemsize * vectors * sum(lengths[(rank - step) % P] for step in range(P - 1))
    couriers = max(itemsize, 4) * vectors * sum(lengths)
    return blocks, blocks + couriers
    # END SOLUTION


# %%
check("09.traffic")

# %% [markdown]
# Stuck? `hint("09.traffic")` in a new cell helps.

# %% [markdown]
# ## All four together, on real text
#
# When all stages hold, run `on_real_text()` in a new cell. It runs your backward on 4 virtual ranks and on 4 processes joined by gloo,
# against the float64 oracle, and compares the bytes that travelled with yours.

# %%
def on_real_text(S=512, P=4, H=4, K=2, D=32):
    """Print the errors of your gradients and the bytes of rank 0, on virtual ranks and on processes."""
    layout, (q, k, v) = zigzag(S, P), corpus.qkv(S, heads=H, kv_heads=K, head_dim=D)
    dout = torch.cos(torch.arange(S * H * D).float()).view(q.shape)
    out, lse = (torch.from_numpy(x).float() for x in oracle.attention(q, k, v, causal=True))
    positions = [torch.from_numpy(layout.positions(rank)) for rank in range(P)]
    truth = [torch.from_numpy(x) for x in oracle.gradients(q, k, v, dout, causal=True)]

    def program(ring):
        own = layout.shard((dout, q, k, v, out, lse[..., None]), ring.rank)
        return ring_backward(ring, *own[:5], own[5][..., 0], positions)

    for name, run in (("virtual ranks", VirtualCluster(P).run(program)), ("processes", launch(program, P))):
        found = [layout.unshard(parts) for parts in zip(*run.results, strict=True)]
        worst = max(((x - t).abs().max() / t.abs().max()).item() for x, t in zip(found, truth, strict=True))
        yours = bytes_sent([S // P] * P, 0, 1, K, D, 4)[1]
        print(f"{name}: relative error below 1e-5: {worst < 1e-5}, bytes {run.trace.bytes_sent(0):,}, yours {yours:,}")


# %% tags=["solution-only"]
on_real_text()

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/09_backward_ring.ipynb` runs the hidden ones, on inputs of its own.
