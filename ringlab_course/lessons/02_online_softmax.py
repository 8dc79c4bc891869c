# %% [markdown]
# # 02 · Online softmax
#
# **Afterwards you can** compute a softmax in pieces that you never see together, derive and write the merge of two partial
# results (out, lse), name the four ways in which it goes wrong, and say why ring attention is exact.
#
# **You need first** [lesson 01](01_naive_attention.ipynb): softmax with its maximum taken away, lse, and the row that
# sees no key. **Minutes** 60.
#
# Lesson 01 ended at a wall: the S × S scores do not fit, and nobody wants them anyway. So we would like to go through the
# keys block by block, use each block, and forget it. On a ring that is not a wish but the situation: the keys come by,
# one rank's block after the other, and do not wait.
#
# But softmax divides by a sum over **all** keys. How can you divide by what you have not seen yet?

# %%
import math

import numpy as np
import torch

from ringlab import merge as reference
from ringlab import oracle
from ringlab_course import compare, predict
from ringlab_course.figures import online_softmax
from ringlab.viz.style import show

torch.manual_seed(2)
torch.set_num_threads(1)

# %% [markdown]
# ## An example for paper
#
# One query, three keys. The scores are 2, 1 and 3, the values 10, 20 and 30. The first two keys arrive together, the third
# comes later. Each block is turned into an attention result of its own, as if it were all there is.


# %%
def block_attention(scores, values):
    lse = torch.logsumexp(scores, -1)
    return torch.softmax(scores, -1) @ values, lse


scores, values = torch.tensor([2.0, 1.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])
out_a, lse_a = block_attention(scores[:2], values[:2])
out_b, lse_b = block_attention(scores[2:], values[2:])
print(f"a: out {out_a:.3f}, lse {lse_a:.3f}\nb: out {out_b:.3f}, lse {lse_b:.3f}")

# %% [markdown]
# Two outputs, and we want one. Guess before you calculate: what is the output over all three keys?

# %% tags=["nbval-ignore-output"]
predict(
    "02.average",
    "out over all three keys is …",
    choices=["the mean of the two outs", "their mean weighted by the number of keys", "neither"],
)

# %%
whole, _ = block_attention(scores, values)
guesses = {
    "the mean of the two outs": (out_a + out_b) / 2,
    "their mean weighted by the number of keys": (2 * out_a + out_b) / 3,
}
for name, guess in guesses.items():
    print(f"{name:42} {guess:.3f}")
print(f"{'all three keys':42} {whole:.3f}")
right = [name for name, guess in guesses.items() if abs(guess - whole) < 1e-3]
compare("02.average", right[0] if right else "neither")

# %% [markdown]
# Both averages are wrong, and no other fixed weights would do. Block b has one key only, and yet it pulls harder than
# the two others together. What counts is neither the number of blocks nor the number of keys, but how much **softmax
# mass** the keys of a block have. And that we kept: its logarithm is lse.
#
# ## The merge, derived
#
# Write $\ell_a = \sum_{j \in a} e^{s_j}$ for the mass of block $a$. Its output was divided by that mass, so we can undo the
# division: $\mathrm{out}_a \, \ell_a = \sum_{j \in a} e^{s_j} v_j$. Sums over different keys may simply be added. So
# multiply back, add, and divide once by the common mass:
#
# $$ \mathrm{out} = \frac{\mathrm{out}_a\,\ell_a + \mathrm{out}_b\,\ell_b}{\ell_a + \ell_b} $$
#
# Now write masses as $\ell = e^{L}$, where $L$ is the lse (in formulas of this lesson only; as an axis, L stays a number
# of tokens), because masses overflow and their logarithms do not:
#
# $$ L = \ln\!\left(e^{L_a} + e^{L_b}\right), \qquad
#    \mathrm{out} = \mathrm{out}_a\, e^{L_a - L} + \mathrm{out}_b\, e^{L_b - L} $$
#
# That is all. Both exponents are negative or zero, the two weights add up to one, and nothing was approximated: every step
# is school algebra.


# %%
def merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = torch.exp(lse_a - lse), torch.exp(lse_b - lse)
    return out_a * weight_a[..., None] + out_b * weight_b[..., None], lse


out, lse = merge(out_a[None, None], lse_a[None], out_b[None, None], lse_b[None])
weight_b = torch.exp(lse_b - lse).item()
print(f"weights {1 - weight_b:.3f} and {weight_b:.3f}, merged out {out.item():.3f}, lse {lse.item():.3f}")

# %% [markdown]
# So out is 24.205, with two thirds of the weight for the single key of block b.
#
# ## "Ring attention is an approximation"
#
# It sounds plausible: pieces, merged afterwards, from machines that never see everything. Many methods for long contexts
# *are* approximations: windows, low rank, hashing. Is this one, too? Let us measure, 4,096 keys in 64 blocks.

# %%
q, k, v = torch.randn(16, 64), torch.randn(4096, 64), torch.randn(4096, 64)
truth = oracle.attention(q[None, None], k[None, None], v[None, None])


def in_blocks(q, k, v, size):
    state = None
    for keys, values in zip(k.split(size), v.split(size), strict=True):
        part = block_attention(q @ keys.T / q.shape[-1] ** 0.5, values)
        state = part if state is None else merge(*state, *part)
    return state


def error(out):
    return np.abs(out.double().numpy() - truth.out[0, 0]).max() / np.abs(truth.out).max()


# %% tags=["nbval-ignore-output"]
predict(
    "02.exact",
    "64 blocks in float32: how large is the relative error against the truth?",
    choices=["above 0.01", "between 0.01 and 0.00001", "below 0.00001"],
)


# %%
def magnitude(x):
    return "above 0.01" if x > 1e-2 else "between 0.01 and 0.00001" if x > 1e-5 else "below 0.00001"


one, many = error(in_blocks(q, k, v, 4096)[0]), error(in_blocks(q, k, v, 64)[0])
exact = error(in_blocks(q.double(), k.double(), v.double(), 64)[0])
compare("02.exact", magnitude(many))
print("float32: one block below 0.00001:", one < 1e-5, "  64 blocks:", many < 1e-5)
print("float64: 64 blocks below 1e-14:", exact < 1e-14)
print(
    "64 blocks equal one block bit for bit:",
    torch.equal(in_blocks(q, k, v, 4096)[0], in_blocks(q, k, v, 64)[0]),
)

# %% tags=["nbval-ignore-output"]
eps = torch.finfo(torch.float32).eps
print(f"error in units of float32's eps: one block {one / eps:.1f}, 64 blocks {many / eps:.1f}")

# %% [markdown]
# It is none. The merge is an identity, so cutting cannot cost accuracy beyond the order in which floating-point numbers
# are added. eps is one unit in the last digit of float32. One block is off by a few of them; every merge rounds its
# weights, so 64 blocks are off by several times as many. They cost nothing else.
#
# Go to float64 and the error falls with the dtype, as no approximation's would. The last line is the other half of the
# truth: exact in mathematics does not mean **bit for bit** equal. Floating-point addition is not associative; another
# order gives another last digit. Whoever wants the same bits on every run has to fix the order of the merges.
#
# ## Block by block, with a running maximum
#
# The merge is one way to write this. Kernels prefer another, with the same content: carry the maximum $m$, the sum
# $\ell = \sum e^{s-m}$ and the undivided $a = \sum e^{s-m} v$, and divide once at the end. (This $\ell$ is the mass from
# above, measured against $m$: the mass itself is $\ell\, e^{m}$.) When a block brings a larger maximum, everything old
# was measured against the wrong number. One factor repairs it:
#
# $$ m' = \max(m, \max_j s_j), \quad \ell' = \ell\, e^{m-m'} + \sum_j e^{s_j-m'}, \quad
#    a' = a\, e^{m-m'} + \sum_j e^{s_j-m'} v_j $$
#
# The picture follows one query through 24 keys in six blocks. Left: the scores; the black line is $m$. Middle: the running
# sum, coloured by the block that each part came from. Where the line steps up, all that is older shrinks, **together**.
# Right: the output, wrong until the last block, and then exact.

# %%
picture_scores, picture_values = online_softmax.example()
steps = online_softmax.stream(picture_scores, picture_values, block=4)
show(online_softmax.stream_figure(picture_scores, picture_values, block=4), online_softmax.describe(steps))

# %% tags=["nbval-ignore-output"]
online_softmax.play(picture_scores, picture_values, block=4)

# %% [markdown]
# Here is the same in code, for one query. Start with a state that has seen nothing: maximum $-\infty$, sum 0, accumulator 0.
# The first block then needs no special case, because $e^{-\infty - m'} = 0$ wipes out what was never there.

# %%
m, total, acc = -math.inf, 0.0, 0.0
for s, x in zip(picture_scores.reshape(-1, 4), picture_values.reshape(-1, 4), strict=True):
    new = max(m, s.max())
    factor, powers = np.exp(m - new), np.exp(s - new)
    m, total, acc = new, total * factor + powers.sum(), acc * factor + powers @ x
    print(f"m {m:4.1f}   old times {factor:.2f}   sum {total:.2f}   out so far {acc / total:6.3f}")
at_once, lse = block_attention(torch.tensor(picture_scores), torch.tensor(picture_values))
print(f"at once: out {at_once:.3f}, lse {lse:.3f} = m + ln(sum) {m + math.log(total):.3f}")

# %% [markdown]
# Two forms, then, of one idea. $(m, \ell, a)$ is cheap to update, since it puts off the division; a kernel keeps it in
# registers. $(\mathrm{out}, \mathrm{lse})$ is smaller and means something by itself; it is what leaves a kernel and what a
# ring carries. One turns into the other with $\mathrm{out} = a/\ell$ and $\mathrm{lse} = m + \ln \ell$.
#
# In the picture, watch blocks 3 and 4. A factor of 1 means that the maximum stayed, and old and new are simply added.
#
# How often does it step up? Suppose 1,024 blocks whose maxima come in random order.

# %% tags=["nbval-ignore-output"]
predict(
    "02.rescales",
    "1,024 blocks in random order: how often, on average, does a block set a new maximum?",
    unit="times",
)

# %%
rng = np.random.default_rng(0)
maxima = rng.standard_normal((2000, 1024))
records = (maxima >= np.maximum.accumulate(maxima, axis=1)).sum(axis=1)
compare("02.rescales", round(float(records.mean()), 1))
print("1 + 1/2 + 1/3 + … + 1/1024 =", round(float((1 / np.arange(1, 1025)).sum()), 1))

# %% [markdown]
# Block $n$ holds the record with probability $1/n$, so the average is a harmonic sum, which grows like a logarithm. Nearly
# all rescalings multiply by one; the newest kernels skip them.
#
# ## A monoid
#
# What must a merge satisfy so that a ring may use it? Ranks see the blocks in different orders, some start with a block
# that is wholly masked, and a tree of merges should do as well as a chain. Three laws:
#
# - **associative:** $(a \cdot b) \cdot c = a \cdot (b \cdot c)$: any tree will do;
# - **commutative:** $a \cdot b = b \cdot a$: any order will do;
# - **identity:** there is an $e$ with $a \cdot e = a$: a block that shows nothing changes nothing.
#
# Such a thing is a commutative monoid, as addition is, or max. What is its identity? No key seen: out 0, lse $-\infty$.

# %%
a, b, c = (
    block_attention(q @ keys.T / 8, values)
    for keys, values in zip(k[:96].split(32), v[:96].split(32), strict=True)
)
left, right = merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c))
identity = torch.zeros(16, 64), torch.full((16,), -math.inf)
print("associative", torch.allclose(left[0], right[0], atol=1e-6))
print("commutative", torch.allclose(merge(*a, *b)[0], merge(*b, *a)[0], atol=1e-6))
print("identity   ", torch.equal(merge(*a, *identity)[0], a[0]), torch.equal(merge(*identity, *a)[0], a[0]))

# %% [markdown]
# Up to rounding, all three hold. One case is left, and it is the one that bites: under a causal mask a row may see nothing
# in the first block, **and** nothing in the second.

# %% tags=["nbval-ignore-output"]
predict("02.nothing", "What is merge(identity, identity)?", choices=["the identity", "NaN", "an error"])

# %%
nothing = merge(*identity, *identity)
compare("02.nothing", "NaN" if nothing[0].isnan().all() else "the identity")
print("its lse:", nothing[1][0].item())

# %% [markdown]
# The lse is right, since `logaddexp` knows this case. But the weight is $e^{-\infty - (-\infty)}$, and that difference has
# no value. Worse: a NaN in the state is there for good, since everything that is merged with it becomes NaN too.
#
# ## Four traps
#
# **1. (−∞, −∞).** Just seen. A part without mass has weight 0, so say so.
#
# **2. The sigmoid form.** With $\sigma(x) = 1/(1+e^{-x})$ the merge becomes $\mathrm{out}_a - \sigma(L_b - L_a)(\mathrm{out}_a -
# \mathrm{out}_b)$, $L = L_a - \ln \sigma(L_a - L_b)$. It is elegant, it is in use, and it fails whenever side $a$ is empty:
# with $L_a = -\infty$ the second formula says $-\infty - \ln 0 = -\infty + \infty$, which has no value.
#
# **3. log(1 + exp(x)).** $L = L_a + \ln(1 + e^{L_b - L_a})$ is the same formula once more, and it overflows when $b$ is much
# larger than $a$.
#
# **4. A large finite number for −∞.** Then nothing is NaN, and a row that sees nothing gets lse −10⁹ and the mean of V.


# %%
def sigmoid_form(out_a, lse_a, out_b, lse_b):
    out = out_a - torch.sigmoid(lse_b - lse_a)[..., None] * (out_a - out_b)
    return out, lse_a - torch.nn.functional.logsigmoid(lse_a - lse_b)


print("2. both empty: out", sigmoid_form(*identity, *identity)[0][0, 0].item())
print("   a is empty: lse", sigmoid_form(*identity, *a)[1][0].item())
print(
    "3. log(1 + exp(100)) in float32:",
    torch.log(1 + torch.exp(torch.tensor(100.0))).item(),
    " logaddexp:",
    torch.logaddexp(torch.tensor(0.0), torch.tensor(100.0)).item(),
)
finite = block_attention(torch.full((4,), -1e9), torch.tensor([1.0, 2.0, 3.0, 4.0]))
print(f"4. a row that sees no key: out {finite[0].item()}, lse {finite[1].item():.0e}")

# %% [markdown]
# One remedy serves against all four: let hidden scores be $-\infty$ and nothing else, build lse with `logaddexp`, and give
# weight 0 to whatever has lse $-\infty$. That is what `ringlab.merge` does.


# %%
def merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.exp(lse_a - lse).masked_fill(lse_a == -math.inf, 0.0)
    weight_b = torch.exp(lse_b - lse).masked_fill(lse_b == -math.inf, 0.0)
    return out_a * weight_a[..., None] + out_b * weight_b[..., None], lse


Partial = reference.Partial
theirs = reference.merge(Partial(*a), Partial(*b))
mine = merge(*a, *b)
print(
    "equal to ringlab's:", torch.allclose(mine[0], theirs.out, atol=1e-6), torch.allclose(mine[1], theirs.lse)
)
empty = reference.merge(Partial(*identity), Partial(*identity))
print(
    "both empty: out",
    empty.out[0, 0].item(),
    " lse",
    empty.lse[0].item(),
    " mine",
    merge(*identity, *identity)[0][0, 0].item(),
)

# %% [markdown]
# From here on the course imports it.
#
# ## What must be float32
#
# Models run in bfloat16, with 8 significant bits. That is good enough for the blocks. Is it good enough for the state that
# is carried from block to block? We compute every block in float32, round its result once to bfloat16, and merge in three
# ways: state in float32, out rounded after every merge, lse rounded after every merge.


# %%
def rounded(x, bad):
    return x.bfloat16().float() if bad else x


def growth(P, bad_out=False, bad_lse=False):
    state = torch.zeros(16, 64), torch.full((16,), -math.inf)
    for keys, values in zip(k.chunk(P), v.chunk(P), strict=True):
        out, lse = block_attention(q @ keys.T / 8, values)
        out, lse = merge(*state, rounded(out, True), rounded(lse, bad_lse))
        state = rounded(out, bad_out), rounded(lse, bad_lse)
    return error(state[0])


# %% tags=["nbval-ignore-output"]
predict(
    "02.bf16",
    "From 2 to 32 blocks: which rounding of the state does more and more harm?",
    choices=["neither", "only out's", "only lse's", "both, out's more", "both, lse's more"],
)

# %% tags=["nbval-ignore-output"]
print("blocks   fp32 state   bf16 out   bf16 lse")
for P in (2, 4, 8, 16, 32):
    print(f"{P:6}   {growth(P):10.1e}   {growth(P, bad_out=True):8.1e}   {growth(P, bad_lse=True):8.1e}")

# %%
out_factor = growth(32, bad_out=True) / growth(32)
lse_factor = growth(32, bad_lse=True) / growth(32)
harmful = [name for name, factor in (("out's", out_factor), ("lse's", lse_factor)) if factor > 1.2]
worse = "lse's" if lse_factor > out_factor else "out's"
compare("02.bf16", f"both, {worse} more" if len(harmful) == 2 else f"only {worse}" if harmful else "neither")
typical = float(truth.lse.mean())
spacing = torch.finfo(torch.bfloat16).eps * 2 ** math.floor(math.log2(typical))
print(f"an lse of {typical:.1f} in bfloat16 is off by up to {spacing / 2:.3f}")

# %% [markdown]
# The first column stays flat: each block was rounded once, and those errors average out. A state in bfloat16 is rounded again
# at every merge. lse is the worse of the two because it stands in an **exponent**: an absolute error of a few hundredths
# in lse is a relative error of a few hundredths in a block's weight. Hence the rule for everything that follows: **out and
# lse live in float32 at least**, whatever the blocks are in, and only the finished result is rounded.
#
# ## Recap
#
# - A partial result is (out, lse): the attention over some keys, and the logarithm of their softmax mass.
# - Merge: $L = \mathrm{logaddexp}(L_a, L_b)$, and each out weighted with $e^{\text{its } L - L}$. It is exact; averages are not.
# - The running maximum is the same thing inside a kernel. What is old shrinks by $e^{m - m'}$, sum and accumulator alike.
# - (out, lse) is a commutative monoid up to rounding, its identity is (0, $-\infty$). So any order and any tree will do, but
#   equal bits need a fixed order.
# - Four traps: both sides empty, the sigmoid form, log(1 + exp), finite masks. And a fifth: a state in bfloat16.

# %% [markdown]
# ## Self-check
#
# Answer without scrolling up, then open.
#
# <details><summary>1. A block's scores are all 5 larger than they should be. Which part of (out, lse) is wrong, and when does
# anyone notice?</summary>Only lse, by 5: the softmax within the block does not change. It shows at the first merge, where the
# block gets too much weight.</details>
#
# <details><summary>2. Why can two ranks merge the same blocks in different orders and still agree to six digits, but not in
# all bits?</summary>The merge is associative and commutative in mathematics; floating-point addition rounds differently in
# every order.</details>
#
# <details><summary>3. Someone updates an output o that is already divided: o' = (o · e^(m − m') + the new block's sum) / ℓ'.
# Which factor is missing?</summary>The old sum ℓ, by which o must be multiplied back first.</details>
#
# <details><summary>4. How many numbers per query and head must a rank keep between two blocks, for head dim
# 128?</summary>out and lse; the cell below prints the count.</details>

# %%
D = 128
print("out and lse:", D + 1, "numbers; all scores of a row at S = 131,072:", 131_072)

# %% [markdown]
# **Now you:** [exercise 02](../exercises/02_online_softmax.ipynb), `merge` and a streaming softmax. Then
# [lesson 03](03_tiled_attention.ipynb) makes a whole attention layer of it, forward and backward.
