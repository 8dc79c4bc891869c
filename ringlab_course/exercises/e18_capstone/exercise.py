# %% [markdown]
# # Exercise 18 · Capstone: your own ring attention
#
# **You are handed** a transport, this contract, and a conformance suite that has found bugs in published packages. **You deliver**
# five functions, forward and backward, that it finds nothing in.
# **You need** lessons [05](../notebooks/05_emulated_ring.ipynb), [08](../notebooks/08_striped_and_zigzag.ipynb),
# [09](../notebooks/09_backward_ring.ipynb) and [10](../notebooks/10_numerics.ipynb). **Minutes** 240.
#
# | stage | function | what is looked at |
# |---|---|---|
# | 18.owned | `owned` | contiguous, striped, zig-zag; any length |
# | 18.block | `attend_block` | one query block on one K/V block, by global position |
# | 18.merge | `merge` | two partial results |
# | 18.forward | `ring_forward` | the suite: values, masks, precision, messages, memory, faults |
# | 18.backward | `ring_backward` | the same of dq, dk and dv |
#
# ## The contract
#
# 1. **Shapes.** `q`, `dout`, `out`: (B, H, L, D). `k`, `v`: (B, K, L, D), with K dividing H; query head h reads K/V head h // (H // K).
#    `lse`: (B, H, L), natural logarithm. L differs from rank to rank and may be 0.
# 2. **Order.** `positions[r][i]` is the global position of token i of rank r, in any layout whatever. With `causal`, a query sees the keys at
#    or before its position; without, all of them. A row without keys has out 0 and lse −∞, and no gradient comes from it.
# 3. **Numbers.** `scale=None` stands for 1/√D. Inputs are bfloat16, float32 or float64, scores may be ±16,000. Whatever is carried from block
#    to block, the *state*, is float32 at least, and float64 for float64. Rounding errors do not grow with P.
# 4. **Messages.** All go to the next rank. K and V make P − 1 hops, in their dtype, heads not repeated; dK and dV make P, in float32 at least.
#    Not a byte more, also where lengths differ. Until `wait()` returns, what is sent is not written and what is received is not read.
# 5. **Memory and work.** No tensor grows with P while shards stay as they are. In contiguous and zig-zag, stretches of tokens that hide
#    from each other are not computed.
# 6. **Faults.** Nothing depends on the clock. A rank that dies, or a shard shorter than `positions` says, ends in an error on every rank.
# 7. **Yours.** Everything but `Ring`: its `rank`, `world_size`, `origin(step)`, `post(*tensors, length=…)` → `wait()`, `shift`.
#    ringlab's oracle, layouts, blocks, merge and attention are off limits, and so is PyTorch's attention.
#
# Helper functions are yours to add, in the cells of the five or in new ones. Write them in any order; each is graded by itself.

# %%
import math

import torch

from ringlab_course import check, hint
from ringlab_course.notebook.capstone import beside, conform

# %% [markdown]
# ## 18.owned
#
# Return a list with the positions of each rank's tokens, ascending, int64 tensors. `layout` is `"contiguous"` (pieces of ⌈S/P⌉ tokens,
# piece r to rank r), `"striped"` (token i to rank i % P) or `"zigzag"` (pieces of ⌈S/2P⌉ tokens, r and 2P − 1 − r to rank r). The last
# piece may be shorter, and ranks may go without.


# %% grade="18.owned"
def owned(layout, S, P):
    """Return the positions of each rank's tokens."""
    # BEGIN SOLUTION every token to its piece, every piece to its rank
    token, pieces = torch.arange(S), {"contiguous": P, "striped": S, "zigzag": 2 * P}[layout]
    piece = token // max(1, math.ceil(S / max(1, pieces)))
    owner = {"contiguous": piece, "striped": piece % P, "zigzag": torch.minimum(piece, 2 * P - 1 - piece)}[
        layout
    ]
    return [torch.nonzero(owner == rank).flatten() for rank in range(P)]
    # END SOLUTION


# %%
check("18.owned")

# %% [markdown]
# Stuck? `hint("18.owned")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 18.block
#
# Return `(out, lse)` of these queries over these keys alone, in the state's dtype: float32, or float64 for float64. There may be no queries and no keys.


# %% grade="18.block"
def attend_block(q, k, v, q_positions, k_positions, causal=True, scale=None):
    """Return (out, lse) of one query block on one K/V block, in the state's dtype."""
    # BEGIN SOLUTION scores, mask, logsumexp, weights
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    q = q.unflatten(1, (k.shape[1], group))  # the heads that share a K/V head, on an axis of their own
    scores = scale * (q @ k[:, :, None].mT)
    if causal:
        scores = scores.masked_fill(k_positions > q_positions[:, None], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    known = lse.masked_fill(lse == -math.inf, 0.0)  # rows without keys: exp(−inf − 0) is 0, not NaN
    out = torch.exp(scores - known[..., None]) @ v[:, :, None]
    return out.flatten(1, 2), lse.flatten(1, 2)
    # END SOLUTION


# %%
check("18.block")

# %% [markdown]
# Stuck? `hint("18.block")` in a new cell helps.

# %% [markdown]
# ## 18.merge
#
# Return `(out, lse)` over the keys of both parts.


# %% grade="18.merge"
def merge(out, lse, new_out, new_lse):
    """Return the partial result over the keys of both."""
    # BEGIN SOLUTION the joint lse, and each part's share of it
    total = torch.logaddexp(lse, new_lse)
    known = total.masked_fill(total == -math.inf, 0.0)
    shares = (torch.exp(part - known)[..., None] for part in (lse, new_lse))
    return next(shares) * out + next(shares) * new_out, total
    # END SOLUTION


# %%
check("18.merge")

# %% [markdown]
# Stuck? `hint("18.merge")` in a new cell helps.

# %% [markdown]
# ## 18.forward
#
# `q`, `k`, `v` are this rank's shards. Return its `(out, lse)`: out in q's dtype, lse in the state's.


# %% grade="18.forward"
def ring_forward(ring, q, k, v, positions, causal=True, scale=None):
    """Return this rank's (out, lse)."""
    # BEGIN SOLUTION P blocks, P − 1 hops
    def stretches(places):
        """Rows whose positions rise by the same step: such a stretch lies before, after or across another."""
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
check("18.forward")

# %% [markdown]
# Stuck? `hint("18.forward")` in a new cell helps.

# %% [markdown]
# ## 18.backward
#
# `out` and `lse` are what the forward returned, `dout` is the gradient of the loss with respect to out. Return this rank's `(dq, dk, dv)` in
# the dtypes of q, k and v.


# %% grade="18.backward"
def ring_backward(ring, dout, q, k, v, out, lse, positions, causal=True, scale=None):
    """Return this rank's (dq, dk, dv)."""
    # BEGIN SOLUTION dq stays, dk and dv follow their block and come home
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
            dk, dv = (own.add_(arrived) for own, arrived in zip((dk, dv), courier.wait(), strict=True))
        courier = ring.post(dk, dv, length=due) if P > 1 else None
        k, v = (k, v) if coming is None else coming.wait()
    dk, dv = courier.wait() if P > 1 else (dk, dv)
    return tuple(x.to(dtype) for x, dtype in zip((dq, dk, dv), dtypes, strict=True))
    # END SOLUTION


# %%
check("18.backward")

# %% [markdown]
# Stuck? `hint("18.backward")` in a new cell helps.

# %% [markdown]
# ## The report
#
# `check` above and `ringlab grade` ask the suite's questions one function at a time. Now the suite itself, on all five together: your
# layouts, your forward, your backward on what your forward returned. In new cells, when the stages hold:
#
# - `mine = conform()` runs the quick tier on virtual ranks; `only=("masks",)` asks less, `seed=7` draws other inputs, `quick=False` is
#   the full tier. It asks what a grader outside of your process cannot see, too: who shares memory with whom, which
#   products of matrices were computed, how large the largest tensor was.
# - `real = conform(transport="gloo", ranks=(2, 3))` runs the same on processes joined by gloo, and kills some of them. Without
#   `ranks` it takes up to 8 processes, and minutes.
# - `beside(mine, real)` shows both next to known packages, as the committed reports have them. A package that claims less is asked less.
#
# The last table is what you measure yourself against:

# %% tags=["nbval-ignore-output"]
beside()

# %% tags=["solution-only"]
mine = conform(only=("masks", "grouped heads", "ragged", "causality", "aliasing", "gather", "work"))

# %% tags=["solution-only"]
real = conform(transport="gloo", ranks=(2, 3), only=("masks", "dq", "dk", "dv", "bytes", "rank dies"))

# %% tags=["solution-only", "nbval-ignore-output"]
beside(mine, real)

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/18_capstone.ipynb` runs the others, each rank a process of its own, on inputs
# nobody has seen.
