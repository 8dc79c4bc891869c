# %% [markdown]
# # Exercise 03 · Tiled attention, forward and backward
#
# **You build** attention that never holds more than one tile of scores: first the forward, then its backward from lse
# and delta.
# **You need** [lesson 03](../notebooks/03_tiled_attention.ipynb). **Minutes** 60.
#
# | stage | function | what is looked at |
# |---|---|---|
# | 03.forward | `tiled_forward` | values, a short last tile, the causal mask, memory against S, large scores, work, bfloat16 |
# | 03.backward | `tiled_backward` | the same for dQ, dK and dV |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded.

# %%
import math

import torch

from ringlab_course import check, hint, progress
from ringlab.merge import state_dtype

# %% [markdown]
# ## 03.forward · Attention by tiles
#
# `q`, `k` and `v` are (B, H, S, D), all with the same number of heads. Return `(out, lse)`: out (B, H, S, D) is
# softmax(scale · q kᵀ) v, lse (B, H, S) the natural logarithm of each row's sum of exponentials.
#
# - A tile is at most `tile` queries × `tile` keys. S need not be a multiple of `tile`, and may be smaller.
# - Hold one tile of scores at a time. Peak memory grows like S, and what a tile needs does not grow at all.
# - With `causal`, query i sees keys 0 to i. Tiles that are hidden whole are not computed.
# - q, k and v may be bfloat16. out and lse are in `state_dtype(q.dtype)`, float32 or float64, and so is all that leads
#   to them.
#
# Merge in the way you like best: `(out, lse)` as in lesson 02 (you may import `Partial` and `merge` from
# `ringlab.merge`), or a running maximum, sum and accumulator.


# %% grade="03.forward"
def tiled_forward(q, k, v, *, causal, scale, tile):
    """Return (out, lse) of attention, one tile of scores at a time."""
    # BEGIN SOLUTION two loops over tiles, and a merge
    S, dtype = q.shape[-2], state_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=dtype)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=dtype)
    for row in range(0, S, tile):
        rows = slice(row, row + tile)  # a slice may end after S: it stops there by itself
        for key in range(0, row + 1 if causal else S, tile):
            keys = slice(key, key + tile)
            scores = scale * (q[..., rows, :].to(dtype) @ k[..., keys, :].to(dtype).mT)
            if causal and key == row:
                hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
                scores.masked_fill_(hidden, -math.inf)
            total = torch.logaddexp(lse[..., rows], scores.logsumexp(-1))
            out[..., rows, :] *= torch.exp(lse[..., rows] - total).unsqueeze(-1)
            out[..., rows, :] += torch.exp(scores - total.unsqueeze(-1)) @ v[..., keys, :].to(dtype)
            lse[..., rows] = total
    return out, lse
    # END SOLUTION


# %%
check("03.forward")

# %% [markdown]
# Stuck? `hint("03.forward")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 03.backward · From lse and delta
#
# `dout` is the gradient of the loss with respect to out; `out` and `lse` are what the whole forward returned. Return
# `(dq, dk, dv)`, each in the shape of its input and in `state_dtype(q.dtype)`.
#
# - Compute each tile of P again; store no P, and do not call autograd.
# - The same rules for memory, for the last tile, and for hidden tiles as in the forward.
#
# In which order you walk over the tiles is yours to choose. Which of dQ, dK and dV can then stay small and near, and
# which is written again and again?


# %% grade="03.backward"
def tiled_backward(dout, q, k, v, out, lse, *, causal, scale, tile):
    """Return (dq, dk, dv), one tile of P at a time."""
    # BEGIN SOLUTION delta once, then two loops over tiles
    S, dtype = q.shape[-2], state_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(q.shape, dtype=dtype) for _ in range(3))
    delta = (dout.to(dtype) * out).sum(-1, keepdim=True)
    for key in range(0, S, tile):
        keys = slice(key, key + tile)
        k_tile, v_tile = k[..., keys, :].to(dtype), v[..., keys, :].to(dtype)
        for row in range(key if causal else 0, S, tile):
            rows = slice(row, row + tile)
            q_tile, dout_tile = q[..., rows, :].to(dtype), dout[..., rows, :].to(dtype)
            weights = scale * (q_tile @ k_tile.mT)
            if causal and key == row:
                hidden = torch.ones(weights.shape[-2:], dtype=torch.bool).triu(1)
                weights.masked_fill_(hidden, -math.inf)
            weights = weights.sub_(lse[..., rows].unsqueeze(-1)).exp_()
            dscores = weights * (dout_tile @ v_tile.mT - delta[..., rows, :])
            dq[..., rows, :] += scale * (dscores @ k_tile)
            dk[..., keys, :] += scale * (dscores.mT @ q_tile)
            dv[..., keys, :] += weights.mT @ dout_tile
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
# The visible checks are not all: `ringlab grade exercises/03_tiled_attention.ipynb` runs the hidden ones, on inputs of
# its own.
#
# **If you want more.** Write the backward with the loops the other way round, and say which gradients now stay in the
# live set. Then find a `tile` for which your forward is fastest on this machine, and explain why both a smaller and a
# larger one are slower.
