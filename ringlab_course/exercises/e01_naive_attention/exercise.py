# %% [markdown]
# # Exercise 01 · Attention in NumPy
#
# **You build** attention in NumPy: a softmax that cannot overflow, the causal mask, attention, and grouped
# heads. **You need** [lesson 01](../notebooks/01_naive_attention.ipynb). **Minutes** 45.
#
# | stage | function | what is checked |
# |---|---|---|
# | 01.softmax | `softmax` | values, large scores, rows of different size, rows that see no key |
# | 01.causal | `causal_mask` | positions anywhere in the text, a window |
# | 01.attention | `attention` | scale, batch and heads, masks, capped scores, queries that see no key |
# | 01.grouped | `grouped_attention` | which query heads share which key/value head, no copies |
#
# Arrays are float32 and (B, H, L, D). **Allowed** in all four functions: NumPy, and your own functions. **Not allowed:**
# torch, jax, scipy, ringlab's own attention, and modifying the arrays that a function is given. Results may be float64. But
# `k.astype(np.float64)` is a copy of k, twice as large, and 01.grouped measures memory. NumPy's warnings, as for the
# logarithm of 0, are no failure; the values count.
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded. `hint("01.softmax")` shows a
# question, then a direction, then a line of mathematics.

# %%
import numpy as np

from ringlab import oracle
from ringlab_course import check, hint, progress

# %% [markdown]
# ## 01.softmax · Softmax that cannot overflow
#
# `scores` has any number of axes; the last one runs over the keys. Return `(weights, lse)`: the softmax of every row, in
# the shape of `scores`, and the natural logarithm of every row's sum of exponentials, without the last axis.
#
# - Scores may be near ±1000, and one row may be far below another.
# - A score of −inf is a hidden key and gets weight 0. A row in which all scores are −inf sees no key: all its weights are 0,
#   its lse is −inf, and nothing is NaN.


# %% grade="01.softmax"
def softmax(scores):
    """Return (weights, lse) of softmax over the last axis."""
    # BEGIN SOLUTION weights and lse of every row
    m = scores.max(axis=-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isneginf(m), np.zeros_like(m), m))
    total = powers.sum(axis=-1, keepdims=True)
    seen = total > 0
    lse = np.full_like(total, -np.inf)
    np.log(total, out=lse, where=seen)
    return powers / np.where(seen, total, np.ones_like(total)), (m + lse)[..., 0]
    # END SOLUTION


# %%
check("01.softmax")

# %% [markdown]
# ## 01.causal · The causal mask, by position
#
# `query_positions` and `key_positions` are int64 arrays, in any order: the positions of these tokens in the text. Return a
# boolean array with a row for every query and a column for every key. It is True where the query **may see** the key. A
# token sees itself.
#
# New here: with `window=w` a query sees only the last w positions up to and including its own. Many models have layers with
# such local attention. A window is 1 or more: with `window=1` a token sees only itself. None means that there is no such
# limit.


# %% grade="01.causal"
def causal_mask(query_positions, key_positions, window=None):
    """Return the boolean mask (queries, keys), True where a query may see a key."""
    # BEGIN SOLUTION the boolean mask
    back = query_positions[:, None] - key_positions[None, :]
    return (back >= 0) if window is None else (back >= 0) & (back < window)
    # END SOLUTION


# %%
check("01.causal")

# %% [markdown]
# ## 01.attention · Attention with any mask
#
# `q` is (B, H, Lq, D); `k` and `v` are (B, H, Lk, D). `mask` is None, or a boolean array that is True where a query may see
# a key and that broadcasts to (B, H, Lq, Lk), so it may have fewer axes, such as (Lq, Lk). Scores are divided by √D. Return
# `(out, lse)`, (B, H, Lq, D) and (B, H, Lq). A query that sees no key has out 0 and lse −inf. You may use your `softmax`.
#
# New here: some models keep their scores within ±cap. If `cap` is a number, each score s becomes cap · tanh(s / cap)
# after the division by √D. Where in your function must that happen, so that a hidden key stays hidden?


# %% grade="01.attention"
def attention(q, k, v, mask=None, cap=None):
    """Return (out, lse) of attention."""
    # BEGIN SOLUTION out and lse of these queries over these keys
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    if mask is not None:
        scores = np.where(mask, scores, np.float32(-np.inf))
    weights, lse = softmax(scores)
    return weights @ v, lse
    # END SOLUTION


# %%
check("01.attention")

# %% [markdown]
# ## 01.grouped · Grouped heads
#
# Now `k` and `v` are (B, K, Lk, D), and H is a multiple of K: neighbouring query heads share a key/value head. `mask` is
# None or (Lq, Lk). Return `(out, lse)` as before. You may use your `attention` and your `softmax`.
#
# The lesson copied k and v for every query head, and so lost the memory that grouped heads save. **Do not copy them**: the
# check measures memory, without a mask. What the function holds at its worst moment, its arguments not counted, must be less
# than half of a copy of k for all H query heads. The check uses one query and many keys, so the scores are small beside k.
# You may repeat the mask.


# %% grade="01.grouped"
def grouped_attention(q, k, v, mask=None):
    """Return (out, lse) of attention with fewer key/value heads than query heads."""
    # BEGIN SOLUTION out and lse, without copying k and v for every head
    B, H, Lq, D = q.shape
    K = k.shape[1]
    out, lse = attention(q.reshape(B, K, H // K, Lq, D), k[:, :, None], v[:, :, None], mask)
    return out.reshape(B, H, Lq, D), lse.reshape(B, H, Lq)
    # END SOLUTION


# %%
check("01.grouped")

# %% [markdown]
# ## All of it at once
#
# Queries 4 to 7 of a text look at keys 0 to 7 under a causal mask. The oracle is given the mask, your functions are given
# the positions.

# %%
rng = np.random.default_rng(0)
q = rng.standard_normal((1, 4, 4, 8)).astype(np.float32)
k, v = rng.standard_normal((2, 1, 2, 8, 8)).astype(np.float32)
truth = oracle.attention(q, k, v, mask=np.tri(8, dtype=bool)[4:])
try:
    out, lse = grouped_attention(q, k, v, causal_mask(np.arange(4, 8), np.arange(8)))
    print("largest error:", "below 1e-6" if np.abs(out - truth.out).max() < 1e-6 else "too large")
except NotImplementedError as missing:
    print("not written yet:", missing)

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# `ringlab grade exercises/01_naive_attention.ipynb` runs the hidden checks as well. Next: [lesson 02](../notebooks/02_online_softmax.ipynb).
