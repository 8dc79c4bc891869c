# %% [markdown]
# # Exercise 03 · Tiled attention, forward and backward
#
# **You build** attention that never holds more than one tile of scores: first the forward, then its backward from lse
# and delta. **You need** [lesson 03](../notebooks/03_tiled_attention.ipynb), and grouped heads from
# [lesson 01](../notebooks/01_naive_attention.ipynb). **Minutes** 60.
#
# The lesson's functions are for S queries and S keys. Yours also serve a model that has read most of its text already:
# its queries are the last M tokens of N, and several query heads share one key/value head. These are the scores for
# M = 5, N = 9 and tile = 3. A dot is a visible pair. A *cut* tile, the lesson's *diagonal*, holds both visible and hidden
# pairs.
#
# ```text
#               keys   0 1 2   3 4 5   6 7 8
#  query 0 (token 4)   • • •   • •
#  query 1 (token 5)   • • •   • • •
#  query 2 (token 6)   • • •   • • •   •
#                      full    cut     cut
#  query 3 (token 7)   • • •   • • •   • •
#  query 4 (token 8)   • • •   • • •   • • •
#                      full    full    cut
# ```
#
# | stage | function | what is checked |
# |---|---|---|
# | 03.forward | `tiled_forward` | values, short tiles, the causal mask, grouped heads, bfloat16, memory, work |
# | 03.backward | `tiled_backward` | the same for dQ, dK and dV |
#
# `check` runs the visible checks here, in seconds. Memory and work count once the values are right.
#
# **Allowed** in both functions: ringlab's `merge` and its naive block, and functions of your own. **Not allowed:**
# ringlab's other attention, PyTorch's (`scaled_dot_product_attention` and its relatives), and changing the arguments.

# %%
import math

import torch

from ringlab_course import check, hint, progress
from ringlab.blocks import get_block
from ringlab.blocks.protocol import BackwardRows
from ringlab.merge import Partial, merge, state_dtype

# %% [markdown]
# ## 03.forward · Attention by tiles
#
# `q` is (B, H, M, D); `k` and `v` are (B, K, N, D). H is a multiple of K, and neighbouring query heads share a
# key/value head, as in lesson 01. Return `(out, lse)`: out (B, H, M, D) is softmax(scale · q kᵀ) v, and lse (B, H, M) is
# the natural logarithm of each row's sum of exponentials.
#
# - A tile is at most `tile` queries × `tile` keys, and may begin at any token. M and N need not be multiples of `tile`.
# - Without `causal`, M and N are any lengths from 1. With `causal`, M ≤ N, and the queries are the last M of the N tokens.
#   Each query sees the keys up to its own token. N − M need not be a multiple of `tile` either.
# - Hold one tile of scores at a time, of all heads. Do not copy k or v as a whole: neither once for each query head,
#   nor in another dtype. Do not compute tiles in which nothing is visible.
# - In numbers: the peak beyond the arguments may be three times the results, and twelve squares of `tile` × `tile` float32
#   scores of all query heads. The lesson's `attend` makes three squares.
# - q, k and v may be bfloat16. out and lse are in `state_dtype(q.dtype)`, float32 or float64, and so are all
#   numbers computed on the way to them.
#
# Merge as you like: with `Partial` and `merge`, or with a running maximum, sum and accumulator. `Partial.identity(q)` is in
# the state dtype, also for a bfloat16 q.
#
# For a tile you may call ringlab's naive block. It takes grouped heads and bfloat16, and returns a `Partial` in the state
# dtype:
#
# ```python
# block = get_block("naive", q)
# part = block.forward(q_tile, k_tile, v_tile, causal=on_diagonal, scale=scale)
# ```
#
# It knows one causal mask, that of the lesson: row i of the tile sees keys 0 to i of the tile, and there are no more keys
# than rows. It takes no shifted mask. So cut the keys at the token of the tile's first query: every row sees all keys before
# that token (`causal=False`), and from there on the mask is the lesson's (`causal=True`).


# %% grade="03.forward"
def tiled_forward(q, k, v, *, causal, scale, tile):
    """Return (out, lse) of attention, one tile of scores at a time."""
    # BEGIN SOLUTION out and lse
    M, N, heads, dtype = q.shape[-2], k.shape[-2], k.shape[1], state_dtype(q.dtype)
    start = N - M  # the position of query 0
    out = torch.zeros(q.shape, dtype=dtype)
    lse = torch.zeros(q.shape[:-1], dtype=dtype)
    for row in range(0, M, tile):
        rows = slice(row, min(row + tile, M))
        q_tile = q[..., rows, :].to(dtype).unflatten(1, (heads, -1))  # (B, K, H/K, rows, D)
        state = Partial.identity(q_tile)
        for key in range(0, start + rows.stop if causal else N, tile):
            keys = slice(key, min(key + tile, N))
            k_tile, v_tile = (x[:, :, None, keys, :].to(dtype) for x in (k, v))
            scores = scale * (q_tile @ k_tile.mT)
            if causal and keys.stop - 1 > start + row:  # the first query does not see the last key
                positions = start + torch.arange(row, rows.stop)
                hidden = torch.arange(key, keys.stop) > positions[:, None]
                scores.masked_fill_(hidden, -math.inf)
            new = scores.logsumexp(-1)
            shift = new.masked_fill(new == -math.inf, 0.0)  # a row that sees nothing of this tile
            state = merge(state, Partial(torch.exp(scores - shift[..., None]) @ v_tile, new))
        out[..., rows, :], lse[..., rows] = state.out.flatten(1, 2), state.lse.flatten(1, 2)
    return out, lse
    # END SOLUTION


# %%
check("03.forward")

# %% [markdown]
# Stuck? `hint("03.forward")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 03.backward · From lse and delta
#
# `dout` is the gradient of the loss with respect to out, in the dtype of q; `out` and `lse` are what the whole forward
# returned, in the state dtype. Return `(dq, dk, dv)`, each in the shape of its input and in `state_dtype(q.dtype)`.
#
# - Compute each tile of P again. Store no P, and do not call autograd.
# - dk and dv of a key/value head are sums over the query heads that share it.
# - Lengths, mask, heads, memory and hidden tiles are as in the forward. In that memory there is room for dout · out of all
#   rows at once, but not for a dk and a dv of each query head, where four share one key/value head.
#
# The naive block has a backward, too: `block.backward(rows, k_tile, v_tile, causal=…, scale=…)`, where `rows` is
# `BackwardRows(dout, q, out, lse, delta)` of the tile's queries, as in the lesson.
#
# The order in which you visit the tiles is yours to choose. Which of dQ, dK and dV is then finished early, and which is
# written again and again?


# %% grade="03.backward"
def tiled_backward(dout, q, k, v, out, lse, *, causal, scale, tile):
    """Return (dq, dk, dv), one tile of P at a time."""
    # BEGIN SOLUTION the three gradients
    M, N, heads, dtype = q.shape[-2], k.shape[-2], k.shape[1], state_dtype(q.dtype)
    start = N - M
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
    for row in range(0, M, tile):
        rows = slice(row, min(row + tile, M))
        q_tile, dout_tile, out_tile = (
            x[..., rows, :].to(dtype).unflatten(1, (heads, -1)) for x in (q, dout, out)
        )
        total = lse[..., rows, None].unflatten(1, (heads, -1))
        delta = (dout_tile * out_tile).sum(-1, keepdim=True)
        for key in range(0, start + rows.stop if causal else N, tile):
            keys = slice(key, min(key + tile, N))
            k_tile, v_tile = (x[:, :, None, keys, :].to(dtype) for x in (k, v))
            weights = scale * (q_tile @ k_tile.mT)
            if causal and keys.stop - 1 > start + row:
                positions = start + torch.arange(row, rows.stop)
                hidden = torch.arange(key, keys.stop) > positions[:, None]
                weights.masked_fill_(hidden, -math.inf)
            weights = weights.sub_(total).exp_()
            dscores = weights * (dout_tile @ v_tile.mT - delta)
            dq[..., rows, :] += scale * (dscores @ k_tile).flatten(1, 2)
            dk[..., keys, :] += scale * (dscores.mT @ q_tile).sum(2)
            dv[..., keys, :] += (weights.mT @ dout_tile).sum(2)
    return dq, dk, dv
    # END SOLUTION


# %%
check("03.backward")

# %% [markdown]
# Stuck? `hint("03.backward")` in a new cell helps.

# %% [markdown]
# ## How far you are

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# There are more checks than these: `ringlab grade exercises/03_tiled_attention.ipynb` also runs the hidden ones, on
# fresh inputs.
#
# **If you want more.** Write the backward with the loops the other way round, and say which gradients now stay in the
# live set. Then find the `tile` for which your forward is fastest on this machine, and explain why both a smaller and a
# larger one are slower.
