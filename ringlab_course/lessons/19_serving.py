# %% [markdown]
# # 19 · Serving a long context
#
# **Afterwards you can** say what a server's step costs and which part of it users share, compute a long prompt in chunks after a cached
# prefix, divide weights and caches among ranks, and decode where ranks have queries of some heads and keys of some tokens.
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
from ringlab.cost.planner.serve_time import ServeRequest, serve_time
from ringlab.cost.serving import prefill_traffic
from ringlab.cost.sizes import Attention
from ringlab.serving import PagedCache, decode_heads, prefill
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
# The picture shows the last ten seconds of Ada's prompt. Time runs from left to right. One chunk is a blue piece and the orange piece after
# it; below, blue is too thin to see. Each black line is a token for Ben. With long chunks Ben gets one token in nine seconds. With short
# ones he waits at most 147 ms. So servers cut prompts into short chunks.
#
# Two riddles are in this picture.
#
# - All of Ada's long chunks have 32,768 tokens. Still, her first took 660 ms, which is the blue piece, and her last takes 9,076 ms. What is
#   the orange piece?
# - On the right, Ada's prompt is done, and each step computes a token for both. Ben's text is as short as before. Still, a step now takes
#   16.1 ms, and not 9.7 ms as before Ada came.
#
# One thing is behind both. It also decides how 16 GPUs should divide the work when sixteen users come with long texts. This lesson looks
# for it.
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
# Of these 26 s, Ben's 2,048 steps take 20. The chunks themselves take less than 7 s longer, since most of their time does not depend on
# where the prompt is cut. Each of Ada's tokens attends to all tokens before it, and these pairs of tokens are always the same.
#
# ## 2 · A chunk is a rectangle and a triangle
#
# The queries of a chunk attend to the **prefix**: all tokens before the chunk. Their keys and values lie in Ada's **cache**. The queries
# also attend to the chunk itself, causally.

# %%
show(serving_view.chunk_masks(4), serving_view.describe_chunk_masks(4))

# %% [markdown]
# The first chunk is half a square. With every chunk a square is added, which is two halves. So attention grows as 1 : 3 : 5 : 7, while the
# chunk's matrix products stay the same.
#
# Ada's prompt is 32 chunks of 32,768 tokens. Her last chunk has its own half square, as her first one had, and a rectangle of 31 squares.
# All of the rectangle is her cache. That solves the first riddle: **the triangle never grows, and the cache does.** The orange piece of her
# last chunk is the rectangle, and takes 8.4 s. In all pictures of this lesson orange is what is cached, and blue is the chunk itself.
#
# ### Where a chunk begins
#
# PyTorch's `is_causal=True` knows nothing of a prefix. It numbers queries and keys from 0. So it takes the chunk's first query for the
# first token of the prompt, and lets it see one key.

# %%
show(serving_view.last_chunk(4), serving_view.describe_last_chunk(4))

# %% [markdown]
# We try it on 200 tokens of real text. The last chunk has 103 of them, after 97.

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
# So the mask has to compare positions in the prompt: 97 to 199 for the queries, and 0 to 199 for the keys. Then it does not even matter in
# which order the keys lie. Here all odd positions come first:

# %%
places = torch.arange(S)
order = torch.cat([places[1::2], places[::2]])
mask = places[last][:, None] >= places[order]
moved = k[:, :, order], v[:, :, order]
out = scaled_dot_product_attention(q[:, :, last], *moved, attn_mask=mask, enable_gqa=True)
print("with positions, right to 1e-5:", error(out, true[:, :, last]) < 1e-5)

# %% [markdown]
# Rotary embedding needs the same positions.
#
# ## 3 · The cache stays, the chunk travels
#
# Ada's cache lies on several ranks, and so do the queries of her next chunk. To meet, one of the two has to travel. An orange bar is a
# rank's keys and values, and a blue square is its queries.

# %%
show(serving_view.travellers(4), serving_view.describe_travellers(4))

# %% [markdown]
# On the left, keys and values go around, as in lesson 05. On the right, the **queries** go around. Each rank attends to its
# own keys with the queries that visit it. The result is a **partial**, out and lse. It has to go home, to the owner of the query
# ([arXiv 2411.01783](https://arxiv.org/abs/2411.01783)).
#
# In a prompt that is computed at once, keys and values are fewer bytes than queries, because 8 query heads share a K/V head. But a chunk
# has few queries, and many cached keys.

# %% tags=["nbval-ignore-output"]
predict(
    "19.prefix",
    "Ada's chunks have 512 tokens. From which length of the prefix on are queries, "
    "with partials sent back, fewer bytes than keys and values?",
    ["600", "6,000", "60,000", "600,000"],
)

# %%
# On Ada's server two ranks divide the tokens of a K/V head, which 8 query heads share.
sizes, ranks = Attention(H=8, K=1, D=128, dtype="bfloat16"), 2


def sent(prefix, travels):
    """The bytes that a rank sends in one layer for a chunk of 512 after `prefix` cached tokens."""
    each = [prefix // ranks] * ranks
    return prefill_traffic(sizes, contiguous(512, ranks), each, travels=travels).total_bytes


prefixes = [2**n for n in range(9, 21)]
lines = {"keys and values": [sent(n, "kv") for n in prefixes],
         "queries and partials": [sent(n, "q") for n in prefixes]}
meet = next(n for n in range(0, 2**20, 32) if sent(n, "kv") >= sent(n, "q"))
drawn = prefixes, lines, meet
show(serving_view.bytes_by_prefix(*drawn), serving_view.describe_bytes(*drawn))
nearest = min((600, 6_000, 60_000, 600_000), key=lambda n: abs(np.log(meet / n)))
compare("19.prefix", f"{nearest:,}")

# %% [markdown]
# **From 5,664 tokens on**, and not as soon as the prefix is longer than the chunk. Either way a rank sends P − 1 blocks. If keys and values
# travel, a block has those of (prefix + chunk)/P tokens. If queries travel, it has the queries of chunk/P tokens, and as many partials are
# sent back. We count the bytes of one token:

# %%
key = 2 * sizes.K * sizes.D * 2  # key and value, in bfloat16
query = sizes.H * sizes.D * 2
partial_bytes = sizes.H * (sizes.D + 1) * 4  # out and lse, in float32
print(f"key and value {key} bytes, query {query:,}, partial {partial_bytes:,}:", end=" ")
print(f"{(query + partial_bytes) / key} times as many")

# %% [markdown]
# So the bytes are equal when prefix and chunk together are 12.0625 chunks long. Then the prefix alone has 11.0625 chunks, 5,664 tokens. For
# almost all of Ada's prompt, her cache stays where it is.
#
# Computing a prompt is called **prefill**, and ringlab's `prefill` does both. If keys travel, a rank's cached tokens and its tokens of the
# chunk are *one* block. The blocks may differ in length. They go around the ring once, in P − 1 hops, and the mask compares positions as
# above. Afterwards the chunk is appended to the cache. `travels="auto"` counts the bytes, and chooses for each chunk:


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
# The weights take more than six times as long as the cache. And a matrix that has been read multiplies sixteen tokens almost as quickly as
# one.

# %% tags=["nbval-ignore-output"]
predict(
    "19.batch",
    "Sixteen such users decode in the same steps. How many tokens a second do they get together?",
    ["100", "700", "1,500"],
)

# %%
steps = {users: serve_time(server(sequences=users, context=BOOK)) for users in (1, 4, 16)}
drawn = steps, "Users share the weights, not the caches"
show(serving_view.step_bars(*drawn), serving_view.describe_step_bars(*drawn))
together = steps[16].tokens_per_s
compare("19.batch", f"{min((100, 700, 1_500), key=lambda n: abs(n - together)):,}")

# %% [markdown]
# **About 700.** The green part does not grow: weights are read once, for all users. The orange part grows with every user, from 0.8 ms to
# 12.8 ms, since each user attends to his own tokens only. **A batch shares the weights, but not the caches.** (The grey part is messages
# between the ranks; section 7 comes to them.)
#
# That solves the second riddle, too. After Ada's prompt Ben's own cache is as short as before, but each step also reads hers:

# %%
for name, step in {"Ben alone": ben.token, "with Ada ": ada[512].token}.items():
    print(f"{name}: weights {1e3 * step.weights_s:.1f}, caches {1e3 * step.cache_s:.1f},",
          f"messages {1e3 * step.exposed_s:.1f} ms")

# %% [markdown]
# **Halfway. This is a good place to stop.** You know what users share, and what they do not.
#
# ## 5 · Two copies of something
#
# Sixteen users have come, and there are 16 ranks. Tensor parallelism (TP) cuts the weights by heads and columns, so 16 parts are easy. It
# cuts a cache by K/V heads, and Llama 3 70B has only 8 of them. So something has to be there twice:
#
# - **TP 16** cuts the weights into 16 parts. Two ranks keep the same part of every cache.
# - **TP 8 × CP 2** is how the server has worked so far. It cuts the weights into 8 parts, and each node has all of them. Each node caches
#   half of the tokens of every user, which is context parallelism (CP).
#
# The numbers in the picture are ranks.

# %%
GRIDS = {"TP 16": {"token_ranks": 1, "head_ranks": 16}, "TP 8 × CP 2": grid}
ways = {name: server(sequences=1, context=BOOK, **GRIDS[name]) for name in GRIDS}
show(serving_view.copies(ways), serving_view.describe_copies(ways))

# %% [markdown]
# Which copy costs less? To see that, give the server *one* NVLink for a while, as if a node had 16 ranks. Then messages are cheap either
# way.

# %% tags=["nbval-ignore-output"]
predict(
    "19.grid",
    "On one NVLink, TP 16 is faster than TP 8 × CP 2 for one user: "
    "it reads about half as many weights. From how many users on is TP 8 × CP 2 faster?",
    ["3", "8", "16", "never"],
)

# %%
one_node = replace(hardware("h100"), ranks_per_node=16)
on_one_link = partial(server, context=BOOK, hardware=one_node)
lines = {name: [serve_time(on_one_link(sequences=n, **GRIDS[name])) for n in range(1, 9)]
         for name in GRIDS}
faster = [cp.token_s < tp.token_s for tp, cp in zip(*lines.values(), strict=True)]
users = 1 + faster.index(True)
drawn = lines, users, "From three users on, a second copy of the caches costs more"
show(serving_view.steps_by_users(*drawn), serving_view.describe_steps_by_users(*drawn))
for name, steps in lines.items():
    print(f"{name:11}  {', '.join(f'{1e3 * each.token_s:.1f}' for each in steps[:3])} ms", end=" ")
    print("for 1, 2 and 3 users")
compare("19.grid", f"{min((3, 8, 16), key=lambda n: abs(n - users))}")

# %% [markdown]
# **From three users on.** With two copies of the weights, a rank reads twice as many weights, but only once in a step. With two copies of
# the caches, it reads twice as much *for each user*. So TP 16 begins about 1 ms ahead, and loses 0.8 ms with every further user. **The more
# users there are, the more the caches count.**
#
# ## 6 · One copy of both
#
# Is there a way without either copy? In TP 16 two ranks keep the same part of every cache. Let each of them keep half of its tokens. vLLM
# calls this *decode context parallelism*, and we call it **TP 16 + DCP 2**. (Both ranks still need the projections of their K/V head. So
# the weights are cut into 16 parts except for these.)
#
# ### Where the next token goes
#
# Which half does a rank keep? Ben's answer grows by a token in every step, and both ranks should fill evenly. So tokens are dealt in pieces
# of `interleave` tokens, one rank after the other. Here `interleave` is 4, and a text has 14 tokens so far:


# %%
def dealt(ring):
    """The tokens of a text of 14 on this rank, in the order in which the rank keeps them."""
    cache = PagedCache(ring, kv_heads=K, head_dim=D, pages=1, page=8, interleave=4)
    text = cache.add()
    cache.append(k[:, :, :14], v[:, :, :14], [text], [14])
    return cache.positions(text)


for rank, tokens in enumerate(VirtualCluster(2).run(dealt).results):
    print(f"rank {rank} keeps tokens", *tokens)

# %% [markdown]
# A token's place follows from its number, and never changes. Token 9 is in the third piece, which is the second piece of rank 0. Its
# **slot**, its index on this rank, is 5.
#
# ### Queries of some heads, keys of some tokens
#
# Now there is a problem. Eight query heads need this K/V head. Each of the two ranks has computed the queries of 4 of them, and caches half
# of the tokens. Yet each of the 8 heads needs all tokens. (Lesson 15 did not have this problem. There, all ranks had the queries of all
# heads.)
#
# So in every layer the ranks
#
# 1. **gather** the queries: every rank gets all heads of the new token;
# 2. **attend** with all heads to their own tokens, which gives a partial for each head;
# 3. **hand over** the partials: each rank gets those of *its* heads from everybody, and merges them.
#
# The picture shows four ranks. A box is a partial. Its blue half says whose heads, and its orange half whose tokens.

# %%
show(serving_view.hand_over(P), serving_view.describe_hand_over(P))

# %% [markdown]
# The hand-over turns columns into rows, so it is an all-to-all. `decode_heads` does the three steps. We decode the last token of our text
# with 4 ranks, each with 2 of the 8 heads:


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
# To each of 3 others a rank sends the queries of its own 2 heads, D = 16 numbers each. Later it sends the partials of the *other's* 2
# heads, D + 1 = 17 numbers each. With 4 bytes a number that is 3 · 2 · (16 + 17) · 4 = 792 bytes, however long the text is.
#
# Step 3 merges the partials of all ranks at once. Each rank here caches 50 tokens. Do all have the same share of a head's result?

# %%
head = 3
scores = q[0, head, -1] @ k[0, 0].T / D**0.5  # heads 0 to 3 read K/V head 0
lses = torch.stack([scores[rank::P].logsumexp(0) for rank in range(P)])
outs = torch.stack([scores[rank::P].softmax(0) @ v[0, 0, rank::P] for rank in range(P)])
shares = torch.exp(lses - lses.logsumexp(0))
print("shares of the ranks:", ", ".join(f"{share:.0%}" for share in shares))
print("right to 1e-5:", error(shares @ outs, true[0, head, -1]) < 1e-5)

# %% [markdown]
# No. As in lesson 02, a rank's share is its part of the sum of all $e^{score}$, and lse is the logarithm of its own sum. A rank that caches
# no token of a user yet has lse −∞ and share 0, and takes part like any other. Servers have got this merge wrong, for example by taking an
# lse of base 2 for one of base e. [Field reports](../docs/field-reports.md#merges-of-out-lse-decode) has their stories.
#
# ## 7 · Back on two nodes
#
# So which way should Ben's server take? So far messages were cheap. But the ranks that divide the weights must *add up* their results twice
# in every layer, by the all-reduce of lesson 14. TP 8 × CP 2 adds up inside a node. The other two add up over all 16 ranks, so on the real
# server they add up between the nodes. Here are the steps of sixteen users:

# %%
GRIDS["TP 16 + DCP 2"] = {"token_ranks": 2, "head_ranks": 8, "sharing": "dcp"}
for place, machine in {"one NVLink": one_node, "two nodes": "h100"}.items():
    for way in GRIDS:
        asked = server(sequences=16, context=BOOK, hardware=machine, **GRIDS[way])
        said = "too much for the memory"
        if most_sequences(asked, asked.machine.memory_bytes) >= 16:
            token = serve_time(asked).token
            said = f"{1e3 * token.total_s:.1f} ms, {1e3 * token.exposed_s:.1f} of them for messages"
        print(f"{place:10}  {way:13}  {said}")

# %% [markdown]
# TP 16 cannot even hold two copies of sixteen caches. On one NVLink, TP 16 + DCP 2 is fastest. On two nodes it is TP 8 × CP 2, because
# messages between the nodes cost more than a second copy of the weights. So Ben's server stays as it is.
#
# Both winners keep one copy of each cache. **With many users, the caches must be divided among all ranks. The network decides whether the
# weights are divided among all ranks, too.**
#
# ## Recap
#
# Look at the first picture once more. What makes Ben wait longer is Ada's cache, the orange of the pictures. It makes each of her chunks
# longer than the one before, and later it makes each of their common steps longer.
#
# - A chunk of a prompt attends to its cached prefix, a rectangle, and to itself, a triangle. The attention of equal chunks costs
#   1 : 3 : 5 : 7. Short chunks let others in, and cost little. Positions go on after the prefix.
# - After a long prefix the cache stays, queries travel, and partials come home: these are fewer bytes.
# - A step reads the weights once for all users, and the cache of each. So the more users there are, the more the caches count.
# - With 8 K/V heads, 16 ranks divide a cache by tokens as well. Otherwise each rank reads twice as much for every user.
# - A rank with queries of some heads and keys of some tokens gathers queries, attends to its own tokens, and hands partials to the owners
#   of their heads. Shares in the merge follow lse, not the number of tokens.
#
# ## Self-check
#
# <details><summary>1. A user with a cache of 262,144 tokens joins a batch of sixteen with 131,072 each. By how much does a step of TP 8 ×
# CP 2 grow?</summary> By about 1.6 ms, the reading of this cache: twice the 0.8 ms of one of the others. The weights are read
# anyway.</details>
#
# <details><summary>2. In a chat a user sends 50 new tokens after 40,000 cached ones. What travels?</summary>The queries: 40,050 is
# far more than 12 times 50, with section 3's sizes.</details>
#
# <details><summary>3. With pieces of 4 tokens and two ranks, where is token 22?</summary>In piece 5, counted from 0. 5 is odd, so it is on
# rank 1, which has pieces 1 and 3 already: slot 2 · 4 + 2 = 10.</details>
#
# <details><summary>4. With 8 users on 8 ranks, why not give each rank one whole user, with all weights?</summary>Eight times as many
# weights as now are more than its memory holds. And it would read all of them for the token of a single user. (Some servers give each rank
# whole users for attention alone, and share out the rest of the weights.)</details>
#
# Now [exercise 19](../exercises/19_serving.ipynb): places, merge, decode, prefill, and who should travel.
