# %% [markdown]
# # 02 · Online softmax
#
# **Afterwards you can** compute a softmax in pieces that you never see together, derive and write the merge of two
# partial results (out, lse), name three ways in which it goes wrong, and say how one can tell whether ring attention is
# exact.
#
# **You need first** [lesson 01](01_naive_attention.ipynb): softmax with its maximum subtracted, lse, and the row that
# sees no key. **Minutes** 60.
#
# Lesson 01 ended at a wall: the S × S scores do not fit, and nobody needs them anyway. So we would like to go through the
# keys block by block, use each block, and forget it. On a ring we have no choice: the keys pass by,
# one rank's block after another, and do not wait.
#
# But softmax divides by a sum over **all** keys. How can you divide by a sum whose terms you have not all seen yet? Two
# papers answer this: *Online normalizer calculation for softmax* (arXiv 1805.02867) for softmax, and *Self-attention does
# not need O(n²) memory* (arXiv 2112.05682) for attention.

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
# ## An example on paper
#
# One query meets three keys. The scores are 2, 1 and 3, the values 10, 20 and 30. The first two keys arrive together, the
# third comes later. We turn each block into an attention result of its own, as if there were no other keys.


# %%
def block_attention(scores, values):
    lse = torch.logsumexp(scores, -1)
    return torch.softmax(scores, -1) @ values, lse


scores, values = torch.tensor([2.0, 1.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])
out_a, lse_a = block_attention(scores[:2], values[:2])
out_b, lse_b = block_attention(scores[2:], values[2:])
print(f"a: out {out_a:.3f}, lse {lse_a:.3f}\nb: out {out_b:.3f}, lse {lse_b:.3f}")

# %% [markdown]
# We have two outputs and want one: the output over all three keys. Two averages suggest themselves.

# %%
whole, _ = block_attention(scores, values)
print(f"the mean of both outs              {(out_a + out_b) / 2:.3f}")
print(f"weighted by the number of keys     {(2 * out_a + out_b) / 3:.3f}")
print(f"all three keys, which is the truth {whole:.3f}")

# %% [markdown]
# Both averages are wrong. Block b has only one key, and yet it counts more than the two keys of block a together. What
# counts is neither the number of blocks nor the number of keys, but how much **softmax mass** the keys of a block have:
# the sum of their $e^{s_j}$. We have kept its logarithm, which is lse. Here is an extreme case.

# %% tags=["nbval-ignore-output"]
predict(
    "02.outweigh",
    "1,000,000 keys with score 0 meet one other key. Which score gives it half of the weight?",
)

# %%
million = torch.zeros(1_000_000)
_, lse_million = block_attention(million, million)  # the values do not matter here
compare("02.outweigh", round(lse_million.item(), 1))
weights = torch.softmax(torch.cat([million, lse_million[None]]), -1)
print(f"weight of the single key: {weights[-1]:.2f}")

# %% [markdown]
# The mass of a million keys with score 0 is 1,000,000, and its logarithm is only 13.8. This gives lse a meaning: **lse is the
# score that one key needs in order to weigh as much as the whole block.** And a partial result behaves like one such
# key, with score lse and value out.
#
# ## The merge, derived
#
# Write $Z_a = \sum_{j \in a} e^{s_j}$ for the mass of block $a$. Draw each block of our example as a bar, as wide as its
# mass and as high as its out:

# %%
outs, masses = [out_a.item(), out_b.item()], [lse_a.exp().item(), lse_b.exp().item()]
show(online_softmax.merge_figure(outs, masses), online_softmax.describe_merge(outs, masses))

# %% [markdown]
# The area of a bar is out · Z. A block's out was divided by its mass, so the area undoes the division:
# $\mathrm{out}_a \, Z_a = \sum_{j \in a} e^{s_j} v_j$. Sums over different keys may simply be added. So we add the areas,
# and divide once by the common mass:
#
# $$ \mathrm{out} = \frac{\mathrm{out}_a\,Z_a + \mathrm{out}_b\,Z_b}{Z_a + Z_b} $$
#
# The black line is this out: the part of b above it would just fill the gap above a.
#
# Masses overflow, but their logarithms do not. So we write each mass as $Z = e^{\mathrm{lse}}$:
#
# $$ \mathrm{lse} = \ln\!\left(e^{\mathrm{lse}_a} + e^{\mathrm{lse}_b}\right), \qquad
#    \mathrm{out} = \mathrm{out}_a\, e^{\mathrm{lse}_a - \mathrm{lse}} + \mathrm{out}_b\, e^{\mathrm{lse}_b - \mathrm{lse}} $$
#
# That is all. Both exponents are negative or zero, and the two weights add up to one.

# %%
def merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = torch.exp(lse_a - lse), torch.exp(lse_b - lse)
    return out_a * weight_a[..., None] + out_b * weight_b[..., None], lse


# As one row with D = 1: out has the shape (1, 1), lse the shape (1,).
out, lse = merge(out_a[None, None], lse_a[None], out_b[None, None], lse_b[None])
weight_b = torch.exp(lse_b - lse).item()
print(f"weights {1 - weight_b:.3f} and {weight_b:.3f}")
print(f"merged: out {out.item():.3f}, lse {lse.item():.3f}")

# %% [markdown]
# The merge gives 24.205, as all three keys do together. The single key of block b has two thirds of the weight.
#
# ## Is ring attention an approximation?
#
# Lesson 00 claimed that it is not. But ring attention merges pieces from machines that never see the whole, and many
# methods for long contexts *are* approximations, for example those in which each query sees only the nearest keys. How
# would one check the claim? We measure, with 4,096 keys in 128 blocks of 32. eps is the step from 1 to the next float32
# number.

# %%
q, k, v = torch.randn(16, 64), torch.randn(4096, 64), torch.randn(4096, 64)
truth = oracle.attention(q[None, None], k[None, None], v[None, None])


def attend(q, keys, values):
    return block_attention(q @ keys.T / q.shape[-1] ** 0.5, values)


def in_blocks(q, k, v, size):
    first, *rest = zip(k.split(size), v.split(size), strict=True)
    state = attend(q, *first)
    for keys, values in rest:
        state = merge(*state, *attend(q, keys, values))
    return state


def error(out):
    return np.abs(out.double().numpy() - truth.out[0, 0]).max() / np.abs(truth.out).max()


# %% tags=["nbval-ignore-output"]
eps = torch.finfo(torch.float32).eps
one, many = error(in_blocks(q, k, v, 4096)[0]), error(in_blocks(q, k, v, 32)[0])
print(f"relative error: one block {one:.1e}, 128 blocks {many:.1e}")
print(f"in units of float32's eps: {one / eps:.1f} and {many / eps:.1f}")

# %% [markdown]
# Both errors are tiny, but 128 blocks are several times worse than one. Does the cut itself cost that accuracy, or is
# it only rounding? float64 can tell.

# %% tags=["nbval-ignore-output"]
predict(
    "02.float64",
    "We repeat the 128 blocks in float64. By how much does their error shrink?",
    choices=["not at all", "about 2 times", "about 1,000 times", "more than a million times"],
)

# %%
in_float64 = error(in_blocks(q.double(), k.double(), v.double(), 32)[0])
factor = many / in_float64
limits = {"not at all": 1.5, "about 2 times": 10, "about 1,000 times": 1e6}
found = [name for name, limit in limits.items() if factor < limit]
compare("02.float64", found[0] if found else "more than a million times")

# %% tags=["nbval-ignore-output"]
eps64 = torch.finfo(torch.float64).eps
print(f"error in float64 {in_float64:.1e}: smaller by a factor of {factor:.1e}")
print(f"eps is smaller by a factor of {eps / eps64:.1e}")

# %% [markdown]
# It is only rounding: the error of an approximation would stay in float64, and this one shrinks with eps. No step of the
# derivation left anything out. **Ring attention is not an approximation.**
#
# ## Block by block, with a running maximum
#
# Kernels, the programs that run on a GPU, prefer another form of the same sum. They carry the maximum $m$, the sum
# $\mathrm{total} = \sum e^{s-m}$ and the undivided $\mathrm{acc} = \sum e^{s-m} v$, and divide once at the end. When a
# block brings a larger maximum, all older terms were measured against the wrong number. One factor repairs them:
#
# $$ m' = \max(m, \max_j s_j), \quad \mathrm{total}' = \mathrm{total}\; e^{m-m'} + \sum_j e^{s_j-m'}, \quad
#    \mathrm{acc}' = \mathrm{acc}\; e^{m-m'} + \sum_j e^{s_j-m'} v_j $$
#
# The picture follows one query through 24 keys in six blocks. Left are the scores; the line is $m$. Right is the running
# sum after each block; colours and hatches show which block each part came from. Where the line steps up, all older parts
# shrink **together**.

# %%
picture_scores, picture_values = online_softmax.example()
steps = online_softmax.stream(picture_scores, picture_values, block=4)
picture = online_softmax.stream_figure(picture_scores, picture_values, block=4)
show(picture, online_softmax.describe(steps))

# %% tags=["nbval-ignore-output"]
online_softmax.play(picture_scores, picture_values, block=4)

# %% [markdown]
# Here is the same in code, for one query. It starts with a state that has seen nothing: maximum $-\infty$, sum 0,
# accumulator 0. If the first block has a visible key, it needs no special case: the factor $e^{-\infty - m'}$ is 0. If all
# its keys are hidden, $m'$ is $-\infty$ as well, and the difference has no value; the exercise asks you for that case.

# %%
m, total, acc, states = -math.inf, 0.0, 0.0, []
for s, x in zip(picture_scores.reshape(-1, 4), picture_values.reshape(-1, 4), strict=True):
    new = max(m, s.max())
    factor, powers = np.exp(m - new), np.exp(s - new)
    m, total, acc = new, total * factor + powers.sum(), acc * factor + powers @ x
    states.append((m, factor, total, acc / total))
drawn = [(step.maximum, step.factor, step.total, step.out) for step in steps]
print("each block as in the picture:", np.allclose(states, drawn))
print(f"in the end: m {m:.1f}, sum {total:.2f}, out {acc / total:.3f}")
at_once, lse = block_attention(torch.tensor(picture_scores), torch.tensor(picture_values))
print(f"at once: out {at_once:.3f}, lse {lse:.3f} = m + ln(sum) {m + math.log(total):.3f}")

# %% [markdown]
# These are two forms of one idea. $(m, \mathrm{total}, \mathrm{acc})$ is cheap to update, since it puts off the division;
# a kernel keeps it in registers, the fastest memory of the chip. $(\mathrm{out}, \mathrm{lse})$ needs one number less per
# query, and means something by itself; a kernel returns it, and a rank keeps it from block to block. One form turns into
# the other:
# $\mathrm{out} = \mathrm{acc}/\mathrm{total}$ and $\mathrm{lse} = m + \ln \mathrm{total}$.

# %% [markdown]
# ## Any order, any tree
#
# Which properties must a merge have so that a ring may use it? Ranks see the blocks in different orders, some receive a
# block in which a row sees no key, and a tree of merges should give the same as a chain:

# %%
show(online_softmax.orders_figure(), online_softmax.describe_orders())

# %% [markdown]
# So we want three laws. A dot stands for the merge:
#
# - **associative:** $(a \cdot b) \cdot c = a \cdot (b \cdot c)$: any grouping gives the same;
# - **commutative:** $a \cdot b = b \cdot a$: any order gives the same;
# - **identity:** there is an $e$ with $a \cdot e = a$: a block in which a row sees no key changes nothing. This $e$ is the
#   result of a row that sees no key: out 0, lse $-\infty$.
#
# In mathematics the merge keeps all three laws. In float32 every operation rounds. Which laws survive that?

# %% tags=["nbval-ignore-output"]
predict(
    "02.bits",
    "Which laws hold bit for bit in float32?",
    choices=["all three", "commutative and identity", "associative and identity", "none"],
)

# %%
a, b, c = (attend(q, k[start : start + 32], v[start : start + 32]) for start in (0, 32, 64))
identity = torch.zeros(16, 64), torch.full((16,), -math.inf)
laws = {
    "associative": (merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c))),
    "commutative": (merge(*a, *b), merge(*b, *a)),
    "identity": (merge(*a, *identity), a),
}
bits = {name: all(map(torch.equal, left, right)) for name, (left, right) in laws.items()}
for name, (left, right) in laws.items():
    near = torch.allclose(left[0], right[0], atol=1e-6)
    print(f"{name:12} up to rounding {near}, bit for bit {bits[name]}")
kept = " and ".join(name for name, equal in bits.items() if equal)
compare("02.bits", "all three" if all(bits.values()) else kept or "none")

# %% [markdown]
# Floating-point addition is commutative: $x + y$ and $y + x$ are rounded alike. It is not associative. The identity has the
# weight exactly 0 and leaves the other part the weight exactly 1, so nothing is rounded.
#
# So exact in mathematics does not mean **bit for bit** equal: in float32, one block and 128 blocks differ in their last
# digits. To get the same bits on every run, fix which parts are merged with which; another order of arrival usually
# changes that. With a fused multiply-add (FMA), as in many kernels, even swapping a and b matters: only one of the two
# products is rounded before the addition.
#
# One case is left. In a tree, two blocks may be merged with each other that both lie in the future of a row, so that it
# sees nothing in either. By the third law, identity · identity should be the identity. What does our `merge` return?

# %% tags=["nbval-ignore-output"]
predict(
    "02.nothing",
    "What is merge(identity, identity)?",
    choices=["the identity", "out NaN, lse -inf", "out 0, lse NaN", "both NaN"],
)

# %%
nothing = merge(*identity, *identity)
is_nan = tuple(bool(part.isnan().all()) for part in nothing)
names = {(True, False): "out NaN, lse -inf", (False, True): "out 0, lse NaN"}
compare("02.nothing", names.get(is_nan, "both NaN" if all(is_nan) else "the identity"))
print("out:", nothing[0][0, 0].item(), " lse:", nothing[1][0].item())

# %% [markdown]
# The lse is right, since `logaddexp` handles this case. But the weight is $e^{-\infty - (-\infty)}$, and that difference has
# no value. Worse, a NaN in the state stays there, since everything that is merged with it becomes NaN too.
#
# ## Three traps
#
# **1. (−∞, −∞).** You have just seen it. A part without mass must get weight 0 explicitly.
#
# **2. The sigmoid form.** With $\sigma(x) = 1/(1+e^{-x})$ one can write $\mathrm{lse} = \mathrm{lse}_a - \ln
# \sigma(\mathrm{lse}_a - \mathrm{lse}_b)$, and $\mathrm{out}_a - \sigma(\mathrm{lse}_b - \mathrm{lse}_a)(\mathrm{out}_a -
# \mathrm{out}_b)$ for out. It is elegant, the package ring-flash-attention uses it, and it fails whenever side $a$ is
# empty: $-\infty - \ln 0 = -\infty + \infty$ has no value.
#
# The plain form, $\mathrm{lse}_a + \ln(1 + e^{\mathrm{lse}_b - \mathrm{lse}_a})$, has another fault: it overflows when
# $\mathrm{lse}_b$ is much larger than $\mathrm{lse}_a$.
#
# **3. A large finite number for −∞.** Then nothing is NaN, but a row that sees no key gets lse −10⁹ and the mean of V.

# %%
def sigmoid_form(out_a, lse_a, out_b, lse_b):
    out = out_a - torch.sigmoid(lse_b - lse_a)[..., None] * (out_a - out_b)
    return out, lse_a - torch.nn.functional.logsigmoid(lse_a - lse_b)


print("2. both empty: out", sigmoid_form(*identity, *identity)[0][0, 0].item())
print("   a is empty: lse", sigmoid_form(*identity, *a)[1][0].item())
zero, hundred = torch.tensor(0.0), torch.tensor(100.0)
print("   log(1 + exp(100)) in float32:", torch.log(1 + torch.exp(hundred)).item())
print("   logaddexp(0, 100):", torch.logaddexp(zero, hundred).item())
finite = block_attention(torch.full((4,), -1e9), torch.tensor([1.0, 2.0, 3.0, 4.0]))
print(f"3. a row that sees no key: out {finite[0].item()}, lse {finite[1].item():.0e}")

# %% [markdown]
# Three habits avoid all three: use $-\infty$ and nothing else for hidden scores, build lse with `logaddexp`, and give
# weight 0 to every part with lse $-\infty$. `ringlab.merge` does the same.


# %%
def merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.exp(lse_a - lse).masked_fill(lse_a == -math.inf, 0.0)
    weight_b = torch.exp(lse_b - lse).masked_fill(lse_b == -math.inf, 0.0)
    return out_a * weight_a[..., None] + out_b * weight_b[..., None], lse


Partial = reference.Partial
theirs, mine = reference.merge(Partial(*a), Partial(*b)), merge(*a, *b)
same = torch.allclose(mine[0], theirs.out, atol=1e-6), torch.allclose(mine[1], theirs.lse)
print("equal to ringlab's: out", same[0], " lse", same[1])
out, lse = merge(*identity, *identity)
print("both empty: out", out[0, 0].item(), " lse", lse[0].item())

# %% [markdown]
# From here on the lessons import `ringlab.merge`.
#
# ## The dtype of the state
#
# Models run in bfloat16, which has 8 significant bits. That is good enough for the blocks. Is it good enough for the state
# that is carried from block to block? We compute every block in float32, round its out to bfloat16 once, and merge in
# three ways: with the state in float32, with out rounded after every merge, and with lse rounded after every merge.


# %%
def rounded(x, to_bf16):
    return x.bfloat16().float() if to_bf16 else x


def growth(P, bf16_out=False, bf16_lse=False):
    state = identity
    for keys, values in zip(k.chunk(P), v.chunk(P), strict=True):
        out, lse = attend(q, keys, values)
        out, lse = merge(*state, rounded(out, True), lse)
        state = rounded(out, bf16_out), rounded(lse, bf16_lse)
    return error(state[0])


# %% tags=["nbval-ignore-output"]
predict(
    "02.bf16",
    "From 2 blocks to 32: which rounding lets the error grow?",
    choices=["neither", "only that of out", "only that of lse", "both, out more", "both, lse more"],
)

# %% tags=["nbval-ignore-output"]
print("blocks   fp32 state   bf16 out   bf16 lse")
for P in (2, 4, 8, 16, 32):
    errors = growth(P), growth(P, bf16_out=True), growth(P, bf16_lse=True)
    print("{:6}   {:10.1e}   {:8.1e}   {:8.1e}".format(P, *errors))

# %%
out_factor = growth(32, bf16_out=True) / growth(2, bf16_out=True)
lse_factor = growth(32, bf16_lse=True) / growth(2, bf16_lse=True)
print(f"the error grows {out_factor:.1f} times with out, {lse_factor:.1f} times with lse in bf16")
harmful = [factor for factor in (out_factor, lse_factor) if factor > 1.2]
worse = "lse" if lse_factor > out_factor else "out"
found = ["neither", f"only that of {worse}", f"both, {worse} more"][len(harmful)]
compare("02.bf16", found)
typical = float(truth.lse.mean())
spacing = torch.finfo(torch.bfloat16).eps * 2 ** math.floor(math.log2(typical))
print(f"an lse of {typical:.1f} in bfloat16 is off by up to {spacing / 2:.3f}")

# %% [markdown]
# The column *fp32 state* stays flat: each block was rounded once, and these errors average out. A state in bfloat16 is
# rounded again at every merge. Rounding lse is worse, because lse is an **exponent**: an absolute error of a few
# hundredths in lse is a relative error of a few hundredths in the weight of everything merged so far. This gives the
# rule for the rest of the course: **out and lse stay in float32 at least**, whatever the dtype of the blocks, and only
# the finished result is rounded.
#
# ## Recap
#
# - A partial result is (out, lse): the attention over some keys, and the logarithm of their softmax mass.
# - Merge: $\mathrm{lse} = \mathrm{logaddexp}(\mathrm{lse}_a, \mathrm{lse}_b)$, and each out gets the weight
#   $e^{\text{its lse} - \mathrm{lse}}$. The merge is exact; averages are not.
# - The running maximum does the same inside a kernel. The factor $e^{m - m'}$ shrinks all older terms, in total and in acc.
# - Up to rounding, the merge is associative and commutative, with the identity (0, $-\infty$). Any order and any tree
#   will do, but equal bits need a fixed grouping, and in some kernels a fixed order.
# - Three traps: both sides empty, the sigmoid form, finite masks. And a fourth: a state in bfloat16.

# %% [markdown]
# ## Self-check
#
# Answer without scrolling up, then open the answer.
#
# <details><summary>1. A block's scores are all 5 larger than they should be. Which part of (out, lse) is wrong, and when does
# the error show?</summary>Only lse, by 5: the softmax within the block does not change. The error shows at the first merge
# with another block that has mass: there the block gets too much weight.</details>
#
# <details><summary>2. Two ranks merge the same blocks in different orders. Why do their results agree to six digits, but
# not in all bits?</summary>The merge is associative and commutative in mathematics. Floating-point addition is not
# associative, so another grouping rounds differently.</details>
#
# <details><summary>3. Someone updates an output o that is already divided: o' = (o · e^(m − m') + Σ e^(s − m') v over the
# new block) / total'. Which factor is missing?</summary>The old total, by which o must be multiplied first.</details>
#
# <details><summary>4. How many numbers per query and head must a rank keep between two blocks, for head dim
# 128?</summary>out and lse, D + 1 = 129 numbers.</details>

# %%
D = 128
print("out and lse:", D + 1, "numbers; all scores of a row at S = 131,072:", 131_072)

# %% [markdown]
# **Now you:** in [exercise 02](../exercises/02_online_softmax.ipynb) you write `merge` and a streaming softmax.
