# %% [markdown]
# # Exercise 05 · The emulated ring
#
# **You build** ring attention in three stages, each of which uses the one before: one step, the forward ring,
# and the causal ring on any layout.
#
# **You need** [lesson 05](../notebooks/05_emulated_ring.ipynb). **Minutes** 60.
#
# | stage | function | what the checks look at |
# |---|---|---|
# | 05.step | `ring_step` | values, rows that see nothing, large scores, grouped heads, a float32 state |
# | 05.forward | `ring_forward` | values, P − 1 exchanges with the next rank, exact bytes, memory of a shard |
# | 05.causal | `ring_forward_causal` | masks by global position in several layouts, unequal lengths |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded. Memory and
# traffic count once the values are right.
#
# **Not allowed:** ringlab's `merge` and `Partial`, its blocks and rings, PyTorch's attention (`scaled_dot_product_attention`
# and its relatives), and changing the arguments of a function, except `out` and `lse` of `ring_step`.

# %%
import math

import torch

from ringlab import VirtualCluster, contiguous, launch
from ringlab_course import check, corpus, hint, progress

# %% [markdown]
# ## 05.step · One step
#
# A rank holds its queries `q` (B, H, Lq, D), a K/V block `k`, `v` (B, K, Lk, D), and its state so far:
# `out` (B, H, Lq, D) and `lse` (B, H, Lq). Return the new `(out, lse)`, as if the keys of the block had been there
# from the beginning.
#
# - The scale is 1/√D. `mask` (Lq, Lk), if given, is True where a query may see a key.
# - `(0, −inf)` means *nothing seen yet*. A row that sees no key of the block comes out as it went in, up to rounding, and
#   (0, −inf) stays (0, −inf).
# - Query head h reads K/V head h // (H // K).
# - q, k and v may be bfloat16; `out` and `lse` are at least float32. Compute in the dtype of `out`.
# - You may write into `out` and `lse`, but leave `q`, `k`, `v` and `mask` as they are.
#
# **You may use** PyTorch's tensor functions. You write the merge yourself this once: all of `ringlab.merge`,
# `ring_attention` and the other functions of ringlab that compute attention are off limits in all three stages, and
# so is PyTorch's own attention.

# %% grade="05.step"
def ring_step(q, k, v, out, lse, mask=None):
    """Return (out, lse) after this block as well."""
    # BEGIN SOLUTION one step of the ring
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.to(out.dtype) for x in (q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    total = torch.logaddexp(lse, torch.logsumexp(scores, dim=-1))
    safe = total.masked_fill(total == -math.inf, 0.0)[..., None]  # −inf − (−inf) would be NaN
    out = out * torch.exp(lse[..., None] - safe) + torch.exp(scores - safe) @ v
    return out, total
    # END SOLUTION


# %%
check("05.step")

# %% [markdown]
# Stuck? `hint("05.step")` in a new cell shows a question. Run it again for a direction, then for a line of mathematics.

# %% [markdown]
# ## 05.forward · The ring
#
# `q`, `k`, `v` are this rank's shards, equally long on all ranks. Return `(out, lse)` of this rank's queries over the
# keys of **all** ranks, in float32 (float64 for float64 inputs).
#
# - Make exactly P − 1 exchanges, all with the next rank. Each carries K and V together, and nothing else travels.
# - K and V travel as they came: in the same dtype, without repeated heads.
# - Of the K/V blocks a rank may hold its own, the one in use and the one that is arriving. Memory must not grow with the
#   number of ranks: that is what the checks compare, on 3 and on 10 ranks. So whatever `ring_step` needs for one block, its
#   scores or repeated heads, is allowed, as long as a rank holds less than the 9 blocks that it receives.
# - Do not catch errors of an exchange.
#
# **You may use** your `ring_step`, PyTorch's tensor functions, and the methods of `ring`. You need not use `ring.compute`.

# %% grade="05.forward"
def ring_forward(ring, q, k, v):
    """Return this rank's (out, lse) over the keys of all ranks."""
    # BEGIN SOLUTION the forward ring
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    lse = out.new_full(q.shape[:-1], -math.inf)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v)
        out, lse = ring_step(q, k, v, out, lse)
        if work is not None:
            k, v = work.wait()
    return out, lse
    # END SOLUTION


# %%
check("05.forward")

# %% [markdown]
# Stuck? `hint("05.forward")` in a new cell helps.

# %% [markdown]
# ## 05.causal · Masks by global position
#
# `positions` is a list with one int64 tensor per rank: `positions[r][i]` is the global position of token i of rank r.
# A query sees the keys at or before its own position. Shards may have different lengths, and some may be empty:
# `ring.shift(k, v, length=n)` says that the arriving block has n tokens, on axis −2. `ring.post` takes the same `length`.
#
# Exchanges, bytes and memory are as in 05.forward: blocks travel unpadded, and every rank makes its P − 1 exchanges, also
# one whose own shard is empty. Your `ring_step` then gets no queries, or no keys: `max` over an axis without keys raises an
# error in PyTorch.
#
# **You may use** what you may use in 05.forward; `ring.origin(step)` is one of the methods of `ring`.

# %% grade="05.causal"
def ring_forward_causal(ring, q, k, v, positions):
    """Return this rank's (out, lse) over the keys at or before each query."""
    # BEGIN SOLUTION the causal ring
    mine = positions[ring.rank]
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    lse = out.new_full(q.shape[:-1], -math.inf)
    for step in range(ring.world_size):
        mask = mine[:, None] >= positions[ring.origin(step)][None, :]
        out, lse = ring_step(q, k, v, out, lse, mask)
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v, length=len(positions[ring.origin(step + 1)]))
    return out, lse
    # END SOLUTION


# %%
check("05.causal")

# %% [markdown]
# Stuck? `hint("05.causal")` in a new cell helps.

# %% [markdown]
# ## The same function on real processes
#
# When your 05.forward passes its checks, run `on_two_processes()` in a new cell. It runs your `ring_forward` on two
# virtual ranks and on two processes joined by gloo, and returns the largest difference between the results.

# %%
def on_two_processes(S=256):
    """Return the largest difference between two virtual ranks and two processes."""
    layout, qkv = contiguous(S, 2), corpus.qkv(S, heads=2, head_dim=32)

    def program(ring):
        return ring_forward(ring, *layout.shard(qkv, ring.rank))

    pairs = zip(VirtualCluster(2).run(program).results, launch(program, 2).results, strict=True)
    return max(
        (a - b).abs().max().item()
        for virtual, real in pairs
        for a, b in zip(virtual, real, strict=True)
    )


# %% tags=["solution-only"]
on_two_processes()

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# `ringlab grade exercises/05_emulated_ring.ipynb` also runs the hidden checks, on inputs of its own.
