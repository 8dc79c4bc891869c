# %% [markdown]
# # Exercise 10 · Find the precision bug
#
# **You build** four small instruments: a measure of error, a fold that loses nothing, a tolerance that is neither too wide nor
# too narrow, and a diagnosis from error curves. **You need** [lesson 10](../notebooks/10_numerics.ipynb). **Minutes** 60.
#
# | stage | function | what is looked at |
# |---|---|---|
# | 10.error | `relative_error` | units, bfloat16, zeros, NaN, −inf, shapes |
# | 10.fold | `fold` | a float32 state, rows without keys, large lse, the same bits in one batch and in two |
# | 10.accept | `accept` | right results of many kinds accepted, wrong ones rejected, in three dtypes |
# | 10.diagnose | `diagnose` | eight programs told apart by their error curves |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded. `hint("10.error")` gives a
# question, then a direction, then a line of mathematics.

# %%
import math

import numpy as np
import torch

from ringlab import oracle
from ringlab_course import check, hint
from ringlab_course.figures import error_curves
from ringlab_course.figures import error_curves
from ringlab.viz.style import show

torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other

# %% [markdown]
# ## 10.error · How far off?
#
# `x` is a result of any floating dtype, `truth` the float64 truth, both torch tensors. Return one number, a float
# or a tensor of no dimension,
# ‖x − truth‖ / ‖truth‖, norms over all entries, in float64.
#
# - Where the truth is all 0, return ‖x‖.
# - A NaN in x, an infinity on one side only, or infinities of other signs, are infinitely wrong: `math.inf`.
# - Where both are the same infinity (lse of rows that see no key is −inf), nothing is wrong; such places enter neither norm.
# - x of another shape: `math.inf`.


# %% grade="10.error"
def relative_error(x, truth):
    """Return the relative error of x as a float."""
    # BEGIN SOLUTION settle what cannot be subtracted, then norm by norm
    if x.shape != truth.shape:
        return math.inf
    x, truth = x.double(), truth.double()
    finite = torch.isfinite(truth)
    if not torch.equal(x[~finite], truth[~finite]) or not torch.isfinite(x[finite]).all():
        return math.inf
    scale = truth[finite].norm().item()
    return (x[finite] - truth[finite]).norm().item() / (scale or 1.0)
    # END SOLUTION


# %%
check("10.error")

# %% [markdown]
# ## 10.fold · Many parts, one state
#
# A state `out` (L, D), `lse` (L), float32, and N parts that come by: `outs` (N, L, D), perhaps bfloat16, and `lses` (N, L),
# float32. Return the state `(out, lse)` after all of them, float32.
#
# - (0, −inf) is a row that has seen no key, in the state, in a part, or in both.
# - lse may be ±1000.
# - **In order, one after the other:** folding some of the parts, and the rest into what came out, gives the same *bits* as
#   folding all at once. A ring that is resumed must not notice.
# - Whether you work in place is your choice.


# %% grade="10.fold"
def fold(out, lse, outs, lses):
    """Return the state (out, lse) after the parts (outs[i], lses[i]), in their order."""
    # BEGIN SOLUTION one part at a time, in float32
    for part_out, part_lse in zip(outs.float(), lses, strict=True):
        total = torch.logaddexp(lse, part_lse)
        safe = torch.where(total == -math.inf, 0.0, total)  # −inf − (−inf) has no value
        out = out * torch.exp(lse - safe)[:, None] + part_out * torch.exp(part_lse - safe)[:, None]
        lse = total
    return out, lse
    # END SOLUTION


# %%
check("10.fold")

# %% [markdown]
# ## 10.accept · A tolerance
#
# `q` (rows, D), `k` and `v` (S, D) are float32, bfloat16 or float16; every query sees every key, scores are divided by √D. Somebody
# hands you `out` (rows, D). Return True if it may be the work of an honest implementation *in the dtype of q*, False if
# something is wrong with it.
#
# - Honest are: the plainest implementation, with every tensor in q's dtype; the same in another order of keys; PyTorch's own;
#   blocks folded in float32.
# - Wrong are: missing keys, a forgotten factor, zeros, a NaN; and, for float32 inputs, bfloat16 somewhere on the way. Whatever
#   is eight times as far off as the plainest is wrong, too.
# - On few keys the plainest may be right by luck. A relative error of one `eps` of the dtype is always honest.
# - How you measure is your choice; only the verdicts are judged, and nothing is asked that lies near the border.
# - `oracle.attention(q[None, None], k[None, None], v[None, None]).out[0, 0]` is the truth, a float64 NumPy array.


# %% grade="10.accept"
def accept(out, q, k, v):
    """Return whether out may be honest attention of q over k and v."""
    # BEGIN SOLUTION twice the error of the plainest implementation in this dtype, and at least one rounding
    truth = torch.from_numpy(oracle.attention(q[None, None], k[None, None], v[None, None]).out[0, 0])
    plainest = torch.softmax(q @ k.T * q.shape[-1] ** -0.5, dim=-1) @ v
    allowed = max(2 * relative_error(plainest, truth), torch.finfo(q.dtype).eps)
    return relative_error(out, truth) <= allowed
    # END SOLUTION


# %%
check("10.accept")

# %% [markdown]
# ## 10.diagnose · Which bug?
#
# Someone's blockwise attention was run in bfloat16, in P blocks for each P of `ranks` (the first is 1). `errors` is a dict of NumPy
# arrays, one error for each P: `"plain"`, `"large"` and `"sloped"` are relative errors on three kinds of inputs, as in the lesson, inf
# where a result is not finite; `"repeat"` is the relative difference of two runs on the same input. Return one of these names:
#
# | name | what is wrong |
# |---|---|
# | `"sound"` | nothing: blocks in bfloat16, state in float32 |
# | `"bf16 lse"`, `"bf16 out"` | that part of the state is rounded at every merge |
# | `"bf16 accumulator"` | inside a block, the sum over keys is rounded every 32 keys |
# | `"bf16 q"` | scale · log₂e is multiplied into q, and that is rounded |
# | `"fp16 overflow"` | exponentials without a maximum, in float16 |
# | `"no rescale"` | the accumulator is not rescaled when the maximum rises |
# | `"arrival order"` | blocks are merged as they happen to arrive |
#
# Here is one run of each. You are graded on others: other seeds, lengths, head dims, gains and slopes, other `ranks`. They are drawn so
# that luck decides nothing. On plain inputs, what does not depend on P stays within 20 % of its first error; what grows ends
# at 2.5 times or more, what falls at half or less. Two faults whose curves have the same shape differ in level: by 1.5 times or more, on plain or
# on large inputs.

# %%
examples = {name: error_curves.curves(name, seed=10, gain=12.0) for name in error_curves.FAULTS}
show(
    error_curves.fault_figure(error_curves.RANKS, examples),
    error_curves.describe_faults(error_curves.RANKS, examples),
)

# %% [markdown]
# `error_curves.curves("bf16 out", (1, 3, 9), seed=3, D=32)` makes more. Look at a few before you write.


# %% grade="10.diagnose"
def diagnose(ranks, errors):
    """Return the name of the fault that these error curves show."""
    # BEGIN SOLUTION what is no rounding first; then growth, then level
    plain, large, sloped = (np.asarray(errors[name]) for name in ("plain", "large", "sloped"))
    if not np.isfinite([plain, large, sloped]).all():
        return "fp16 overflow"
    if np.max(errors["repeat"]) > 0:
        return "arrival order"
    if sloped.max() > 0.1:
        return "no rescale"
    growth = plain[-1] / plain[0]
    if growth < 0.7:
        return "bf16 accumulator"
    if growth > 1.5:
        return "bf16 lse" if plain[1] > 4e-3 or growth > 7 else "bf16 out"
    return "bf16 q" if large[0] > 2.5e-3 else "sound"
    # END SOLUTION


# %%
check("10.diagnose")

# %% [markdown]
# Stuck, here or above? Each call shows one rung more: a question, a direction, a line of mathematics.

# %% [markdown]
# Stuck? `hint("10.diagnose")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## All of it at once
#
# Your `fold` on real parts, judged by your `accept` and measured by your `relative_error`.

# %%
q, k, v = error_curves.inputs("plain", 4)
scores = q @ k.T / 8
lses = torch.stack([part.logsumexp(-1) for part in scores.chunk(16, -1)])
outs = torch.stack(
    [part.softmax(-1) @ values for part, values in zip(scores.chunk(16, -1), v.chunk(16), strict=True)]
)
nothing = torch.zeros_like(q), torch.full_like(lses[0], -math.inf)
try:
    out, lse = fold(*nothing, outs, lses)
    truth = torch.from_numpy(error_curves.truth(q, k, v))
    print("16 float32 parts:", accept(out, q, k, v), "  error below 1e-6:", relative_error(out, truth) < 1e-6)
    print("rounded to bfloat16 once, as float32:", accept(out.bfloat16(), q, k, v))
except NotImplementedError as missing:
    print("not written yet:", missing)

# %% [markdown]
# `ringlab grade exercises/10_numerics.ipynb` runs the hidden checks as well. Lesson 16 hands you whole implementations to diagnose.
