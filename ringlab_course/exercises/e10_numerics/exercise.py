# %% [markdown]
# # Exercise 10 · Find the precision bug
#
# **You build** four small instruments: a measure of error, a fold that loses nothing, a tolerance that is neither too
# wide nor too narrow, and a diagnosis from error curves.
# **You need** [lesson 10](../notebooks/10_numerics.ipynb); its first half is enough for the first two stages.
# **Minutes** 60.
#
# | stage | function | what the checks look at |
# |---|---|---|
# | 10.error | `relative_error` | units, bfloat16, zeros, NaN, −inf, shapes |
# | 10.fold | `fold` | a float32 state, rows without keys, large lse, the same bits in one batch and in two |
# | 10.accept | `accept` | many right results accepted and wrong ones rejected, in three dtypes |
# | 10.diagnose | `diagnose` | eight programs told apart by their error curves |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded. `hint("10.error")` in a
# new cell shows a question, then a direction, then a line of mathematics.
#
# **Allowed:** ringlab's oracle and `merge`, and PyTorch's attention. **Not allowed:** ringlab's blocks and rings, and
# modifying the tensors that you are given.

# %%
import math

import numpy as np
import torch

from ringlab import oracle
from ringlab_course import check, hint
from ringlab_course.figures import error_curves
from ringlab.viz.style import show

torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other

# %% [markdown]
# ## 10.error · How far off?
#
# `x` is a result of any floating dtype, `truth` the float64 truth; both are torch tensors. Return
# ‖x − truth‖ / ‖truth‖, norms over all entries, computed in float64: one float, or a tensor without dimensions.
#
# - x of another shape is infinitely wrong: return `math.inf`.
# - So is a NaN in x, an infinity on one side only, or an infinity of the other sign.
# - Where both are the same infinity, nothing is wrong (the lse of a row that sees no key is −inf). Such places enter neither
#   norm.
# - Where the rest of the truth is all 0, return ‖x‖ of the rest: 0 where nothing is left.


# %% grade="10.error"
def relative_error(x, truth):
    """Return the relative error of x as a float."""
    # BEGIN SOLUTION the error, and what cannot be subtracted
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
# `out` (L, D) and `lse` (L) are a state in float32. N parts arrive: `outs` (N, L, D), perhaps bfloat16, and `lses`
# (N, L), float32. Return the state `(out, lse)` after all of them, in float32.
#
# - (0, −inf) is a row that has seen no key: in the state, in a part, or in both.
# - lse may be as large as 1000 or as small as −1000.
# - **In order, one after the other:** folding some of the parts, and then the rest into the result, gives the same
#   *bits* as folding all at once. A ring that is interrupted and resumed must not show it.
# - Leave the tensors that you are given as they are. `from ringlab.merge import Partial, merge`, if you want them.


# %% grade="10.fold"
def fold(out, lse, outs, lses):
    """Return the state (out, lse) after the parts (outs[i], lses[i]), in their order."""
    # BEGIN SOLUTION the state after all parts
    for part_out, part_lse in zip(outs.float(), lses, strict=True):
        total = torch.logaddexp(lse, part_lse)
        safe = torch.where(total == -math.inf, 0.0, total)  # −inf − (−inf) has no value
        old, new = torch.exp(lse - safe)[:, None], torch.exp(part_lse - safe)[:, None]
        out, lse = out * old + part_out * new, total
    return out, lse
    # END SOLUTION


# %%
check("10.fold")

# %% [markdown]
# ## 10.accept · A tolerance
#
# `q` (rows, D), `k` and `v` (S, D) are float32, bfloat16 or float16. Every query sees every key, and scores are divided
# by √D. Somebody gives you `out`, always (rows, D), but perhaps in another floating dtype than q. Return True if an
# honest implementation *in the dtype of q* may have computed it, False if something is wrong with it.
#
# - Honest are: the plainest implementation, with every tensor in q's dtype; the same in another order of keys; PyTorch's
#   own attention; blocks folded in float32.
# - Wrong are: a noticeable share of the keys left out, a forgotten factor, zeros, a NaN or an infinity; for float32 inputs,
#   bfloat16 somewhere on the way; and anything eight times as far off as the plainest implementation.
# - On few keys the plainest may be right by luck. A relative error of one `eps` of the dtype is always honest, even if it is
#   eight times the plainest's or more.
# - You choose how to measure. Only the verdicts are judged, and no case is near the border.
# - `oracle.attention(q[None, None], k[None, None], v[None, None]).out[0, 0]` is the truth, a float64 NumPy array.


# %% grade="10.accept"
def accept(out, q, k, v):
    """Return whether out may be honest attention of q over k and v."""
    # BEGIN SOLUTION your verdict
    truth = oracle.attention(q[None, None], k[None, None], v[None, None]).out[0, 0]
    truth = torch.from_numpy(truth)
    plainest = torch.softmax(q @ k.T * q.shape[-1] ** -0.5, dim=-1) @ v
    allowed = max(2 * relative_error(plainest, truth), torch.finfo(q.dtype).eps)
    return relative_error(out, truth) <= allowed
    # END SOLUTION


# %%
check("10.accept")

# %% [markdown]
# ## 10.diagnose · Which bug?
#
# Somebody's blockwise attention was run in bfloat16, in P blocks for each P of `ranks` (the first is 1). `errors` is a
# dict of NumPy arrays, one error for each P. `"plain"`, `"large"` and `"sloped"` are relative errors on three kinds of
# inputs, as in the lesson, and inf where a result is not finite, which only `"fp16 overflow"` brings about. `"repeat"` is
# the relative difference of two runs on the same plain input, exactly 0 for all but `"arrival order"`. Return one of these names:
#
# | name | what is wrong |
# |---|---|
# | `"sound"` | nothing: blocks in bfloat16, state in float32 |
# | `"bf16 lse"`, `"bf16 out"` | it is rounded in the state at every merge (lse in each part, too) |
# | `"bf16 accumulator"` | inside a block, the sum over keys is rounded every 32 keys |
# | `"bf16 q"` | scale · log₂e is multiplied into q, and the product is rounded |
# | `"fp16 overflow"` | exponentials without a maximum, in float16 |
# | `"no rescale"` | the accumulator is not rescaled when the maximum rises from one block to the next |
# | `"arrival order"` | blocks are merged as they happen to arrive |
#
# Here is one run of each. Where a curve is flat, read off from them which level is too high on large scores. You are graded
# on others: other seeds, lengths, head dims, `ranks`, gains (the factor of q in the large scores) and slopes (the sloped
# scores rise from −slope to slope). They are drawn so that luck decides nothing:
#
# - On plain inputs, an error that does not depend on P stays within 20 % of its first value; one that grows ends at 2.5
#   times its first value or more; one that falls ends at half or less.
# - Two faults whose curves have the same shape differ in level by 1.5 times or more, on plain or on large inputs.

# %%
faults, P = error_curves.FAULTS, error_curves.RANKS
examples = {name: error_curves.curves(name, seed=10, gain=12.0, slope=10.0) for name in faults}
show(error_curves.fault_figure(P, examples), error_curves.describe_faults(P, examples))

# %% [markdown]
# `error_curves.curves("bf16 out", (1, 3, 9), seed=3, D=32)` makes more. Look at a few before you write.


# %% grade="10.diagnose"
def diagnose(ranks, errors):
    """Return the name of the fault that these error curves show."""
    # BEGIN SOLUTION your diagnosis
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
# Stuck? `hint("10.diagnose")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## All of it at once
#
# Your `fold` on real parts, judged by your `accept` and measured by your `relative_error`.

# %%
q, k, v = error_curves.inputs("plain", 4)
scores = q @ k.T / q.shape[-1] ** 0.5
lses = torch.stack([part.logsumexp(-1) for part in scores.chunk(16, -1)])
parts = zip(scores.chunk(16, -1), v.chunk(16), strict=True)
outs = torch.stack([part.softmax(-1) @ values for part, values in parts])
nothing = torch.zeros_like(q), torch.full_like(lses[0], -math.inf)
try:
    out, lse = fold(*nothing, outs, lses)
    truth = torch.from_numpy(error_curves.truth(q, k, v))
    small = relative_error(out, truth) < 1e-6
    print("16 float32 parts, expected True:", accept(out, q, k, v))
    print("error below 1e-6, expected True:", small)
    print("rounded to bfloat16 once, expected False:", accept(out.bfloat16(), q, k, v))
except NotImplementedError as missing:
    print("not written yet:", missing)

# %% [markdown]
# `ringlab grade exercises/10_numerics.ipynb` also runs the hidden checks. Lesson 16 gives you whole implementations to
# diagnose.
