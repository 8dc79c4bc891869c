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
# Ben is reading an answer. Llama 3 70B writes it on 16 H100, in two nodes of 8, and a new token appears every ten milliseconds. Inside a
# node, the 8 GPUs divide the heads and the weights. The two nodes divide the tokens of every text. Each node computes its part of a prompt
# through all layers, so each node needs all the weights. Afterwards each node caches its part.
#
# Then Ada sends the same server a prompt of 1,048,576 tokens, a shelf of books. Computing a prompt is called **prefill**. The server does
# it in **chunks**, and after each chunk makes one step of **decode**, in which Ben gets his next token. What does Ben see?

# %%
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ringlab import ShardedCache, VirtualCluster, contiguous, oracle
from ringlab.cost.hardware import hardware
from ringlab.cost.models import model
from ringlab.cost.planner.serve_time import ServeRequest, serve_time
from ringlab.cost.serving import prefill_traffic
from ringlab.cost.sizes import Attention
from ringlab.serving import decode_heads, prefill
from ringlab.viz.style import show
from ringlab_course import compare, corpus, predict
from ringlab_course.figures import serving_view

# %%
# "copies": each node has all weights
grid = {"token_ranks": 2, "head_ranks": 8, "sharing": "copies"}
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
both = serve_time(server(sequences=2, context=(2**20 + 4096) // 2))  # the model takes the mean
both_s = both.token_s
print(f"steps of decode: {1e3 * ben_s:.1f} ms for Ben, {1e3 * both_s:.1f} ms after Ada's prompt")
drawn = runs, ben_s, both_s
show(serving_view.turns(*drawn), serving_view.describe_turns(*drawn))

# %% [markdown]
# The picture shows the last ten seconds of Ada's prompt. In the lower half the purple would be too thin to see, so there the orange is the
# whole chunk. Before each of his steps Ben waits for the chunk: up to 9,076 ms for a long one, and at most 147 ms for a short one. So
# servers cut prompts into short chunks.
#
# Two riddles are in this picture and the lines above it.
#
# - All of Ada's long chunks have 32,768 tokens. The first took 660 ms, drawn in purple, and the last takes 9,076 ms. Where do the other
#   8.4 s come from?
# - On the right, Ada's prompt is done, and each step computes a token for both. Ben's text is as short as before. Still, a step now takes
#   16.1 ms, and not 9.7 ms.
#
# One thing explains both, and it also rules out one way of dividing 16 GPUs among sixteen users (sections 5 to 7).
#
# (The times come from ringlab's model of a server, not from a measurement. Of Llama 3 70B only the sizes are borrowed: the real one cannot
# read a prompt this long. [Serving](../docs/guide/serving.md) says what the model leaves out.)
#
# ## 1 · The price of short chunks
#
# The **time to first token** is what Ada waits for. With 512 tokens in a chunk there are 64 times as many chunks, and after each of them
# the server works for Ben.

# %% tags=["nbval-ignore-output"]
predict(
    "19.price",
    "How much later does Ada's first token come, with chunks of 512 tokens in place of 32,768?",
    ["not at all", "a sixth later", "twice as late", "ten times as late"],
)

# %%
def nearest(x, names):
    """Return the name whose number is nearest to x, by its ratio."""
    return names[min(names, key=lambda number: abs(np.log(x / number)))]


until_first = {}
for chunk, served in ada.items():
    number = len(served.chunks_s)
    until_first[chunk] = served.first_token_s + (number - 1) * ben_s
    print(f"{number:5,} chunks of {chunk:6,} tokens: {served.first_token_s:.1f} s;", end=" ")
    print(f"with a step for Ben between them: {until_first[chunk]:.1f} s")
names = {1: "not at all", 7 / 6: "a sixth later", 2: "twice as late", 10: "ten times as late"}
compare("19.price", nearest(until_first[512] / until_first[32_768], names))

# %% [markdown]
# That is 182.4 − 156.1 = 26.3 s later. Ben gets 2,016 steps more than between long chunks, and at 9.7 ms each they are 19.6 s of it. The
# chunks themselves take only 6.7 s longer, or 4%. In each of them the ranks have to send each other messages, and a message takes some
# time however short it is (section 7).
#
# ## 2 · A chunk is a rectangle and a triangle
#
# The queries of a chunk attend to the **prefix**: all tokens before the chunk. Their keys and values lie in Ada's **cache**. The queries
# also attend to the chunk itself, causally.

# %%
show(serving_view.chunk_masks(4), serving_view.describe_chunk_masks(4))

# %% [markdown]
# Each chunk has one square more than the chunk before it. A square is two halves, so attention grows as 1 : 3 : 5 : 7, while the
# products with the weights stay the same. Ada's prompt has 32 long chunks:

# %%
longer_s = np.diff(ada[32_768].chunks_s)
print(f"a chunk takes {longer_s.min():.3f} to {longer_s.max():.3f} s longer", end=" ")
print(f"than the one before it; {len(longer_s)} times, that is {longer_s.sum():.1f} s")

# %% [markdown]
# Every chunk takes the same 0.271 s longer: one more square each time. 31 of them are the 8.4 s of the orange piece. That solves the first
# riddle. The "one thing" is her cache: **the triangle stays, the rectangle grows with the cache.** The second riddle belongs to decode, in
# section 4.
#
# ### Where a chunk begins
#
# PyTorch's `is_causal=True` knows nothing of a prefix. It numbers queries and keys from 0. So it takes the chunk's first query for the
# first token of the prompt, and lets it see one key.

# %%
show(serving_view.last_chunk(4), serving_view.describe_last_chunk(4))

# %% [markdown]
# The mask has to compare positions in the prompt instead. We try both on the last 100 of 200 tokens of real text: queries 100 to 199, and
# keys 0 to 199.

# %%
S, H, K, D = 200, 8, 2, 16
q, k, v = corpus.qkv(S, heads=H, kv_heads=K, head_dim=D)
true = torch.from_numpy(oracle.attention(q, k, v, causal=True).out)


def error(out, expected):
    """The largest error, relative to the largest value."""
    return ((out - expected).abs().max() / true.abs().max()).item()


last, at = slice(100, S), torch.arange(S)
for name, mask in {
    "is_causal=True": {"is_causal": True},
    "positions": {"attn_mask": at[last][:, None] >= at},
}.items():
    out = scaled_dot_product_attention(q[:, :, last], k, v, enable_gqa=True, **mask)
    print(f"{name:14}: off by {error(out, true[:, :, last]):.1%} of the largest value")

# %% [markdown]
# ## 3 · The cache stays, the chunk travels
#
# Ada's cache lies on several ranks, and so do the queries of her next chunk. To meet, one of the two has to travel.
#
# In lesson 05 keys and values go around. But the **queries** can go around, too. Each rank attends to its own keys with the queries that
# visit it. The result is a **partial**: an out and an lse over this rank's keys only. It has to go back to the rank that owns the query
# ([arXiv 2411.01783](https://arxiv.org/abs/2411.01783)).

# %%
show(serving_view.travellers(4), serving_view.describe_travellers(4))

# %% [markdown]
# The model has 64 query heads and 8 K/V heads, and on Ada's server the 8 ranks of a node divide them. So a rank has, for each of its
# tokens, 8 queries, but one key and one value. It exchanges only with its partner in the other node, which has the same heads, so here P = 2.
#
# Without a prefix, keys and values are the smaller load. A token has one key and one value here, but 8 queries, and each query brings back
# a partial in float32. But a chunk has few queries, and a prefix has many keys.

# %% tags=["nbval-ignore-output"]
predict(
    "19.prefix",
    "Ada's chunks have 512 tokens. How long must the prefix be before queries and partials "
    "are fewer bytes than keys and values?",
    ["600", "6,000", "60,000", "600,000"],
)

# %%
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
compare("19.prefix", nearest(meet, {n: f"{n:,}" for n in (600, 6_000, 60_000, 600_000)}))

# %% [markdown]
# **5,664 tokens**, eleven times as many as the chunk has. If keys and values travel, a rank's block holds its part of prefix *and* chunk,
# and each rank sends P − 1 such blocks. If queries travel, it sends P − 1 blocks of the chunk's queries, and P − 1 blocks of partials. A
# block is always a P-th of something, so P cancels. With the bytes of one token, both ways are equal when
#
# $$(\text{prefix} + \text{chunk}) \cdot \text{bytes of } (k, v) = \text{chunk} \cdot \text{bytes of } (q, \text{partial}).$$


# %%
key_and_value, query, out_and_lse = 2 * 128 * 2, 8 * 128 * 2, 8 * (128 + 1) * 4  # bytes
pairs = (query + out_and_lse) / key_and_value
print(f"a token's queries and partials are as many bytes as {pairs} pairs of key and value")

# %% [markdown]
# So the limit is where prefix and chunk together are 12.0625 chunks long. The prefix alone is then 11.0625 chunks, or 5,664 tokens.
#
# Fewer bytes save time only if the ranks wait for bytes. All 8 pairs of ranks exchange at the same time, each over its own link. Do they
# wait?

# %%
link = hardware("h100").between
for name, travels in {"keys and values": "kv", "queries and partials": "q"}.items():
    sent_s = model("llama3-70b").layers * sent(2**20, travels) / link.bytes_per_s
    served = serve_time(server(sequences=1, context=2**20, chunk=512, travels=travels))
    print(f"{name}: {1e3 * sent_s:5.1f} ms from node to node, in all layers;", end=" ")
    print(f"Ada's last chunk takes {1e3 * served.chunks_s[-1]:.0f} ms")

# %% [markdown]
# They do. The nodes take far longer to exchange their halves of the cache than to compute the chunk. While the other half is on its way, a
# rank attends to its own, and the rest comes after. Queries and partials take only 2.5 ms, while the ranks compute. So it is worth
# comparing bytes before each chunk: with chunks of 512, the cache stays where it is from a prefix of about 6,000 tokens on.
#
# In the end each rank appends its own tokens of the chunk to its own cache. They stay on the rank that computed them, so this sends
# nothing. ringlab's `prefill` does all of it, and chooses anew for each chunk who travels. We try it on our 200 tokens with 4 ranks. Of
# three chunks the second is very short, so that its queries should travel:


# %%
P, CHUNKS = 4, (slice(0, 90), slice(90, 97), slice(97, 200))


def in_chunks(ring):
    """The prompt chunk by chunk: this rank's outputs."""
    cache, outs = ShardedCache(ring, batch=1, kv_heads=K, head_dim=D), []
    for chunk in CHUNKS:
        layout = contiguous(chunk.stop - chunk.start, P)
        own = layout.shard((q[:, :, chunk], k[:, :, chunk], v[:, :, chunk]), ring.rank)
        outs.append(prefill(*own, cache, layout=layout))
    return outs


run = VirtualCluster(P).run(in_chunks)
# the trace records each choice of rank 0: here, who travels
chosen = [each.chosen for each in run.trace.choices(0) if "travels" in each.asked]
for chunk, travels, *outs in zip(CHUNKS, chosen, *run.results, strict=True):
    right = error(torch.cat(outs, dim=2), true[:, :, chunk]) < 1e-5
    print(f"prefix {chunk.start:2}, chunk {chunk.stop - chunk.start:3}:",
          f"{travels:2} travels; right to 1e-5: {right}")

# %% [markdown]
# Queries travel for the 7 tokens only.
#
# ## 4 · One step for all
#
# Now the prompts are done, and everybody gets tokens. A GPU does little arithmetic for one token of a user, but it reads all of its weights
# and everything that it has cached. Reading is more than half of a step, and the rest is messages.
#
# In the following cells every user has 131,072 tokens in the cache, one long book. First one user alone:

# %%
BOOK = 2**17
one = server(sequences=1, context=BOOK)
alone = serve_time(one).token
weights, cache = one.weight_bytes / 1e9, one.cache_bytes(BOOK, 1) / 1e9
print(f"a GPU reads {weights:4.1f} GB of weights in {1e3 * alone.weights_s:.1f} ms")
print(f"        and {cache:4.1f} GB of the cache in {1e3 * alone.cache_s:.1f} ms")
rate = one.machine.flops_per_s["bfloat16"] * one.machine.reached.linear
sixteen_s = 16 * one.weight_bytes / rate  # for each token 2 operations with the 2 bytes of a weight
print(f"arithmetic with the weights, for 16 tokens: {1e3 * sixteen_s:.1f} ms")
print(f"with messages a step takes {1e3 * alone.total_s:.1f} ms:", end=" ")
print(f"{1 / alone.total_s:.0f} tokens a second")

# %% [markdown]
# The weights take more than six times as long as the cache. Even for sixteen tokens the arithmetic with the weights takes
# only 0.4 ms, and runs while they are read.

# %% tags=["nbval-ignore-output"]
predict(
    "19.batch",
    "Sixteen users, each with a book, decode in the same steps. "
    "How many tokens a second do they get together?",
    ["100", "700", "1,500"],
)

# %%
batches = {"1 user": 1, "4 users": 4, "16 users": 16}
steps = {name: serve_time(server(sequences=n, context=BOOK)) for name, n in batches.items()}
drawn = steps, "Users share the weights, not the caches"
show(serving_view.step_bars(*drawn), serving_view.describe_step_bars(*drawn))
together = steps["16 users"].tokens_per_s
compare("19.batch", nearest(together, {n: f"{n:,}" for n in (100, 700, 1_500)}))

# %% [markdown]
# **About 700.** The green part does not grow: weights are read once, for all users. The orange part grows with every user, from 0.8 ms to
# 12.8 ms, since each user attends to his own tokens only. **A batch shares the weights, but not the caches.** (The dark part is messages
# between ranks, for section 7.)
#
# That solves the second riddle, too. Back to Ben and Ada: after her prompt each step also reads her cache:

# %%
for name, step in {"Ben alone": ben.token, "with Ada ": both.token}.items():
    print(f"{name}: weights {1e3 * step.weights_s:.1f}, caches {1e3 * step.cache_s:.1f},",
          f"messages {1e3 * step.exposed_s:.1f} ms")

# %% [markdown]
# Ada's chunks grew because each of them *computes* with her whole cache. A step of decode grows because it *reads* the cache.
#
# **Halfway. This is a good place to stop.** You know what users share, and what they do not.
#
# ## 5 · Two copies of something
#
# Ben is now one of sixteen users with a book each, and waits 22.7 ms for a token. Would he wait less if the 16 ranks were divided in another
# way? Tensor parallelism (TP) cuts the weights by heads and columns, so 16 parts are easy. It cuts a cache by K/V heads. There are only 8
# of them for 16 ranks.
#
# - **TP 16** cuts the weights into 16 parts. Two ranks share a K/V head. So both keep the same part of every cache. (Both also hold this
#   head's projections, 0.2 GB more than a sixteenth of the weights.)
# - **TP 8 × CP 2** is how the server has worked so far. It cuts the weights into 8 parts, and each node has all of them. Each node caches
#   half of the tokens of every user, which is context parallelism (CP).
#
# TP 16 keeps every cache twice. TP 8 × CP 2 keeps the weights twice. The numbers in the picture are ranks.

# %%
GRIDS = {"TP 16": {"token_ranks": 1, "head_ranks": 16}, "TP 8 × CP 2": grid}
ways = {name: server(sequences=1, context=BOOK, **GRIDS[name]) for name in GRIDS}
show(serving_view.copies(ways), serving_view.describe_copies(ways))

# %% [markdown]
# Which copy costs less? We count reading alone, and keep messages for section 7.

# %% tags=["nbval-ignore-output"]
predict(
    "19.copies",
    "TP 16 reads about half as many weights as TP 8 × CP 2, and twice as much of each cache. "
    "From how many users on does TP 16 need longer to read both?",
    ["4", "8", "16", "never"],
)

# %%
steps = {(users, name): serve_time(server(sequences=users, context=BOOK, **GRIDS[name]))
         for users in range(1, 9) for name in GRIDS}
reads = {key: each.token.weights_s + each.token.cache_s for key, each in steps.items()}
longer = [n for n in range(1, 9) if reads[n, "TP 16"] > reads[n, "TP 8 × CP 2"]]
bars = {f"{n} users, {name}": step for (n, name), step in steps.items() if n in (3, 4, 8)}
drawn = bars, "From four users on, TP 16 reads longer", 2
show(serving_view.read_bars(*drawn), serving_view.describe_read_bars(*drawn))
compare("19.copies", f"{longer[0]}")

# %% [markdown]
# **From four users on.** TP 16 saves 2.6 ms of the weights, but only once in a step. It loses 0.8 ms with *every* cache, and 2.6 / 0.8 is a
# little more than three. **The more users there are, the more the caches count.** And do sixteen users fit?

# %%
memory = hardware("h100").memory_bytes


def held_gb(way):
    """The weights and sixteen users' caches on a GPU."""
    return (way.weight_bytes + way.cache_bytes(BOOK, 16)) / 1e9


for name, way in ways.items():
    print(f"16 users, {name}: weights and caches of {held_gb(way):.0f} GB,", end=" ")
    print(f"on a GPU of {memory / 1e9:.0f} GB ({memory / 2**30:.0f} GiB)")

# %% [markdown]
# With TP 16 they do not: a GPU has no room for 95 GB.
#
# ## 6 · One copy of both
#
# In TP 16 two ranks keep the same part of every cache. Let each of them keep only half of the tokens of that part. vLLM calls this *decode
# context parallelism*, and we call it **TP 16 + DCP 2**.
#
# Now there is a problem. Look at Ben's new token, at one K/V head, and at the two ranks that keep it. Eight query heads need it. Each rank
# has computed the queries of 4 of them, and caches half of Ben's book. Yet each of the 8 heads needs all of it. In lesson 15 all ranks had
# the queries of all heads.
#
# So in every layer the ranks
#
# 1. **gather** the queries: each of the two ranks gets all 8 heads of the new token;
# 2. **attend** with all heads to their own tokens, which gives a partial for each head;
# 3. **hand over** the partials: each rank gets the partials of *its* heads from the other rank, and merges them with its own.
#
# With four ranks in place of two, the pattern is easier to see. A box is a partial. Its blue half says whose heads, and its orange half
# whose tokens.

# %%
show(serving_view.hand_over(P), serving_view.describe_hand_over(P))

# %% [markdown]
# The hand-over turns columns into rows, so it is an all-to-all. `decode_heads` does the three steps. We decode the last token of our text
# in float32. Here all four ranks form one group: each has 2 of the 8 query heads, and keeps 50 of the 200 tokens, of both K/V heads. This
# cache deals tokens out in turn, so that the ranks fill evenly while an answer grows.


# %%
def last_token(ring):
    """The last token's attention with this rank's H/P heads."""
    cache = ShardedCache(ring, batch=1, kv_heads=K, head_dim=D)
    cache.append(k, v)  # every rank gets all tokens here, and keeps its own
    own = slice(ring.rank * H // P, (ring.rank + 1) * H // P)
    return decode_heads(q[:, own, -1:], cache)


run = VirtualCluster(P).run(last_token)
out = torch.cat(run.results, dim=1)
print("right to 1e-5:", error(out, true[:, :, -1:]) < 1e-5)
print("rank 0 sends", run.trace.bytes_sent(0), "bytes")

# %% [markdown]
# In step 1 a rank sends the queries of its own 2 heads to each of the 3 others: 2 · 16 numbers. In step 3 it sends to each the partials of
# *that rank's* 2 heads: 2 · 17 numbers, because a partial has an lse, too. With 4 bytes a number that is 3 · 2 · (16 + 17) · 4 = 792 bytes,
# however long the text is.
#
# Step 3 merges the partials of all ranks at once. As in lesson 02, a rank's share is its part of the sum of all $e^{score}$, and its lse is
# the logarithm of its own sum:

# %%
head = 3
scores = q[0, head, -1] @ k[0, 0].T / D**0.5  # heads 0 to 3 read K/V head 0
# the cache deals tokens out in turn, 50 to each rank
lses = torch.stack([scores[rank::P].logsumexp(0) for rank in range(P)])
outs = torch.stack([scores[rank::P].softmax(0) @ v[0, 0, rank::P] for rank in range(P)])
shares = torch.exp(lses - lses.logsumexp(0))
print("shares of the ranks:", ", ".join(f"{share:.1%}" for share in shares))
print("right to 1e-5:", error(shares @ outs, true[0, head, -1]) < 1e-5)

# %% [markdown]
# The shares differ, although each rank has 50 tokens. A rank that holds none of a user's tokens has lse −∞ and share 0. Servers have got
# this merge wrong, and [field reports](../docs/field-reports.md#merges-of-out-lse-decode) has their stories.
#
# ## 7 · Back on two nodes
#
# So which way should Ben's server take? TP 16 is out, because sixteen users do not fit. TP 16 + DCP 2 reads about half as many weights as
# TP 8 × CP 2, and the same amount of each cache. That leaves the messages.
#
# Most messages are sums. The ranks that divide one copy of the weights *add up* their results twice in every layer, by the all-reduce of
# lesson 14. With 80 layers that makes 160 sums in a step. In TP 8 × CP 2 the 8 ranks of a node add up, over NVLink. In TP 16 + DCP 2 all
# 16 ranks do, so every sum crosses from node to node.

# %%
# "dcp": weights in 16 parts, caches as in TP 8 × CP 2
GRIDS["TP 16 + DCP 2"] = {"token_ranks": 2, "head_ranks": 8, "sharing": "dcp"}
for way in ("TP 8 × CP 2", "TP 16 + DCP 2"):
    asked = partial(server, context=BOOK, **GRIDS[way])
    sums_s = {users: serve_time(asked(sequences=users)).token.tensor_s for users in (1, 16)}
    print(f"{way:13}: a sum takes {1e6 * sums_s[1] / 160:.0f} µs for one user,", end=" ")
    print(f"{1e6 * sums_s[16] / 160:.0f} µs for sixteen;", end=" ")
    print(f"160 sums are then {1e3 * sums_s[16]:.1f} ms")

# %% [markdown]
# A sum takes hardly longer for sixteen users than for one. Its numbers are few, and nearly all of the time is latency.
#
# The other messages are queries and partials. In TP 8 × CP 2 each node has all weights, so both compute the new token, a little work done
# twice. Then no query has to cross between the nodes, only partials. In TP 16 + DCP 2 the two ranks of a K/V head lie inside a node, so
# queries and partials do not cross.
#
# For comparison, the lower half of the picture supposes all 16 GPUs on one NVLink.

# %%
sixteen, h100 = partial(server, sequences=16, context=BOOK), hardware("h100")
machines = {"two nodes": h100, "one NVLink": replace(h100, ranks_per_node=16)}
steps = {f"{place}, {way}": serve_time(sixteen(hardware=machine, **GRIDS[way]))
         for place, machine in machines.items()
         for way in ("TP 8 × CP 2", "TP 16 + DCP 2")}
held = {way: f"{held_gb(sixteen(**GRIDS[way])):.0f} GB" for way in GRIDS}
print("on each GPU:", ", ".join(f"{size} with {way}" for way, size in held.items()))
drawn = steps, "TP 16 + DCP 2 is faster only on one NVLink", 2
show(serving_view.step_bars(*drawn), serving_view.describe_step_bars(*drawn))

# %% [markdown]
# On two nodes TP 8 × CP 2 is faster. With TP 16 + DCP 2 messages take 3.8 ms longer, and it saves only 2.6 ms of reading.
#
# And on one NVLink? A sum among sixteen ranks takes longer than among eight there, too, and queries travel as well as partials. But that
# costs only 1.4 ms, so TP 16 + DCP 2 is faster.
#
# ### One node by itself
#
# There is one more way. Each node serves eight of the users by itself, with TP 8. A GPU has no more to read than with TP 8 × CP 2, and
# nothing crosses at all. Is that not the best? We ask for the step, for Ada's prompt, and for memory.

# %%
node = partial(server, token_ranks=1)  # one of the nodes by itself
eight_s = serve_time(node(sequences=8, context=BOOK)).token_s
print(f"eight users on one node: {1e3 * eight_s:.1f} ms a step")
for name, way, others in (("one node", node, 7), ("two nodes", server, 15)):
    prompt = serve_time(way(sequences=1, context=2**20, chunk=512))
    print(f"Ada on {name}: her prompt takes {prompt.first_token_s:.0f} s,", end=" ")
    print(f"and its last chunk {1e3 * prompt.chunks_s[-1]:.0f} ms")
    it = way(sequences=1, context=BOOK)
    filled = it.weight_bytes + it.cache_bytes(2**20, 1) + it.cache_bytes(BOOK, others)
    print(f"  with {others} others a GPU of {memory / 1e9:.0f} GB needs {filled / 1e9:.0f} GB")

# %% [markdown]
# - **The step:** 21.4 ms are less than 22.7. One node is better for sixteen users with a book each.
# - **Ada's prompt,** if she comes again: on one node it takes twice as long. So does her last chunk, for which her neighbours wait.
# - **Memory:** on one node her cache has no room beside seven others, unless some of them move to the other node.
#
# So the server stays as it is. Ben and each of the others get 44 tokens a second. A single user got 96.
#
# All three ways of this section keep each cache once. **With many users, no cache should be kept twice.** Whether to keep the weights twice
# depends on the network: on two nodes, 3.8 ms more of messages stand against 2.6 ms less of weights. And whether the nodes should divide
# a text depends on the longest text that a user may send.
#
# ## Recap
#
# Look once more at the upper half of the first picture, and at the bars of section 4. In both, the orange is the time that caches cost.
# Ada's cache makes each of her chunks longer than the one before, and later each step that she shares with Ben.
#
# - A chunk of a prompt attends to its cached prefix, a rectangle, and to itself, a triangle. The attention of equal chunks costs
#   1 : 3 : 5 : 7. Short chunks let others in, and by themselves cost Ada 4%. Positions go on after the prefix.
# - After a long prefix the cache stays, queries travel, and partials come home: together they are fewer bytes than the cache.
# - A step reads the weights once for all users, and the cache of each. So the more users there are, the more the caches count.
# - 16 ranks divide a cache by its 8 heads, and each head's tokens among two. With TP 16 alone, each rank reads twice as much of every cache.
# - A rank with queries of some heads and keys of some tokens gathers queries, attends to its own tokens, and hands partials to the owners
#   of their heads. Shares in the merge follow lse, not the number of tokens.
#
# ## Self-check
#
# <details><summary>1. A user with a cache of 262,144 tokens joins a batch of sixteen with 131,072 each. By how much does a step of TP 8 ×
# CP 2 grow?</summary> By about 1.6 ms, the reading of this cache: twice the 0.8 ms of one of the others.</details>
#
# <details><summary>2. In a chat a user sends 50 new tokens after 40,000 cached ones. What travels?</summary>The queries: 40,050 is
# far more than 12 times 50, with section 3's sizes.</details>
#
# <details><summary>3. With 8 users on 8 ranks, why not give each rank one whole user, with all weights?</summary>Eight times as many
# weights as now are more than its memory holds. And it would read all of them for the token of a single user.</details>
#
# Now [exercise 19](../exercises/19_serving.ipynb): places, merge, decode, prefill, and who should travel. Lesson 19 is read between 15 and
# 16, so [lesson 16](16_bug_clinic.ipynb) comes next: faults like those of this merge hide in code that looks right.
