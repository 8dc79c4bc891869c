# %% [markdown]
# # Exercise 09 · The backward ring
#
# **You build** the backward of ring attention with a sliding window, in four stages: one number per row, the terms
# of one block, the couriers that carry gradients home, and the bytes of it all before anything runs.
# **You need** [lesson 09](../notebooks/09_backward_ring.ipynb). **Minutes** 75.
#
# | stage | function | what the checks look at |
# |---|---|---|
# | 09.delta | `row_delta` | values, and float32 even for a bfloat16 dO |
# | 09.block | `block_backward` | values, masks, rows that see nothing, shared heads, bfloat16, large scores |
# | 09.couriers | `ring_backward` | values with any window in any layout; hops, bytes, work, memory, hidden hops |
# | 09.traffic | `bytes_sent` | the bytes of the forward and of the backward, to the byte |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded.
#
# **Not allowed:** ringlab's merge, blocks, rings and formulas of traffic, PyTorch's attention, and modifying the
# tensors that you are given.

# %%
import math

import torch

from ringlab import VirtualCluster, launch, oracle, zigzag
from ringlab_course import check, corpus, hint

# %% [markdown]
# ## 09.delta · One number per row
#
# `dout` is the gradient of the loss with respect to `out`; both are (B, H, L, D). Return delta = rowsum(dO ⊙ O),
# of shape (B, H, L), in the dtype of `out`. `out` is float32 or float64; `dout` may be bfloat16.


# %% grade="09.delta"
def row_delta(dout, out):
    """Return rowsum(dO ⊙ O) in the dtype of out."""
    # BEGIN SOLUTION one number per row
    return (dout.to(out.dtype) * out).sum(-1)
    # END SOLUTION


# %%
check("09.delta")

# %% [markdown]
# Stuck? `hint("09.delta")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 09.block · The terms of one block
#
# `q`, `dout` (B, H, Lq, D), `lse` and `delta` (B, H, Lq) belong to your rows. lse and delta are **final**: they cover
# all keys of all ranks. `k`, `v` (B, K, Lk, D) are one block. Return what this block adds to `(dq, dk, dv)`, in the
# shapes of q, k and v.
#
# - The scale is 1/√D. `mask` (Lq, Lk), if given, is True where a query may see a key.
# - Query head h reads K/V head h // (H // K). The terms of heads that share a K/V head add up.
# - A row may see nothing of the block, or no key at all. In the second case its `lse` is −inf. It adds 0.
# - q, k, v and dout may be bfloat16. Compute in the dtype of `lse`, and return gradients in that dtype.


# %% grade="09.block"
def block_backward(dout, q, k, v, lse, delta, mask=None):
    """Return what this block adds to (dq, dk, dv)."""
    # BEGIN SOLUTION the terms of this block
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
# ## 09.couriers · The backward ring, with a window
#
# Many models let a token see only the last `window` tokens. A query at position i then sees the keys at
# positions j with 0 ≤ i − j < window; with window 1 it sees itself alone. A window of the whole sequence or more is
# the causal mask of the lesson.
#
# `dout`, `q`, `k`, `v`, `out`, `lse` are this rank's; `out` and `lse` are what the forward ring returned.
# `positions` is a list with one int64 tensor per rank: `positions[r][i]` is the global position of token i of rank r.
# Return this rank's `(dq, dk, dv)`, in the dtype of `lse`.
#
# - **Work.** Many blocks now hold no key that your rank sees. Do not compute with them. For all the
#   others, call `block_backward` through `ring.compute(label, block_backward, …)`, once per block: a clock counts it.
# - **Messages.** The window saves no message. Everything goes to the next rank. K and V make P − 1 hops, in the dtype
#   in which they came. dK and dV of a block travel with it, in the dtype of `lse`, starting at its owner, and make P
#   hops, also where a rank adds nothing to it. Nothing else travels, and no heads are repeated. One post may carry a block and a courier: a rank makes P to
#   2P − 1 exchanges, with hidden hops at least P + 1. **One rank alone sends nothing**, not even to itself.
# - **Lengths.** Shards may have different lengths, and some may be empty. `ring.post(x, y, length=n)` makes room for n
#   tokens in x and in y; n is the length of the shard that *arrives*. With hidden hops, a block and a courier that
#   arrive together belong to different owners: take two posts, or bring the buffers, `ring.post(…, into=(…))`.
# - **Memory.** Hold your shard, one block in use and one arriving, one courier and one arriving, and what the
#   computation of one block makes. Only growth is judged: with 16 ranks the peak may be two blocks (K and V as
#   they came) above that with 4, and must be less than the 15 blocks that a rank receives.
# - **Time.** On the virtual clock a block takes 1 s and a hop ½ s. Every hop but the couriers' last can hide: if a
#   rank sees something of every block, P + ½ seconds are enough.
#
# Make it right for wide windows first, then for narrow ones, then hide the hops. If values are wrong, make sure that
# the two stages above pass.


# %% grade="09.couriers"
def ring_backward(ring, dout, q, k, v, out, lse, positions, window):
    """Return this rank's (dq, dk, dv)."""
    # BEGIN SOLUTION every block and every courier passes through here, P steps
    P, delta = ring.world_size, row_delta(dout, out)
    dq, courier = torch.zeros(q.shape, dtype=lse.dtype), None
    for step in range(P):
        here, due = ring.origin(step), len(positions[ring.origin(step + 1)])
        blocks = ring.post(k, v, length=due) if step < P - 1 else None
        distance = positions[ring.rank][:, None] - positions[here][None, :]
        mask = (distance >= 0) & (distance < window)
        sums = tuple(torch.zeros(x.shape, dtype=lse.dtype) for x in (k, v))
        if mask.any():
            inputs = dout, q, k, v, lse, delta, mask
            part, *sums = ring.compute(f"attend backward {step}", block_backward, *inputs)
            dq += part
        if courier is not None:  # what the ranks before this one have added up
            sums = [arrived.add_(own) for arrived, own in zip(courier.wait(), sums, strict=True)]
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
# `lengths[r]` is the number of tokens of rank r, `itemsize` the bytes of an element of K and V: 2, 4 or 8. Return
# `(forward, backward)`: the bytes that `rank` sends in a forward ring (exercise 05) and in your backward ring. Sums
# travel in float32, or in float64 where K and V are float64. One rank alone sends nothing.


# %% grade="09.traffic"
def bytes_sent(lengths, rank, B, K, D, itemsize):
    """Return the bytes that this rank sends (forward, backward)."""
    # BEGIN SOLUTION count what this rank sends in each step
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
# When all stages hold, run `on_real_text()` in a new cell. It runs your backward on 4 virtual ranks and on 4
# processes connected by gloo, holds both against the float64 oracle, and compares the bytes that travelled with your
# count.


# %%
def on_real_text(S=512, P=4, H=4, K=2, D=32, window=100):
    """Print the errors of your gradients and the bytes of rank 0."""
    layout, (q, k, v) = zigzag(S, P), corpus.qkv(S, heads=H, kv_heads=K, head_dim=D)
    dout = torch.cos(torch.arange(S * H * D).float()).view(q.shape)
    distance = torch.arange(S)[:, None] - torch.arange(S)[None, :]
    mask = ((distance >= 0) & (distance < window)).numpy()
    out, lse = (torch.from_numpy(x).float() for x in oracle.attention(q, k, v, mask=mask))
    positions = [torch.from_numpy(layout.positions(rank)) for rank in range(P)]
    truth = [torch.from_numpy(x) for x in oracle.gradients(q, k, v, dout, mask=mask)]

    def program(ring):
        own = layout.shard((dout, q, k, v, out, lse[..., None]), ring.rank)
        return ring_backward(ring, *own[:5], own[5][..., 0], positions, window)

    yours = bytes_sent([S // P] * P, 0, 1, K, D, 4)[1]
    runs = ("virtual ranks", VirtualCluster(P).run(program)), ("processes", launch(program, P))
    for name, run in runs:
        found = [layout.unshard(parts) for parts in zip(*run.results, strict=True)]
        pairs = zip(found, truth, strict=True)
        worst = max(((x - t).abs().max() / t.abs().max()).item() for x, t in pairs)
        sent = run.trace.bytes_sent(0)
        print(f"{name}: relative error below 1e-5: {worst < 1e-5}, bytes {sent:,}, yours {yours:,}")


# %% tags=["solution-only"]
on_real_text()

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/09_backward_ring.ipynb` also runs the hidden ones, on its
# own inputs.
