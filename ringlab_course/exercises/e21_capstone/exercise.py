# %% [markdown]
# # Exercise 21 · Capstone: your own ring attention
#
# **You get** a transport, this contract, and a conformance suite that has found bugs in published packages. **You
# deliver** five functions, forward and backward, in which the suite finds nothing.
#
# **You need** lessons [05](../notebooks/05_emulated_ring.ipynb), [07](../notebooks/07_causal_imbalance.ipynb),
# [08](../notebooks/08_striped_and_zigzag.ipynb), [09](../notebooks/09_backward_ring.ipynb), [10](../notebooks/10_numerics.ipynb) and, for point 6 and the report over gloo,
# [11](../notebooks/11_real_processes.ipynb). **Minutes** 240.
#
# | stage | function | what is checked |
# |---|---|---|
# | 21.owned | `owned` | contiguous, striped, zig-zag; any length |
# | 21.block | `attend_block` | one query block on one K/V block, by global position |
# | 21.merge | `merge` | two partial results |
# | 21.forward | `ring_forward` | the suite: values, masks, precision, messages, memory, faults |
# | 21.backward | `ring_backward` | the same for dq, dk and dv |
#
# ## The contract
#
# 1. **Shapes.** `q`, `dout` and `out` are (B, H, L, D). `k` and `v` are (B, K, L, D), where K divides H; query head h reads
#    K/V head h // (H // K). `lse` is (B, H, L), the natural logarithm. L differs from rank to rank and may be 0.
# 2. **Order.** `positions[r][i]` is the global position of token i of rank r, in any layout. With `causal`, a query sees the
#    keys at or before its position; otherwise it sees all keys. A row without keys has out 0 and lse −∞, and it
#    contributes no gradient.
# 3. **Numbers.** `scale=None` means 1/√D. Inputs are bfloat16, float32 or float64, and scores may be ±16,000. The *state*,
#    which is carried from block to block, is at least float32, and float64 for float64. On any P, errors are at most about
#    twice those of the plainest implementation in the same dtype. In bfloat16 each result is rounded once, at the end, so
#    its root mean square error may be at most 1.7 times that on one rank.
# 4. **Messages.** All messages go to the next rank. K and V make P − 1 hops in their own dtype, without repeated heads. dK
#    and dV make P hops in the state's dtype (one rank alone sends nothing). Send nothing else: no lse, no delta, no lengths,
#    no padding, even if lengths differ. An empty block makes its hops like any other, as a message without bytes. Until
#    `wait()` returns, do not write to what is sent, and do not read what is received.
# 5. **Memory and work.** If shards keep their size, no tensor grows with P. A *stretch* is a maximal run of consecutive
#    positions on one rank. If no query of one stretch sees any key of another rank's stretch, do not compute their scores,
#    forward or backward. This is checked for contiguous and zig-zag layouts only. Whether your ring or your block skips
#    them is up to you. The pairs within a rank's own shard may all be computed. 21.forward and 21.backward have checks of
#    memory and of work; `conform` counts both more exactly. Speed is not graded, but the grader compares the processor
#    time of ranks: contiguous, the first must need clearly less than the last. A run that does not end is stopped.
# 6. **Faults.** Results do not depend on when messages arrive. If a rank dies, or a shard is shorter than `positions`
#    says, every other rank ends with an error, of any type; the rank with the short shard may return or raise. The
#    transport sees to that, if you let it: it raises where a rank that you wait for has ended, and where a tensor arrives
#    with another length than you asked for. So ask for the lengths in `positions`, and do not catch its errors.
# 7. **Yours.** You may use `Ring`: its `rank`, `world_size`, `origin(step)`, `post(*tensors, length=…)`, and
#    `shift(*tensors, length=…)`. `wait()` on what `post` returns gives a tuple of tensors, even for one; `shift` gives one
#    tensor for one, a tuple for more. `length` is the number of tokens that *arrive*; without it, as many as you send. Leave
#    out their other arguments, such as `tag`. Write everything else yourself. **Not allowed:** ringlab's oracle, layouts,
#    blocks, merge and attention, PyTorch's attention, and changing the arguments of a function: do not write into them.
#
# You may add helper functions, in these five cells or in new ones. Write the five in any order. Each is graded by itself,
# but a ring that calls your `attend_block` or `merge` inherits their faults.

# %%
import math

import torch

from ringlab_course import check, hint
from ringlab_course.notebook.capstone import beside, conform

# %% [markdown]
# ## 21.owned
#
# Return a list with the positions of each rank's tokens, as int64 tensors in ascending order. `layout` is one of
#
# - `"contiguous"`: pieces of ⌈S/P⌉ tokens, piece r to rank r;
# - `"striped"`: token i to rank i % P;
# - `"zigzag"`: pieces of ⌈S/(2P)⌉ tokens, pieces r and 2P − 1 − r to rank r.
#
# Later pieces may be shorter or empty, so some ranks may get no token.


# %% grade="21.owned"
def owned(layout, S, P):
    """Return the positions of each rank's tokens."""
    # BEGIN SOLUTION the positions of each rank's tokens
    token, pieces = torch.arange(S), {"contiguous": P, "striped": S, "zigzag": 2 * P}[layout]
    piece = token // max(1, math.ceil(S / max(1, pieces)))
    folded = torch.minimum(piece, 2 * P - 1 - piece)
    owner = {"contiguous": piece, "striped": piece % P, "zigzag": folded}[layout]
    return [torch.nonzero(owner == rank).flatten() for rank in range(P)]
    # END SOLUTION


# %%
check("21.owned")

# %% [markdown]
# Stuck? `hint("21.owned")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 21.block
#
# Return `(out, lse)` of these queries over only these keys, in the state's dtype: float32, or float64 for float64. There
# may be no queries or no keys.


# %% grade="21.block"
def attend_block(q, k, v, q_positions, k_positions, causal=True, scale=None):
    """Return (out, lse) of one query block on one K/V block, in the state's dtype."""
    # BEGIN SOLUTION attention of these queries over these keys
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    q = q.unflatten(1, (k.shape[1], group))  # heads that share a K/V head, on their own axis
    scores = scale * (q @ k[:, :, None].mT)
    if causal:
        scores = scores.masked_fill(k_positions > q_positions[:, None], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    known = lse.masked_fill(lse == -math.inf, 0.0)  # rows without keys: exp(−inf − 0) is 0, not NaN
    out = torch.exp(scores - known[..., None]) @ v[:, :, None]
    return out.flatten(1, 2), lse.flatten(1, 2)
    # END SOLUTION


# %%
check("21.block")

# %% [markdown]
# Stuck? `hint("21.block")` in a new cell helps.

# %% [markdown]
# ## 21.merge
#
# Both parts are results over different keys, for the same queries, and all four tensors have the state's dtype. Return
# `(out, lse)` over the keys of both, in that dtype, in new tensors. Where both lse are −∞, out is 0 and lse −∞.


# %% grade="21.merge"
def merge(out, lse, new_out, new_lse):
    """Return the partial result over the keys of both."""
    # BEGIN SOLUTION the two parts as one
    total = torch.logaddexp(lse, new_lse)
    known = total.masked_fill(total == -math.inf, 0.0)
    shares = (torch.exp(part - known)[..., None] for part in (lse, new_lse))
    return next(shares) * out + next(shares) * new_out, total
    # END SOLUTION


# %%
check("21.merge")

# %% [markdown]
# Stuck? `hint("21.merge")` in a new cell helps.

# %% [markdown]
# ## 21.forward
#
# `q`, `k` and `v` are this rank's shards. Return its `(out, lse)`, out in the dtype of q, lse in that of the state.


# %% grade="21.forward"
def ring_forward(ring, q, k, v, positions, causal=True, scale=None):
    """Return this rank's (out, lse)."""
    # BEGIN SOLUTION the ring
    def stretches(places):
        """Rows whose positions rise by one step: they are before, after or across another such."""
        steps = places.diff()
        cuts = (torch.nonzero(steps > steps.min()).flatten() + 1).tolist() if len(steps) else []
        return [rows for rows in torch.arange(len(places)).tensor_split(cuts) if len(rows)]

    mine = positions[ring.rank]
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    lse = torch.full(q.shape[:-1], -math.inf, dtype=out.dtype)
    for step in range(ring.world_size):
        here, last = positions[ring.origin(step)], step == ring.world_size - 1
        coming = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        for rows in stretches(mine):
            seen = here <= mine[rows].max() if causal else torch.ones_like(here, dtype=torch.bool)
            if not seen.any():
                continue
            tile = q[:, :, rows], k[:, :, seen], v[:, :, seen], mine[rows], here[seen]
            merged = merge(out[:, :, rows], lse[:, :, rows], *attend_block(*tile, causal, scale))
            out[:, :, rows], lse[:, :, rows] = merged
        if coming is not None:
            k, v = coming.wait()
    return out.to(q.dtype), lse
    # END SOLUTION


# %%
check("21.forward")

# %% [markdown]
# Stuck? `hint("21.forward")` in a new cell helps.

# %% [markdown]
# ## 21.backward
#
# `out` and `lse` are the results of the forward, and `dout` is the gradient of the loss with respect to out. Return this
# rank's `(dq, dk, dv)` in the dtypes of q, k and v.


# %% grade="21.backward"
def ring_backward(ring, dout, q, k, v, out, lse, positions, causal=True, scale=None):
    """Return this rank's (dq, dk, dv)."""
    # BEGIN SOLUTION the backward ring
    def stretches(places):
        steps = places.diff()
        cuts = (torch.nonzero(steps > steps.min()).flatten() + 1).tolist() if len(steps) else []
        return [rows for rows in torch.arange(len(places)).tensor_split(cuts) if len(rows)]

    def tile(q, k, v, dout, lse, delta, hidden):
        shared = k.shape[1], q.shape[1] // k.shape[1]
        q, dout, lse, delta = (x.unflatten(1, shared) for x in (q, dout, lse, delta))
        k, v = k[:, :, None], v[:, :, None]
        weights = torch.exp((scale * (q @ k.mT)).masked_fill(hidden, -math.inf) - lse[..., None])
        dscores = scale * weights * (dout @ v.mT - delta[..., None])
        return (dscores @ k).flatten(1, 2), (dscores.mT @ q).sum(2), (weights.mT @ dout).sum(2)

    P, mine, dtypes = ring.world_size, positions[ring.rank], (q.dtype, k.dtype, v.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, dout, out = (x.to(lse.dtype) for x in (q, dout, out))
    delta, dq, courier = (dout * out).sum(-1), torch.zeros_like(q), None
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # rows without keys: all their weights are 0
    for step in range(P):
        here, due = positions[ring.origin(step)], len(positions[ring.origin(step + 1)])
        coming = ring.post(k, v, length=due) if step < P - 1 else None
        wide_k, wide_v = (x.to(lse.dtype) for x in (k, v))
        dk, dv = (torch.zeros_like(x) for x in (wide_k, wide_v))
        for rows in stretches(mine):
            seen = here <= mine[rows].max() if causal else torch.ones_like(here, dtype=torch.bool)
            hidden = (here[seen] > mine[rows, None]) & causal
            of_rows = (x[:, :, rows] for x in (dout, lse, delta))
            parts = tile(q[:, :, rows], wide_k[:, :, seen], wide_v[:, :, seen], *of_rows, hidden)
            for into, where, part in zip((dq, dk, dv), (rows, seen, seen), parts, strict=True):
                into[:, :, where] += part
        if courier is not None:
            dk, dv = map(torch.Tensor.add_, (dk, dv), courier.wait())
        courier = ring.post(dk, dv, length=due) if P > 1 else None
        k, v = (k, v) if coming is None else coming.wait()
    dk, dv = courier.wait() if P > 1 else (dk, dv)
    return tuple(x.to(dtype) for x, dtype in zip((dq, dk, dv), dtypes, strict=True))
    # END SOLUTION


# %%
check("21.backward")

# %% [markdown]
# Stuck? `hint("21.backward")` in a new cell helps.

# %% [markdown]
# ## The report
#
# `check` and `ringlab grade` run the suite's checks on one function at a time. The suite itself runs on all five together:
# your layouts, your forward, and your backward on the results of your forward. When the stages pass, try this in new cells:
#
# - `mine = conform()` runs the quick tier on virtual ranks. `only=("masks",)` selects checks, `seed=7` draws other inputs,
#   and `quick=False` runs the full tier. The suite also checks what a grader outside your process cannot see: which ranks
#   share memory, which matrix products were computed, how large the largest tensor was.
# - `real = conform(transport="gloo", ranks=(2, 3))` runs the same on processes connected by gloo, and kills some of them.
#   Without `ranks` it starts up to 8 processes and takes minutes.
# - `beside(mine, real)` shows both next to known packages, from the committed reports. A package that claims less is
#   checked for less.
#
# This is the table to compare yourself with:

# %% tags=["nbval-ignore-output"]
beside()

# %% tags=["solution-only"]
mine = conform(only=("masks", "grouped heads", "ragged", "causality", "aliasing", "gather", "work"))

# %% tags=["solution-only"]
checks = ("masks", "dq", "dk", "dv", "bytes", "rank dies")
real = conform(transport="gloo", ranks=(2, 3), only=checks)

# %% tags=["solution-only", "nbval-ignore-output"]
beside(mine, real)

# %% [markdown]
# `ringlab grade exercises/21_capstone.ipynb` also runs the hidden checks, with each rank in its own process, on new inputs.
