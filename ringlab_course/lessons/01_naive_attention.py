# %% [markdown]
# # 01 · Naive attention and the S² wall
#
# **Afterwards you can** write attention in NumPy with causal masks and grouped heads, keep it finite where it likes to
# turn into NaN, and say which tensor runs out of memory first, and at which length.
#
# **You need first** [lesson 00](00_start_here.ipynb), NumPy broadcasting, and to have trained a network in PyTorch once.
# **Minutes** 60.
#
# Ring attention answers one complaint: *it does not fit*. Before we spread anything over several devices, we want to know
# exactly **what** does not fit. So we build attention the plain way, weigh every tensor that it makes, and watch one of
# them run away. On the way we meet three small things that every later lesson leans on: the mask by **position**, the
# **lse**, and the row that sees nothing.

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
# scores. Nothing else happens in attention. For one query $q$ and keys $k_j$ with values $v_j$:
#
# $$ s_j = \frac{q \cdot k_j}{\sqrt D}, \qquad w_j = \frac{e^{s_j}}{\sum_i e^{s_i}}, \qquad \mathrm{out} = \sum_j w_j v_j $$
#
# Why $\sqrt D$? A dot product of $D$ random numbers of size one spreads as $\sqrt D$. Without the division, scores grow
# with the head dim and softmax becomes a hard choice, with hardly any gradient left.

# %%
scores = np.array([1.0, 0.0, 1.0, 0.0]) / 2**0.5  # four dot products, D = 2
powers = np.exp(scores)
print("weights", np.round(powers / powers.sum(), 3))

# %% [markdown]
# Four keys, two of which fit the query better: they get twice the weight, not all of it. The weights add up to
# one, as those of a softmax always do.
#
# ## The same for all queries
#
# Our arrays have four axes, (B, H, L, D): batch, heads, tokens, head dim. NumPy's `@` works on the last two and repeats
# over the rest, so all queries of all heads come out of two matrix products with a softmax between them. Between the two
# products stands a matrix with a row for every query and a column for every key. Keep an eye on it.


# %%
def first_attention(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    powers = np.exp(scores)
    return powers / powers.sum(-1, keepdims=True) @ v


q, k, v = rng.standard_normal((3, 1, 2, 6, 4)).astype(np.float32)
truth = oracle.attention(q, k, v)
print("shapes", q.shape, "->", first_attention(q, k, v).shape)
print("agrees with the oracle:", np.allclose(first_attention(q, k, v), truth.out, rtol=0, atol=1e-6))

# %% [markdown]
# `ringlab.oracle` computes the same in float64, slowly and carefully. All through the course it is the truth that we
# measure against.
#
# ## When softmax breaks
#
# Networks do not promise small scores. We multiply the queries by a thousand, as a badly initialised layer might.

# %% tags=["nbval-ignore-output"]
predict(
    "01.large",
    "q is multiplied by 1000. The weights are fractions between 0 and 1. What does first_attention return?",
    choices=["one value per row, nearly", "NaN", "0"],
)

# %%
with np.errstate(all="ignore"):
    broken = first_attention(1000 * q, k, v)
compare("01.large", "NaN" if np.isnan(broken).any() else "one value per row, nearly")
print("largest x with a finite exp(x) in float32:", round(float(np.log(np.finfo(np.float32).max)), 1))

# %% [markdown]
# The result exists, but the way to it leads through $e^s$ for scores far above that limit. float32 cannot hold it: inf / inf
# is NaN.
#
# The cure costs nothing. Multiply numerator and denominator by $e^{-m}$, with $m$ the row's own maximum. The weights stay
# the same, and the largest exponent is now 0. While we are here, we also return what the division would throw away, the
# logarithm of the denominator:
#
# $$ \mathrm{lse} = \ln \sum_j e^{s_j} = m + \ln \sum_j e^{s_j - m} $$
#
# One number per query. It looks like a by-product; it is what makes everything after this lesson possible, because it
# says **how much softmax mass these keys had in all**.


# %%
def stable_softmax(scores):
    m = scores.max(-1, keepdims=True)
    powers = np.exp(scores - m)
    total = powers.sum(-1, keepdims=True)
    return powers / total, (m + np.log(total))[..., 0]


weights, lse = stable_softmax(1000 * q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5)
print("rows add up to", np.unique(np.round(weights.sum(-1), 6)), " largest lse", round(float(lse.max())))

# %% [markdown]
# ## The causal mask, by position
#
# A language model must not look ahead: the query at position $i$ may see keys at positions up to and including $i$. Drawn
# as a matrix, queries down and keys across, that is the **lower** triangle. A mask is a boolean matrix here, True where a
# query **may see** a key; hidden scores become $-\infty$, and $e^{-\infty}$ is exactly 0.
#
# Write it by *position*, not by index. It makes no difference today. Once ranks hold pieces of the sequence, the first
# query of a block is no longer token 0, and every implementation that counts from the block's edge is wrong.


# %%
def causal_mask(query_positions, key_positions):
    return key_positions[None, :] <= query_positions[:, None]


print(causal_mask(np.arange(4), np.arange(4)).astype(int))
print("queries 4-5, keys 2-5:")
print(causal_mask(np.arange(4, 6), np.arange(2, 6)).astype(int))

# %% [markdown]
# Now suppose that a query may see **no** key at all. In one piece of text with a causal mask that never happens, since
# every token sees itself. On a ring it happens all the time: the block that has just arrived lies wholly in the future.

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
# The maximum is $-\infty$, and $-\infty - (-\infty)$ has no value. The popular repair, a large negative number instead of
# $-\infty$, is worse, because it looks healthy: it cancels against itself, and the row that may see nothing returns **the
# mean of all values**. No error, no NaN, just wrong.
#
# What is right? No key was seen, so there is no mass: lse is $\ln 0 = -\infty$. And out is 0 by agreement, so that
# whatever is later merged with it stays untouched. Here is attention as we shall use it from now on.


# %%
def attention(q, k, v, mask=None):
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    m = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isneginf(m), 0, m))
    total = powers.sum(-1, keepdims=True)
    lse = np.full_like(total, -np.inf)
    np.log(total, out=lse, where=total > 0)
    return powers / np.where(total > 0, total, 1) @ v, (m + lse)[..., 0]


mask = causal_mask(np.arange(6), np.arange(6))
mask[0] = False  # query 0 sees nothing
out, lse = attention(q, k, v, mask)
truth = oracle.attention(q, k, v, mask=mask)
print("out", np.allclose(out, truth.out, atol=1e-6), " lse", np.allclose(lse, truth.lse, atol=1e-6))
print("row 0: out", out[0, 0, 0], " lse", lse[0, 0, 0])

# %% [markdown]
# ## Fewer keys and values than queries: GQA
#
# Keys and values are what a model must keep while it writes, and, later, what a ring must send. So most large models give
# several query heads the *same* key/value head: grouped-query attention. With H query heads and K key/value heads, query
# head $h$ uses key/value head $\lfloor h / (H/K) \rfloor$. Neighbours share. (`np.repeat`, not `np.tile`; with `tile`
# everything runs and nothing is right.)


# %%
def grouped_attention(q, k, v, mask=None):
    group = q.shape[1] // k.shape[1]
    return attention(q, np.repeat(k, group, axis=1), np.repeat(v, group, axis=1), mask)


q8 = rng.standard_normal((1, 8, 6, 4)).astype(np.float32)
truth = oracle.attention(q8, k, v, causal=True)
out, lse = grouped_attention(q8, k, v, causal_mask(np.arange(6), np.arange(6)))
print("8 query heads on", k.shape[1], "key/value heads:", np.allclose(out, truth.out, atol=1e-6))

# %% [markdown]
# ## What grows?
#
# Attention is correct now. Let it grow. We double S and read from NumPy how many bytes it holds at the worst moment.

# %% tags=["nbval-ignore-output"]
predict(
    "01.growth", "S doubles from 512 to 1024 tokens. By which factor does peak memory grow?", unit="times"
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
compare("01.growth", round(peaks[1024] / peaks[512]))

# %% [markdown]
# Twice the tokens, four times the memory: a term in S² has taken over. Which tensor is it, and when does it matter?
#
# ## The ledger
#
# Take one layer of a model of today's making, 32 query heads, 8 key/value heads, head dim 128, bfloat16, and write down
# every tensor that naive attention holds at once. The device has 80 GB.

# %% tags=["nbval-ignore-output"]
predict(
    "01.first",
    "S keeps growing. Which tensor is the first that does not fit on the device?",
    choices=["q", "k and v", "scores", "out"],
)

# %% tags=["nbval-ignore-output"]
predict("01.wall", "How many tokens are there when that tensor of ONE layer alone fills 80 GB?", unit="tokens")

# %%
layer = Layer(heads=32, kv_heads=8, head_dim=128, itemsize=2)
for name, count in layer.ledger(131_072).items():
    print(f"{name:8} {readable(count):>8}")
compare("01.first", memory_ledger.first_out(layer, 80 * GB)[0])
compare("01.wall", layer.largest_sequence(80 * GB))

# %%
show(memory_ledger.ledger_figure(131_072, layer), memory_ledger.describe(131_072, layer))

# %% [markdown]
# The scores: the matrix between the two products is the only thing with S² elements; q, k, v and out grow as S.
#
# Both axes of the left picture are logarithmic: a line that climbs twice as steeply is a square. Everything you *asked*
# for (q, k, v, out) still lies far below the black line where the scores burst through it, and they are a matrix that
# nobody wants, half-way between input and output. Move the sliders of the next cell: a narrower dtype or fewer heads
# move the wall to the right, by the square root of what you save. It does not fall.

# %% tags=["nbval-ignore-output"]
memory_ledger.explore()

# %% [markdown]
# Does GQA help against this wall? Try before you read on: with 8 instead of 32 key/value heads, k and v shrink to a
# quarter. But every *query* head still has its own scores.

# %%
for kv_heads in (32, 8):
    books = Layer(kv_heads=kv_heads).ledger(131_072)
    print(
        f"K = {kv_heads:2}:  k and v {readable(books['k and v']):>8}   scores {readable(books['scores']):>8}"
    )

# %% [markdown]
# ## "Long context is a FLOPs problem"
#
# It is the usual first guess, and a fair one: the products cost $4 S^2 D$ FLOP per head, a square too. (There are two of
# them, each with $S^2 D$ multiplications and as many additions.) So let us price both squares at S = 131,072, on an
# accelerator with 312 TFLOP/s and 80 GB.

# %% tags=["nbval-ignore-output"]
predict("01.seconds", "How long do the FLOPs of this layer's attention take at full speed?", unit="s")

# %%
S = 131_072
seconds = layer.flops(S) / 312e12
devices = layer.ledger(S)["scores"] / (80 * GB)
compare("01.seconds", round(seconds, 2))
print(f"devices whose whole memory the scores would fill: {devices:.1f}")

# %% [markdown]
# Under a second of arithmetic, against a tensor that fills more than a dozen devices. Both grow as S², but they are not
# alike. **Time can be waited for.** Work that takes twice as long is finished later. Memory that is twice too small is
# never finished. That is the misconception to leave here: FLOPs set the price of a long context; memory decides whether
# you may have it at all.
#
# There is more to it. Even where the scores do fit, writing them out makes attention slow. A device can compute far faster
# than it can move bytes; what counts is how many FLOP it does for each byte that it moves.

# %%
balance = 312e12 / 2.039e12
for tokens in (1024, 8192, 131_072):
    books = layer.ledger(tokens)
    inputs_and_out = books["q"] + books["k and v"] + books["out"]
    naive, least = layer.flops(tokens) / layer.traffic(tokens), layer.flops(tokens) / inputs_and_out
    print(f"S = {tokens:7,}: naive {naive:5.1f} FLOP/byte, without the scores {least:9,.0f}")
print(f"the device breaks even at {balance:.0f} FLOP/byte (312 TFLOP/s over 2.039 TB/s)")

# %% [markdown]
# Naive attention stays at 64 FLOP per byte however long the sequence, because traffic and work both grow as S²: a score
# costs $4D$ FLOP, and it is written and read twice, once as a score and once as a weight. It never reaches break-even:
# the device waits for its own memory. Without the scores the ratio grows with S. So *not storing that matrix* wins
# twice, in space and in time. Mark that the number of FLOPs is the same in both columns.
#
# ## And then the linear terms
#
# Suppose the scores are gone; lessons 02 and 03 make them go. Are we done? Keys and values grow only as S, but a whole
# model keeps them in every layer. Take 80 layers with 8 key/value heads of dim 128 (a 70B model), a million tokens, bfloat16.

# %% tags=["nbval-ignore-output"]
predict("01.cache", "How large are the keys and values of one million tokens in all 80 layers?", unit="GB")

# %%
cache = kv_cache_bytes(1_000_000, layers=80, kv_heads=8, head_dim=128)
compare("01.cache", cache / GB)
print(f"keys alone, which some write-ups print for both: {cache / 2 / GB:.2f} GB")

# %% [markdown]
# No single device of 80 GB holds that, however clever the program that it runs (its *kernel*). So there are two walls,
# one behind the other. The square one falls to a trick on **one** device: never hold more than a tile of scores. The
# linear one falls only to **more devices**, each with its share of the sequence. The trick for the first is what makes
# the second possible, and the ring is both together.
#
# ## Recap
#
# - Attention is two matrix products with a softmax between them, and lse is the logarithm of what softmax divides by.
# - Take each row's own maximum away before exp. Only a maximum of $-\infty$ is replaced by 0.
# - A row that sees no key has out 0 and lse $-\infty$: not NaN, and not the mean of the values.
# - Masks compare positions, and True means "may see". Grouped heads: neighbours share.
# - Scores run out first, at some thirty-five thousand tokens in one layer on 80 GB. GQA does not change that.
# - Long context is a memory problem before it is a FLOPs problem; then the linear terms wait behind the square.

# %% [markdown]
# ## Self-check
#
# Answer without scrolling up, then open.
#
# <details><summary>1. Why may you take away any number from a row of scores without changing its weights, and why is the
# maximum the best?</summary>It multiplies numerator and denominator by the same factor. With the maximum no exponent is
# above 0, and one is exactly 0: nothing overflows, and the sum is at least 1.</details>
#
# <details><summary>2. A colleague masks with −1e9 and sees no NaN. On which row is the result wrong, and what does it
# contain?</summary>On a row that sees no key. It contains the mean of all values, where out should be 0.</details>
#
# <details><summary>3. float8 scores instead of bfloat16: by which factor does the longest sequence grow?</summary>By √2,
# not by 2, since the scores grow as S². The cell below prints both lengths.</details>
#
# <details><summary>4. Which tensor would you have to <i>not store</i> so that memory grows linearly? What would you have to
# know about the keys you have already passed, once you may not look back at them?</summary>The scores, and the weights made
# of them. The rest of the question is lesson 02.</details>

# %%
for name, itemsize in (("bfloat16", 2), ("float8", 1)):
    print(f"{name:8}: {Layer(itemsize=itemsize).largest_sequence(80 * GB):,} tokens")

# %% [markdown]
# **Now you:** [exercise 01](../exercises/01_naive_attention.ipynb), attention in NumPy. Then
# [lesson 02](02_online_softmax.ipynb) takes softmax apart.
