# %% [markdown]
# # 19 · Serving a long context
#
# **Afterwards you can** say what a server's step costs and which part of it users share, compute a long prompt in chunks after a cached
# prefix, divide the caches of many users among ranks, and decode with heads and tokens divided.
#
# **You need first** [lesson 15](15_choosing.ipynb), decode against a sharded cache, and section 6 of [lesson 14](14_training.ipynb),
# tensor parallelism.
#
# **Minutes** 75 to read and run; the exercise takes another 75.
#
# Ben is reading an answer. Llama 3 70B writes it, on 16 H100 in two nodes of 8, and a new token appears every ten milliseconds. Then Ada
# sends the same server a prompt of 1,048,576 tokens, a shelf of books. The server cuts her prompt into **chunks**. After each chunk it
# makes one **step of decode**, in which Ben gets his next token. What does Ben see?

# %%
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ringlab import ShardedCache, VirtualCluster, contiguous, oracle, zigzag
from ringlab.cost.hardware import hardware
from ringlab.cost.planner.memory_table import most_sequences
from ringlab.cost.planner.serve_time import ServeRequest, serve_time, serving_time
from ringlab.cost.serving import prefill_traffic
from ringlab.cost.sizes import Attention
from ringlab.serving import decode_heads, prefill
from ringlab.viz.style import show
from ringlab_course import compare, corpus, predict
from ringlab_course.figures import serving_view

# %%
grid = {"token_ranks": 2, "head_ranks": 8, "sharing": "copies"}  # section 5 says what this means
server = partial(ServeRequest, "llama3-70b", hardware="h100", **grid)
ben = serve_time(server(sequences=1, context=4096))
ben_s = ben.token_s
ada, runs = {}, {}
for chunk in (32_768, 512):
    served = ada[chunk] = serve_time(server(sequences=1, context=2**20, chunk=chunk))
    first_s, last_s = served.chunks_s[0], served.chunks_s[-1]
    print(f"chunks of {chunk:6,}: the first takes {1e3 * first_s:3.0f} ms,", end=" ")
    print(f"the last {1e3 * last_s:5,.0f} ms")
    runs[f"Chunks of {chunk:,} tokens"] = [(first_s, each - first_s) for each in served.chunks_s]
both_s = ada[512].token_s
print(f"steps of decode: {1e3 * ben_s:.1f} ms for Ben, {1e3 * both_s:.1f} ms after Ada's prompt")
drawn = runs, ben_s, both_s
show(serving_view.turns(*drawn), serving_view.describe_turns(*drawn))

# %% [markdown]
# The picture shows the last ten seconds of Ada's prompt. Time runs from left to right. One chunk is a blue piece and the orange piece after it;
# below, blue is too thin to see. Each black line is a token for Ben. With long chunks Ben gets one token in nine seconds. With short ones he waits at most 147 ms for a
# chunk. So servers cut prompts into short chunks.
#
# Two riddles are in this picture.
#
# - All of Ada's long chunks have 32,768 tokens. Still, her first took 660 ms, which is the blue piece, and her last takes 9,076 ms. What is the
#   orange piece?
# - On the right, Ada's prompt is done, and each step computes a token for both. Ben's text is as short as before. Still, a step now takes
#   16.1 ms, and not 9.7 ms as before Ada came.
#
# One thing is behind both. It also decides how 16 GPUs should divide the work when sixteen users come with long texts. This lesson looks for it.
#
# (The times come from ringlab's model of a server, not from a measurement. [Serving](../docs/guide/serving.md) says what the model leaves
# out. Servers can also put Ben's token into the same step as a chunk, as in [arXiv 2403.02310](https://arxiv.org/abs/2403.02310). Here the
# two take turns, so that we can tell them apart.)
#
# ## 1 · The price of short chunks
#
# The **time to first token** is what Ada waits for. With chunks of 512 tokens the server computes 64 times as many chunks, and it reads
# all weights again for each of them. Also, Ben gets 64 times as many tokens in between.

# %% tags=["nbval-ignore-output"]
predict(
    "19.price",
    "How much later does Ada's first token come, with chunks of 512 tokens in place of 32,768?",
    ["not at all", "a sixth later", "twice as late", "ten times as late"],
)

# %%
until_first = {}
for chunk, served in ada.items():
    number = len(served.chunks_s)
    until_first[chunk] = served.first_token_s + number * ben_s
    print(f"{number:5,} chunks of {chunk:6,} tokens: {served.first_token_s:.1f} s;", end=" ")
    print(f"with a step for Ben after each: {until_first[chunk]:.1f} s")
choices = {"not at all": 1, "a sixth later": 7 / 6, "twice as late": 2, "ten times as late": 10}
later = until_first[512] / until_first[32_768]
compare("19.price", min(choices, key=lambda name: abs(np.log(choices[name] / later))))

# %% [markdown]
# Of these 26 s, Ben's 2,048 steps take 20. The chunks themselves take less than 7 s longer, since most of their time does not depend on where
# the prompt is cut. Each of Ada's tokens attends to all tokens before it, and these pairs of tokens are always the same.
#
# ## 2 · A chunk is a rectangle and a triangle
#
# The queries of a chunk attend to the **prefix**: all tokens before the chunk. Their keys and values lie in Ada's **cache**. The queries
# also attend to the chunk itself, causally.

# %%
show(serving_view.chunk_masks(4), serving_view.describe_chunk_masks(4))

# %% [markdown]
# Count squares in the left picture. The first chunk is half a square, the second one and a half, then two and a half, and three and a half.
# So attention grows almost exactly as 1 : 3 : 5 : 7, while the chunk's matrix products stay the same.
#
# Ada's prompt is 32 chunks of 32,768 tokens. Her last chunk has its own half square, as her first one had, and a rectangle of 31 squares. All of the
# rectangle is her cache. That solves the first riddle: **the triangle never grows, and the cache does.** The orange piece of her
# last chunk is 9,076 − 660 = 8,416 ms. 31 squares are 62 halves, so a half takes 136 ms. The blue 660 ms hold one such half, matrix products and messages. In all pictures of this lesson orange is what is cached, and blue is the chunk
# itself, with its queries.
#
# The right picture is a common slip. PyTorch's `is_causal=True` numbers queries and keys from 0. So it takes the chunk's
# first query for the first token of the prompt, and lets it see one key. We try it on real text, with a last chunk of 103 tokens after 97:

# %%
S, P, H, K, D = 200, 4, 8, 2, 16
CHUNKS = (slice(0, 90), slice(90, 97), slice(97, 200))
q, k, v = corpus.qkv(S, heads=H, kv_heads=K, head_dim=D)
true = torch.from_numpy(oracle.attention(q, k, v, causal=True).out)


def error(out, expected):
    """The largest error, relative to the largest value."""
    return ((out - expected).abs().max() / true.abs().max()).item()


last = CHUNKS[2]
slip = scaled_dot_product_attention(q[:, :, last], k, v, is_causal=True, enable_gqa=True)
off = error(slip, true[:, :, last])
print(f"the last chunk with is_causal=True: off by {off:.0%} of the largest value")

# %% [markdown]
# So the mask has to compare positions in the prompt, here 97 to 199 for the queries and 0 to 199 for the keys. Rotary embedding needs the
# same positions.
#
# ## 3 · The cache stays, the chunk travels
#
# Ada's cache lies on several ranks, and so do the queries of her next chunk. To meet, one of the two has to travel. In the picture an orange
# bar is a rank's keys and values, and a blue square is its queries.

# %%
show(serving_view.travellers(4), serving_view.describe_travellers(4))

# %% [markdown]
# On the left, keys and values go around, as in lesson 05. On the right, the **queries** go around. Each rank attends to its
# own keys with the queries that visit it. The result is a **partial**, out and lse. It has to go home, to the owner of the query
# ([arXiv 2411.01783](https://arxiv.org/abs/2411.01783)).
#
# Llama's query heads share few K/V heads. So in a prompt that is computed at once, keys and values are fewer bytes than queries. But a chunk
# has few queries, and many cached keys.

# %% tags=["nbval-ignore-output"]
predict(
    "19.travel",
    "One layer; chunks of 4,096 tokens on 8 ranks; 64 query heads and 8 K/V heads of 128. "
    "Queries, keys and values have 16 bits, partials 32. "
    "From which length of the prefix on do queries, with partials sent back, cost fewer bytes?",
    ["4,000", "16,000", "50,000", "500,000"],
)

# %%
sizes, ranks = Attention(H=64, K=8, D=128, dtype="bfloat16"), 8


def sent(prefix, travels, chunk=4096):
    """The bytes that a rank sends for a chunk after `prefix` cached tokens."""
    each = [prefix // ranks] * ranks
    return prefill_traffic(sizes, contiguous(chunk, ranks), each, travels=travels).total_bytes


def meet(chunk):
    """The prefix from which on queries are no more bytes than keys and values."""
    return next(n for n in range(0, 2**20, 32) if sent(n, "kv", chunk) >= sent(n, "q", chunk))


prefixes = [2**n for n in range(12, 21)]
lines = {"keys and values": [sent(n, "kv") for n in prefixes],
         "queries and partials": [sent(n, "q") for n in prefixes]}
drawn = prefixes, lines, meet(4096)
show(serving_view.bytes_by_prefix(*drawn), serving_view.describe_bytes(*drawn))
for chunk in (4096, 512):
    print(f"chunks of {chunk:5,} tokens: queries travel from {meet(chunk):6,} cached tokens on")
nearest = min((4_000, 16_000, 50_000, 500_000), key=lambda n: abs(np.log(meet(4096) / n)))
compare("19.travel", f"{nearest:,}")

# %% [markdown]
# A token's key and value are 2·K·D numbers of 2 bytes: 4 KiB. Its query is H·D numbers of 2 bytes, 16 KiB, and its partial H·(D + 1)
# numbers of 4 bytes, 32¼ KiB. Query and partial together are 12.0625 times as many bytes as key and value.
#
# Keys travel for the prefix and for the chunk. Queries travel for the chunk alone. So the bytes are equal when prefix and chunk together are 12.0625
# chunks long. Then the prefix is 11.0625 chunks, 45,312 tokens.
#
# For Ada's chunks of 512 tokens it is 5,664 tokens. So for almost all of her prompt, her cache stays where it is.
#
# Computing a prompt is called **prefill**, and ringlab's `prefill` does both. Each rank's cached tokens and its tokens of the chunk form one block, of any length. If keys travel, these
# blocks go around the ring once, in P − 1 hops, and the mask compares positions. Afterwards the chunk is appended to the cache.
# `travels="auto"` counts the bytes, and chooses for each chunk:


# %%
def in_chunks(ring, travels):
    """The prompt chunk by chunk: this rank's outputs."""
    cache, outs = ShardedCache(ring, batch=1, kv_heads=K, head_dim=D), []
    for chunk in CHUNKS:
        layout = zigzag(chunk.stop - chunk.start, P)
        own = layout.shard((q[:, :, chunk], k[:, :, chunk], v[:, :, chunk]), ring.rank)
        outs.append(prefill(*own, cache, layout=layout, travels=travels))
    return outs


for travels in ("kv", "q", "auto"):
    run = VirtualCluster(P).run(in_chunks, travels)
    whole = [zigzag(chunk.stop - chunk.start, P).unshard(outs)
             for chunk, *outs in zip(CHUNKS, *run.results, strict=True)]
    right = error(torch.cat(whole, dim=2), true) < 1e-5
    print(f"travels={travels:4}  as in one pass, to 1e-5: {right},", end=" ")
    print(f"rank 0 sends {run.trace.bytes_sent(0):,} bytes")

# %% [markdown]
# `auto` sends least, since it chooses anew for each chunk: queries travel for the 7 tokens after 90, keys for the 103 after 97.
#
# ## 4 · One step for all
#
# Now the prompts are done, and everybody gets tokens. A step of **decode** computes one token for each user. A GPU does little arithmetic
# for one token, but it reads all of its weights and everything that it has cached. So reading takes most of the time.
#
# From here on every user has 131,072 tokens in the cache, one long book. First one user alone:

# %%
BOOK = 2**17
one = server(sequences=1, context=BOOK)
alone = serve_time(one).token
weights, cache = one.weight_bytes / 1e9, one.cache_bytes(BOOK, 1) / 1e9
print(f"a GPU reads {weights:4.1f} GB of weights in {1e3 * alone.weights_s:.1f} ms")
print(f"        and {cache:4.1f} GB of the cache in {1e3 * alone.cache_s:.1f} ms")
print(f"with messages a step takes {1e3 * alone.total_s:.1f} ms:", end=" ")
print(f"{1 / alone.total_s:.0f} tokens a second")

# %% [markdown]
# The weights take more than six times as long as the cache. And a matrix that has been read multiplies sixteen tokens almost as quickly as one.

# %% tags=["nbval-ignore-output"]
predict(
    "19.batch",
    "Sixteen such users decode in the same steps. How many tokens a second do they get together?",
    ["100", "700", "1,500"],
)

# %%
steps = {(users, ""): serve_time(server(sequences=users, context=BOOK)) for users in (1, 4, 16)}
drawn = steps, "Users share the weights, not the caches"
show(serving_view.step_bars(*drawn), serving_view.describe_step_bars(*drawn))
together = steps[16, ""].tokens_per_s
compare("19.batch", f"{min((100, 700, 1_500), key=lambda n: abs(n - together)):,}")

# %% [markdown]
# **About 700.** The green part does not grow: weights are read once, for all users. The orange part grows with every user, from 0.8 ms to
# 12.8 ms, since each user attends to his own tokens only. **A batch shares the weights, but not the caches.** (The grey part is messages between
# the ranks; section 5 comes to them.)
#
# That solves the second riddle, too. After Ada's prompt Ben's own cache is as short as before, but each step also reads hers:

# %%
for name, step in {"Ben alone": ben.token, "with Ada ": ada[512].token}.items():
    print(f"{name}: weights {1e3 * step.weights_s:.1f}, caches {1e3 * step.cache_s:.1f},",
          f"messages {1e3 * step.exposed_s:.1f} ms")

# %% [markdown]
# **Halfway. This is a good place to stop.** You know what users share, and what they do not.
#
# ## 5 · How should 16 ranks divide it?
#
# The ranks read the weights once for all users, but a cache for each of them. Tensor parallelism (TP) cuts the weights by heads and
# columns, and a cache by K/V heads. But Llama 3 70B has only 8 K/V heads. Here are three ways to use 16 ranks:
#
# - **TP 16** cuts the weights into 16 parts. With 8 K/V heads, two ranks keep the same part of each cache. (If both also keep the
#   projections of their K/V head whole, as many programs do, each rank has 9.0 GB of weights in place of 8.8.)
# - **TP 8 × CP 2** is how the server has worked so far. Two nodes hold the same weights, each in 8 parts. Each node caches half of the
#   tokens, which is context parallelism (CP).
# - **TP 16 + DCP 2** cuts nearly all weights into 16 parts. The two ranks with the same K/V head cache half of the tokens each. vLLM calls
#   this *decode context parallelism*, DCP.
#
# Each panel of the picture is the cache of one user, and the numbers are ranks. Below it stands what each rank holds, and how many users would fit
# if nothing else lay in its memory. (An H100 is sold as 80 GB and has 85.5 GB.)

# %%
GRIDS = {
    "TP 16": {"token_ranks": 1, "head_ranks": 16},
    "TP 8 × CP 2": grid,
    "TP 16 + DCP 2": {"token_ranks": 2, "head_ranks": 8, "sharing": "dcp"},
}
ways = {name: server(sequences=1, context=BOOK, **GRIDS[name]) for name in GRIDS}
show(serving_view.shares(ways), serving_view.describe_shares(ways))

# %% [markdown]
# A step also sends messages. The ranks that divide the weights must *add up* their results twice in every layer, by the
# all-reduce of lesson 14. TP 8 × CP 2 adds up inside a node. The other two add up over all 16 ranks, and so between the nodes. Ranks that
# divide a cache by tokens also have to merge their partials.


# %%
def weigh(machine, title):
    """Show the steps of 1, 3 and 16 users, divided in three ways."""
    asked = {(users, name): server(sequences=users, context=BOOK, hardware=machine, **GRIDS[name])
             for users in (1, 3, 16) for name in GRIDS}
    steps = {key: serving_time(each) for key, each in asked.items()}  # whether it fits or not
    unfit = {(users, name) for (users, name), each in asked.items()
             if most_sequences(each, each.machine.memory_bytes) < users}
    drawn = steps, title, unfit
    show(serving_view.step_bars(*drawn), serving_view.describe_step_bars(*drawn))


weigh("h100", "Two nodes of 8: adding up between the nodes is slow")

# %% [markdown]
# On two nodes TP 8 × CP 2 is fastest, from one user to sixteen, because its messages are cheapest. TP 16 reads twice as much of
# every cache as the others, and with sixteen users its caches no longer fit into the memory.
#
# Now imagine the same 16 chips on *one* NVLink, as if a node had 16. Adding up over all of them is cheap then.

# %% tags=["nbval-ignore-output"]
predict(
    "19.grid",
    "On one NVLink, TP 16 is faster than TP 8 × CP 2 for one user: it reads half as many weights. "
    "From how many users on is TP 8 × CP 2 faster than TP 16?",
    ["3", "8", "16", "never"],
)

# %%
one_node = replace(hardware("h100"), ranks_per_node=16)
weigh(one_node, "One NVLink: the caches decide")
for users in range(1, 17):
    asked = (server(sequences=users, context=BOOK, hardware=one_node, **GRIDS[name])
             for name in ("TP 16", "TP 8 × CP 2"))
    tp_s, cp_s = (serving_time(each).token_s for each in asked)
    if cp_s < tp_s:
        break
print(f"{users} users: {1e3 * tp_s:.1f} ms with TP 16, {1e3 * cp_s:.1f} ms with TP 8 × CP 2")
compare("19.grid", f"{min((3, 8, 16), key=lambda n: abs(n - users))}")

# %% [markdown]
# **From three users on.** TP 16 reads about 2.6 ms less of weights, and spends about 0.8 ms more on messages. So it is 1.8 ms ahead, however large the batch is.
# But it loses 0.8 ms to the cache *of each user*, so three users cost it 2.4 ms.
#
# TP 16 + DCP 2 divides the caches and nearly all weights by 16. It is fastest for one, three and sixteen users. Its two ranks must fill evenly while answers
# grow. So tokens are dealt in pieces: the first `interleave` tokens go to rank 0, the next to rank 1, then to rank 0 again.
#
# So **with many users the cache decides how ranks divide the work**, as long as the network does not forbid it.
#
# ## 6 · Queries of some heads, keys of some tokens
#
# In TP 16 + DCP 2 two ranks share a K/V head. Each has computed the queries of its own 4 heads, and caches half of the tokens. Yet each of the 8
# query heads of this K/V head needs all tokens: half of them lie on the other rank. Lesson 15 did not have this problem, since there all ranks that divided the tokens had
# the same queries.
#
# Here is the same on a small scale: P = 4 ranks, each with H/P of the query heads, and with all K/V heads for some of the tokens.
# The new token's key and value are already on the rank that caches them. Then
#
# 1. **gather** the queries: every rank gets all heads of the new token;
# 2. **attend** with all heads to this rank's own tokens: a partial, out and lse, for each head;
# 3. **hand over**: each rank gets the partials of *its* heads from everybody, and merges them.
#
# In the picture every square has heads from top to bottom and tokens from left to right. A filled box is a partial that the rank has. Its blue half says whose
# heads, and its orange half whose tokens.

# %%
show(serving_view.hand_over(P), serving_view.describe_hand_over(P))

# %% [markdown]
# The hand-over turns a column into a row, so it is an all-to-all. `decode_heads` does the three steps. We decode the last token of the text:


# %%
def last_token(ring):
    """The last token's attention with this rank's H/P heads."""
    cache = ShardedCache(ring, batch=1, kv_heads=K, head_dim=D)
    cache.append(k, v)
    own = slice(ring.rank * H // P, (ring.rank + 1) * H // P)
    return decode_heads(q[:, own, -1:], cache)


run = VirtualCluster(P).run(last_token)
out = torch.cat(run.results, dim=1)
print("right to 1e-5:", error(out, true[:, :, -1:]) < 1e-5)
print("rank 0 sends", run.trace.bytes_sent(0), "bytes")

# %% [markdown]
# To each of 3 others a rank sends the queries of its own H/P = 2 heads, D numbers each. Later it sends the partials of the *other's* 2 heads, D + 1
# numbers each. With 4 bytes a number that is 3 · 2 · (16 + 17) · 4 = 792 bytes, however long the text is.

# Step 3 merges by lse, as in lesson 02. A rank that caches no token of a user yet has lse −∞ and out 0, and takes part like any other.
# Servers have got this merge wrong, for example by taking an lse of base 2 for one of base e. [Field
# reports](../docs/field-reports.md#merges-of-out-lse-decode) has their stories.
#
# ## Recap
#
# Look at the first picture once more. What makes Ben wait longer is Ada's cache, the orange of the pictures. It makes each of her chunks longer than
# the one before, and later it makes each of their common steps longer.
#
# - A chunk of a prompt attends to its cached prefix, a rectangle, and to itself, a triangle. The attention of equal chunks costs
#   1 : 3 : 5 : 7. Short chunks let others in, and cost little. Positions go on after the prefix.
# - After a long prefix the cache stays, queries travel, and partials come home: these are fewer bytes.
# - A step reads the weights once for all users, and the cache of each. So the more users there are, the more the caches count.
# - With 8 K/V heads, 16 ranks divide a cache by tokens as well. Otherwise each rank reads twice as much for every user.
# - A rank with queries of some heads and keys of some tokens gathers queries, attends to its own tokens, and hands partials to the owners of their heads.
#
# ## Self-check
#
# <details><summary>1. A user with a cache of 262,144 tokens joins a batch of sixteen with 131,072 each. By how much does a step of TP 8 × CP 2 grow?</summary>
# By about 1.6 ms, the reading of this cache: twice the 0.8 ms of one of the others. The weights are read anyway.</details>
#
# <details><summary>2. In a chat a user sends 50 new tokens after 40,000 cached ones. What travels?</summary>The queries: 40,050 is
# far more than 12 times 50, with section 3's sizes.</details>
#
# <details><summary>3. Why do two ranks with equally many tokens not have equal shares in a merge?</summary>A rank's share is proportional to
# the sum of $e^{score}$ over its keys, not to their number. lse is the logarithm of that sum.</details>
#
# <details><summary>4. With 8 users on 8 ranks, why not give each rank one whole user, with all weights?</summary>Eight times as many weights as now are more than its
# memory holds. And it would read all of them for the token of a single user. (Some servers give each rank whole users for attention alone, and share out the rest of the weights.)</details>
#
# Now [exercise 19](../exercises/19_serving.ipynb): places, merge, decode, prefill, and who should travel.
