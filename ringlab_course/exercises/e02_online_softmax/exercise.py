# %% [markdown]
# # Exercise 02 · Merge and stream
#
# **You build** the merge that the whole course uses, one step of a streaming softmax, and attention that looks at one
# block of keys at a time. **You need** [lesson 02](../notebooks/02_online_softmax.ipynb). **Minutes** 60.
#
# | stage | function | what is checked |
# |---|---|---|
# | 02.merge | `merge` | values, any number of parts, empty parts, lse near ±1000, float32 state, any order |
# | 02.update | `update` | a maximum that rises, one that stays, rows that have seen no key yet |
# | 02.stream | `streaming_attention` | values, a short last block, memory, bfloat16 inputs, large scores |
#
# **Allowed** in all three functions: torch without its attention (torch.softmax and torch.logsumexp are fine), NumPy, and your
# own functions. **Not allowed:** `scaled_dot_product_attention` and its relatives, ringlab's merge and attention, and modifying
# the tensors that a function is given, except where a task allows it.
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded. `hint("02.merge")` shows a
# question, then a direction, then a line of mathematics.

# %%
import math

import torch

from ringlab import oracle
from ringlab_course import check, hint, progress

# %% [markdown]
# ## 02.merge · Merge any number of partial results
#
# The lesson merged two parts. Now there are N parts: `outs` is (N, …, D) and `lses` is (N, …). They are results of the same
# queries over N different sets of keys. Return `(out, lse)`, (…, D) and (…), as if all those keys had been seen together.
#
# - N is any number: 1, 7, and 0 too. If there is no part at all, the result is (0, −inf), as for a row that has seen no key.
# - A row of a part with lse −inf has seen no key, and its out is 0: it changes nothing. If this is so in all parts, the
#   result is (0, −inf) as well.
# - lse may be near ±1000.
# - `outs` may be bfloat16, float32 or float64. `lses` has the same dtype, except that it is float32 beside bfloat16 outs.
#   Return both out and lse in float32 at least, and in float64 for float64.


# %% grade="02.merge"
def merge(outs, lses):
    """Return (out, lse) over the keys of all parts; part i is outs[i], lses[i]."""
    # BEGIN SOLUTION out and lse over the keys of all parts
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse).masked_fill(lses == -math.inf, 0.0)
    return (outs * weights[..., None]).sum(dim=0), lse
    # END SOLUTION


# %%
check("02.merge")

# %% [markdown]
# ## 02.update · One step of a streaming softmax
#
# The state of L queries is `maximum` (L,), `total` (L,) and `acc` (L, D): m, Σ e^(s − m) and Σ e^(s − m) v over the keys seen so
# far. Before the first key it is (−inf, 0, 0). The next block has `scores` (L, keys) and `values` (keys, D). Return the new
# `(maximum, total, acc)`.
#
# - `acc` is not divided by anything; the division comes at the end.
# - All five tensors are float32, and a block has one key or more. You may return a float64 state; then the next call gets it.
# - Hidden keys have the score −inf. A row may see no key of this block and none of the blocks before. Nothing is NaN then.
# - You may overwrite `maximum`, `total` and `acc`, as kernels do: nobody needs the old state any more.


# %% grade="02.update"
def update(maximum, total, acc, scores, values):
    """Return the state (maximum, total, acc) after one more block of keys."""
    # BEGIN SOLUTION the state after this block
    new = torch.maximum(maximum, scores.amax(-1))
    anchor = torch.where(new == -math.inf, 0.0, new)  # 0 while no key was seen
    factor = torch.exp(maximum - anchor)
    powers = torch.exp(scores - anchor[:, None])
    return new, total * factor + powers.sum(-1), acc * factor[:, None] + powers @ values
    # END SOLUTION


# %%
check("02.update")

# %% [markdown]
# ## 02.stream · Attention, one block of keys at a time
#
# `q` is (L, D), `k` and `v` are (S, D). Every query sees every key, and scores are divided by √D. Take `block` keys at a time
# (the last block may be shorter, and `block` larger than S) and return `(out, lse)`, (L, D) and (L,). S is 1 or more.
#
# - Hold the scores of one block and the state of the queries. Nothing that you hold may grow with S, and a copy of all
#   keys or values does.
# - q, k and v are all float32 or all bfloat16. Compute in float32 at least, and return float32 at least.
#
# You may use your `update` or your `merge`.


# %% grade="02.stream"
def streaming_attention(q, k, v, block):
    """Return (out, lse) of attention, `block` keys at a time."""
    # BEGIN SOLUTION out and lse, block by block
    L, D = q.shape
    state = torch.full((L,), -math.inf), torch.zeros(L), torch.zeros(L, D)
    for start in range(0, len(k), block):
        keys, values = k[start : start + block].float(), v[start : start + block].float()
        state = update(*state, q.float() @ keys.T / D**0.5, values)
    maximum, total, acc = state
    return acc / total[:, None], maximum + torch.log(total)
    # END SOLUTION


# %%
check("02.stream")

# %% [markdown]
# ## All of it at once
#
# There are 1,000 keys. Each half is streamed in blocks of 64, and the two results are merged, as two devices would do it.

# %%
torch.manual_seed(0)
q, k, v = torch.randn(4, 16), torch.randn(1000, 16), torch.randn(1000, 16)
truth = oracle.attention(q[None, None], k[None, None], v[None, None])
try:
    parts = slice(0, 500), slice(500, 1000)
    halves = [streaming_attention(q, k[part], v[part], 64) for part in parts]
    out, lse = merge(*(torch.stack(pieces) for pieces in zip(*halves, strict=True)))
    error = abs(out.numpy() - truth.out[0, 0]).max()
    print("largest error:", "below 1e-6" if error < 1e-6 else "too large")
except NotImplementedError as missing:
    print("not written yet:", missing)

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# `ringlab grade exercises/02_online_softmax.ipynb` runs the hidden checks as well. Next: [lesson 03](../notebooks/03_tiled_attention.ipynb).
