# %% [markdown]
# # 01 · Naive attention and the S² wall
#
# **Afterwards you can** write attention in NumPy with causal masks and grouped heads, keep it correct whatever the scores
# and the mask are, and say which tensor fills the memory first, and at which length.
#
# **You need first** [lesson 00](00_start_here.ipynb), NumPy broadcasting, and to have trained a network in PyTorch once.
# **Minutes** 60.
#
# Ring attention answers one complaint: *it does not fit*. Before we spread anything over several devices, we want to know
# exactly **what** does not fit. So we build attention in the plain way (*Attention Is All You Need*, arXiv 1706.03762),
# measure every tensor that it makes, and see how each of them grows. On the way we meet three small things on which every
# later lesson relies: the mask by **position**, the **lse**, and the row that sees nothing.

# %%
import tracemalloc

import numpy as np

from ringlab import oracle
from ringlab_course import compare, predict
from ringlab_course.figures import memory_ledger
from ringlab_course.figures.memory_ledger import GB, Layer, kv_cache_bytes, readable
from ringlab.viz.style import show

rng = np.random.default_rng(1)

# %% [markdown]
# ## One query, by hand
#
# A query asks, every key answers with a score, and the output is the mean of the values, weighted by the softmax of the
# scores. Without masks, that is all. For one query $q$ and keys $k_j$ with values $v_j$:
#
# $$ s_j = \frac{q \cdot k_j}{\sqrt D}, \qquad w_j = \frac{e^{s_j}}{\sum_i e^{s_i}}, \qquad \mathrm{out} = \sum_j w_j v_j $$
#
# Why $\sqrt D$? The dot product of two vectors of $D$ independent random numbers with mean 0 and standard deviation 1 has
# the standard deviation $\sqrt D$. Without the division, scores grow with $\sqrt D$; for a large head dim softmax then picks
# a single key, and hardly any gradient is left.

# %%
scores = np.array([1.0, 0.0, 1.0, 0.0]) / 2**0.5  # four dot products, D = 2
powers = np.exp(scores)
weights, values = powers / powers.sum(), np.array([10.0, 20.0, 30.0, 40.0])
print("weights", np.round(weights, 3), " out", round(weights @ values, 2))

# %% [markdown]
# Two of the four keys fit the query better. They get about twice the weight of the others, not all of it. The weights of a
# softmax always add up to one. Here each value is a single number; a real one has D, as the output has.
#
# ## The same for all queries
#
# Our arrays have four axes, (B, H, L, D): batch, heads, tokens, head dim. A *head* is one attention with its own queries,
# keys and values, vectors of D numbers. A layer runs H heads side by side on the same tokens. (Later, heads will share
# keys and values.)
#
# NumPy's `@` multiplies the last two axes and repeats over the rest. So two matrix products, with a softmax between them,
# give the output for all queries of all heads. The picture shows one head. Keep an eye on the squares.

# %%
show(memory_ledger.shapes_figure(), memory_ledger.describe_shapes())

# %% [markdown]
# The same in code. Here S = 6 and D = 4, so the squares are still small.


# %%
def first_attention(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    powers = np.exp(scores)
    return (powers / powers.sum(-1, keepdims=True)) @ v


q, k, v = rng.standard_normal((3, 1, 2, 6, 4)).astype(np.float32)
truth = oracle.attention(q, k, v)
print("shapes", q.shape, "->", first_attention(q, k, v).shape)
print("agrees with the oracle:", np.allclose(first_attention(q, k, v), truth.out, atol=1e-6))

# %% [markdown]
# `ringlab.oracle` computes the same in float64, slowly and carefully. It is the truth against which the whole course
# measures.
#
# ## Scores of any size
#
# Nothing keeps the scores of a network small. We multiply the queries by a thousand, as a badly initialised layer might.

# %% tags=["nbval-ignore-output"]
predict(
    "01.large",
    "q is multiplied by 1000. What does first_attention return?",
    choices=["nearly the value of one key per row", "NaN", "0"],
)

# %%
with np.errstate(all="ignore"):
    broken = first_attention(1000 * q, k, v)
compare("01.large", "NaN" if np.isnan(broken).any() else "nearly the value of one key per row")
largest = float(np.log(np.finfo(np.float32).max))
print(f"largest x with a finite exp(x) in float32: {largest:.1f}")

# %% [markdown]
# The right weights are finite, but on the way to them $e^s$ is far above that limit. float32 cannot hold such a number:
# it becomes inf, and inf / inf is NaN.
#
# The remedy costs little. Multiply numerator and denominator by $e^{-m}$, where $m$ is the row's own maximum. The weights
# do not change, and the largest exponent is now 0. We also return the logarithm of the *original*
# denominator, without the factor $e^{-m}$; the division would throw it away. It is called lse, for *log-sum-exp*:
#
# $$ \mathrm{lse} = \ln \sum_j e^{s_j} = m + \ln \sum_j e^{s_j - m} $$
#
# It is one number per query. It looks like a by-product, but everything after this lesson depends on it, because it
# says **how much softmax mass these keys have in all**. The *mass* of some keys is the sum of their $e^{s_j}$.


# %%
def stable_softmax(scores):
    m = scores.max(-1, keepdims=True)
    powers = np.exp(scores - m)
    total = powers.sum(-1, keepdims=True)
    return powers / total, (m + np.log(total))[..., 0]


weights, lse = stable_softmax(1000 * q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5)
print("sums of the rows", np.unique(np.round(weights.sum(-1), 6)), " largest lse", round(lse.max()))

# %% [markdown]
# ## The causal mask, by position
#
# A language model must not look ahead: the query at position $i$ may see keys at positions up to and including $i$. As
# a matrix with queries down and keys across, that is the **lower** triangle. A mask in this course is a boolean matrix. It
# is True where a query **may see** a key. A hidden score becomes $-\infty$, and $e^{-\infty}$ is exactly 0.
#
# Compare *positions*, not indices. Today it makes no difference. Once ranks hold pieces of the sequence, the first
# query of a block is no longer token 0, and a mask that counts from the edge of its block is wrong.


# %%
def causal_mask(query_positions, key_positions):
    return key_positions[None, :] <= query_positions[:, None]


print(causal_mask(np.arange(4), np.arange(4)).astype(int))
print("queries 4-5, keys 2-5:")
print(causal_mask(np.arange(4, 6), np.arange(2, 6)).astype(int))

# %% [markdown]
# Now suppose that a query may see **no** key at all. With a causal mask over one whole text that never happens, since
# every token sees itself. On a ring it happens all the time: the block that has just arrived may be entirely in the future.

# %% tags=["nbval-ignore-output"]
predict(
    "01.blind",
    "A row of scores is -inf throughout. What does stable_softmax return for its weights?",
    choices=["all 0", "all equal", "NaN"],
)

# %%
blind = np.full((1, 4), -np.inf)
with np.errstate(all="ignore"):
    compare("01.blind", "NaN" if np.isnan(stable_softmax(blind)[0]).all() else "no NaN")
print("with -1e9 in place of -inf:", stable_softmax(np.full((1, 4), -1e9))[0][0])

# %% [markdown]
# The maximum is $-\infty$, and $-\infty - (-\infty)$ has no value. The popular repair is a large negative number instead of
# $-\infty$. It is worse, because its result looks healthy: the number is subtracted from itself, all weights become equal,
# and the row that may see nothing returns **the mean of all values**. No error, no NaN, just wrong.
#
# What is right? No key was seen, so there is no mass, and lse is $\ln 0 = -\infty$. In a later merge such a row counts
# for nothing, so any finite out will do; we take 0. Here is attention as we use it from now on.


# %%
def attention(q, k, v, mask=None):
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    m = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isneginf(m), 0, m))
    total = powers.sum(-1, keepdims=True)
    log_total = np.full_like(total, -np.inf)
    np.log(total, out=log_total, where=total > 0)
    lse = (m + log_total)[..., 0]  # -inf + -inf = -inf where no key was seen
    return (powers / np.where(total > 0, total, 1)) @ v, lse


mask = causal_mask(np.arange(6), np.arange(6))
mask[0] = False  # query 0 sees nothing
out, lse = attention(q, k, v, mask)
truth = oracle.attention(q, k, v, mask=mask)
print("out", np.allclose(out, truth.out, atol=1e-6), " lse", np.allclose(lse, truth.lse, atol=1e-6))
print("row 0: out", out[0, 0, 0], " lse", lse[0, 0, 0])

# %% [markdown]
# ## Fewer keys and values than queries: GQA
#
# A model that writes text must keep the keys and values of all earlier tokens, and a ring must send them. To make them
# smaller, most large models let several query heads use the *same* key/value head: grouped-query attention, GQA. With H
# query heads and K key/value heads, query head $h$ uses key/value head $\lfloor h / (H/K) \rfloor$, so neighbouring
# query heads share one. That is `np.repeat`. `np.tile` gives the same shape but another order, and some heads still
# meet the right keys, so the mistake is easily missed.

# %%
show(memory_ledger.sharing_figure(8, 2), memory_ledger.describe_sharing(8, 2))


# %%
def grouped_attention(q, k, v, mask=None):
    group = q.shape[1] // k.shape[1]
    return attention(q, np.repeat(k, group, axis=1), np.repeat(v, group, axis=1), mask)


q8 = rng.standard_normal((1, 8, 6, 4)).astype(np.float32)
mask = causal_mask(np.arange(6), np.arange(6))
truth = oracle.attention(q8, k, v, causal=True)
tiled, _ = attention(q8, np.tile(k, (1, 4, 1, 1)), np.tile(v, (1, 4, 1, 1)), mask)
for name, out in (("repeat", grouped_attention(q8, k, v, mask)[0]), ("tile", tiled)):
    right = [h for h in range(8) if np.allclose(out[:, h], truth.out[:, h], atol=1e-6)]
    print(f"{name:6}: right heads {right}")

# %% [markdown]
# `np.repeat` copies k and v for every query head. That can be avoided: `@` broadcasts an axis of length 1 without copying
# it. The exercise asks for that.
#
# ## What grows?
#
# Attention is correct now. Next we let it grow: we double S and read from Python's `tracemalloc` how many bytes
# `attention` holds at its worst moment. Look at its code once more before you guess. q, k and v are not counted, because they are there before.

# %% tags=["nbval-ignore-output"]
predict(
    "01.matrices",
    "How many S × S matrices of float32 does `attention` hold per head at its worst moment?",
    unit="matrices",
)


# %%
def peak_bytes(S):
    q, k, v = rng.standard_normal((3, 1, 2, S, 32)).astype(np.float32)
    tracemalloc.start()
    attention(q, k, v)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


peaks = {S: peak_bytes(S) for S in (512, 1024, 2048)}
for S, peak in peaks.items():
    print(f"S = {S:5}: {peak / 1e6:4.0f} MB")
compare("01.matrices", round(peaks[2048] / (2 * 2048**2 * 4)))

# %% [markdown]
# Each doubling of S quadruples the peak: a term in S² dominates. There are three matrices at the worst moment, and that
# moment comes twice. When `exp` writes its result, the scores and the unnamed `scores - m` are still
# there. When the division writes the weights, the scores and `powers` are still there.
#
# We count two of them from here on, the scores and the weights: an implementation that takes exp and divides in place
# holds no more.
#
# ## The ledger
#
# Take one layer of a typical current model: 32 query heads, 8 key/value heads, head dim 128, bfloat16. The ledger lists
# the tensors that such an attention holds at once: q, k and v, the scores, the weights, and out. The device has 80 GB. In
# this course a GB is 10⁹ bytes.

# %% tags=["nbval-ignore-output"]
predict("01.overtake", "At how many tokens are this layer's scores as large as q?", unit="tokens")

# %% tags=["nbval-ignore-output"]
predict("01.full", "At how many tokens does this ONE layer's ledger fill 80 GB?", unit="tokens")

# %%
layer = Layer(heads=32, kv_heads=8, head_dim=128, itemsize=2)
tokens = range(1, 1000)
compare("01.overtake", next(S for S in tokens if layer.ledger(S)["scores"] >= layer.ledger(S)["q"]))
full = layer.largest_sequence(80 * GB)
compare("01.full", full)
for S in (full, 131_072):
    print(f"S = {S:,}:", ", ".join(f"{name} {readable(n)}" for name, n in layer.ledger(S).items()))

# %%
show(memory_ledger.ledger_figure(131_072, layer), memory_ledger.describe(131_072, layer))

# %% [markdown]
# Scores and weights have S² elements per head, q has S · D. So each of them is as large as q at S = D, here 128 tokens: a short
# paragraph, whatever the number of heads and the dtype. From there on each of them is larger. We call the length at which
# the ledger fills the device **the wall**, here 24,920 tokens. There scores and weights take nearly all of the 80 GB,
# although nobody asked for them: they are neither input nor output.
#
# Both axes of the left picture are logarithmic, so a linear term is a straight line, and a quadratic term is one with
# twice its slope. The right picture has a linear axis, and on it only the two matrices can be seen. Move the sliders of
# the next cell: a narrower dtype or fewer heads move the wall only by the square root of what they save.

# %% tags=["nbval-ignore-output"]
memory_ledger.explore()

# %% [markdown]
# GQA hardly helps against this wall: k and v shrink, but every *query* head still has its own scores.
#
# ## "Long context is a FLOP problem"
#
# This is the usual first guess, and a fair one. A FLOP is one floating-point operation, a multiplication or an addition.
# Each of the two products takes $S^2 D$ multiplications and as many additions per head, together $4 S^2 D$ FLOP, which is a
# square too. (That leaves out the softmax's small work.) So we compare two costs at S = 131,072, the arithmetic and the
# memory for scores and weights, on an accelerator with 80 GB that computes 312 TFLOP/s, 312 · 10¹² FLOP a second.

# %% tags=["nbval-ignore-output"]
predict("01.seconds", "How long does this layer's arithmetic take at full speed?", unit="s")

# %%
S = 131_072
seconds = layer.flops(S) / 312e12
devices = 2 * layer.ledger(S)["scores"] / (80 * GB)
compare("01.seconds", round(seconds, 2))
print(f"devices that the scores and weights fill: {devices:.1f}")

# %% [markdown]
# The arithmetic takes less than a second; the two tensors fill more than 27 devices. Both costs grow as S², but they are
# not alike. **You can wait for time.** A job that needs twice the work finishes later. A job that needs twice your memory
# never finishes. So arithmetic sets the price of a long context, but memory decides whether you can have it at all.
#
# *Not storing* the two matrices also saves time: a device computes far faster than it moves bytes, and waits while they are
# written and read back. Lesson 03 stores neither.
#
# ## And then the linear terms
#
# Suppose the scores are gone; lessons 02 and 03 remove them. Are we done? Keys and values grow only as S, but a model that
# writes text keeps them in every layer: its **KV cache**. Take a 70B model, with 80 layers and 8 key/value heads of dim
# 128, a million tokens, and bfloat16.

# %% tags=["nbval-ignore-output"]
predict("01.cache", "How large is the KV cache, the keys and values of all 80 layers?", unit="GB")

# %%
cache = kv_cache_bytes(1_000_000, layers=80, kv_heads=8, head_dim=128)
compare("01.cache", cache / GB)
print(f"keys and values {cache / GB:.2f} GB; the keys alone {cache / 2 / GB:.2f} GB")

# %% [markdown]
# No single device of 80 GB holds that, however clever its program is. So there are two walls,
# one after the other. The square one falls to a trick on **one** device: never hold more than a small piece of the
# scores. The linear one falls to **more devices**. They could share out the layers or the heads, but a model has only so
# many of these, however long the text. What grows is the sequence. So here each device holds a share of the
# **sequence**. The trick for the first wall is also what lets us cut the sequence, and ring attention combines both.
#
# ## Recap
#
# - Attention is two matrix products with a softmax between them. lse is $\ln \sum_j e^{s_j}$, the logarithm of the
#   denominator before the maximum is subtracted.
# - Subtract each row's own maximum before exp. Replace the maximum by 0 only where it is $-\infty$.
# - A row that sees no key has out 0 and lse $-\infty$: not NaN, and not the mean of the values.
# - Masks compare positions, and True means "may see". With grouped heads, neighbouring query heads share a key/value head.
# - Scores and weights fill the memory first: in one layer on 80 GB at about 25,000 tokens. GQA hardly changes that.
# - Long context is a memory problem before it is a FLOP problem. After the square wall comes a linear one.

# %% [markdown]
# ## Self-check
#
# Answer without scrolling up, then open the answer.
#
# <details><summary>1. Why may you subtract any number from a row of scores without changing its weights, and why is the
# maximum the best choice?</summary>The subtraction multiplies numerator and denominator by the same factor. With the
# maximum, no exponent is above 0, and one is exactly 0. So nothing overflows, and the sum is at least 1.</details>
#
# <details><summary>2. A colleague masks with −1e9 and sees no NaN. Which row of the result is wrong, and what does it
# contain?</summary>A row that sees no key. It contains the mean of all values, where out should be 0.</details>
#
# <details><summary>3. You store all tensors as float8 instead of bfloat16. By which factor does the longest sequence
# grow?</summary>By about √2, not by 2, since the matrices grow as S². The cell below prints both lengths.</details>
#
# <details><summary>4. Which tensors must you <i>not store</i> so that memory grows linearly?</summary>The scores, and the
# weights made from them.</details>

# %%
for name, itemsize in (("bfloat16", 2), ("float8", 1)):
    print(f"{name:8}: {Layer(itemsize=itemsize).largest_sequence(80 * GB):,} tokens")

# %% [markdown]
# **Now you:** in [exercise 01](../exercises/01_naive_attention.ipynb) you write attention in NumPy.
