# %% [markdown]
# # 19 · Serving a long context
#
# **Afterwards you can** compute a long prompt in chunks, keep the caches of many sequences in pages on many ranks, decode with heads and
# tokens shared out, and say what travels in each of these, and why.
#
# **You need first** [lesson 15](15_choosing.ipynb), decode against a sharded cache.
#
# **Minutes** 75 to read and run; the exercise takes another 75.
#
# A server meets many users at once, with prompts of any length. Two numbers count: the **time to first token**, and the **tokens per second**
# after it. They come from opposite phases. *Prefill* computes all tokens of a prompt side by side, and is limited by arithmetic. *Decode*
# computes one token after the other, reads all weights and the whole cache for each, and is limited by reading.

# %%
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ringlab import ShardedCache, VirtualCluster, contiguous, oracle
from ringlab.cost.hardware import hardware
from ringlab.cost.memory import kv_cache_bytes
from ringlab.cost.models import model
from ringlab.cost.planner.plan import plan
from ringlab.cost.planner.request import Request
from ringlab.cost.planner.serve_time import ServeRequest, serve_time
from ringlab.cost.serving import decode_heads_traffic, prefill_traffic
from ringlab.cost.sizes import Attention
from ringlab.merge import Partial, merge
from ringlab.serving import HelixGrid, PagedCache, decode_heads, prefill
from ringlab.viz.style import show
from ringlab_course import compare, corpus, predict
from ringlab_course.figures import serving_view

# %% tags=["nbval-ignore-output"]
predict(
    "19.phases",
    "Llama 3 70B on 16 H100 (2 nodes), one user, a prompt of 1,048,576 tokens. How many tokens "
    "could be decoded, one after the other, in the time of its prefill?",
    ["100", "1,000", "10,000", "100,000"],
)

# %%
plans = {what: plan(Request("llama3-70b", 2**20, "h100", nodes=2, purpose=what)).best
         for what in ("prefill", "decode")}
first, each = plans["prefill"].time.total_s, plans["decode"].step_s
for what, best in plans.items():
    print(f"{what:8} shared out as {best.degrees}")
reached = hardware("h100").reached
print(f"of the peak: {reached.attention_forward:.0%} for attention,",
      f"{reached.linear:.0%} for matrices")
print(f"prefill {first:.0f} s, then {1e3 * each:.0f} ms for a token:",
      f"{first / each:,.0f} tokens in the time of the prefill")
choices = (100, 1_000, 10_000, 100_000)
compare("19.phases", f"{min(choices, key=lambda n: abs(np.log(first / each / n))):,}")

# %% [markdown]
# (A model of the time: arithmetic at these shares of the peak, memory at its full rate.) The two phases want different divisions of the
# ranks: prefill a ring over all of them, decode mostly tensor parallelism. So some servers prefill
# and decode on different GPUs, and send the cache across. (In the decode plan `ring=2` is lesson 15's CP 2: no keys go around.)
#
# ## 1 · A prompt in chunks
#
# A prompt is computed in **chunks**, with steps of decode for other users in between. A chunk attends to the **prefix**, all tokens before
# it, whose keys and values are cached; and to itself, causally.
#
# Its mask is no triangle. Here are three chunks of uneven lengths. The last begins at position 97, and its first query must see 98 keys. PyTorch's
# `is_causal` lets query i see keys 0 to i, so the first sees one. In the pictures the keys that a query sees are blue; the dotted line is the end of the prefix:

# %%
S, P, H, K, D = 200, 4, 8, 2, 16
CHUNKS = (slice(0, 90), slice(90, 97), slice(97, 200))
q, k, v = corpus.qkv(S, heads=H, kv_heads=K, head_dim=D)
true = torch.from_numpy(oracle.attention(q, k, v, causal=True).out)
last = CHUNKS[2]
wrong = scaled_dot_product_attention(q[:, :, last], k, v, is_causal=True, enable_gqa=True)
error = (wrong - true[:, :, last]).abs().max() / true.abs().max()
print(f"the last chunk with is_causal=True: off by {error:.2f} of the largest value")
show(serving_view.chunk_masks(97, 103), serving_view.describe_chunk_masks(97, 103))

# %% [markdown]
# So the mask and the rotary embedding must get the positions 97 to 199, not 0 to 102.
#
# In ringlab a chunk is one call. Each rank's cached tokens and its tokens of the chunk form one block of keys; these blocks go around the ring
# once, and the mask compares positions. The cache gives the first `interleave` tokens to rank 0, the next to rank 1, and so on around;
# `next_layout` deals out a chunk in the same way, so each key is computed where it is cached. (Many small pieces balance it.) `prefill` also appends the chunk to the cache. Here on 4 ranks
# (pages come in section 3):


# %%
def in_chunks(ring, travels="kv"):
    """The prompt chunk by chunk: the layout of each, and this rank's rows."""
    cache = PagedCache(ring, kv_heads=K, head_dim=D, pages=16, page=8, interleave=8)
    prompt, outs = cache.add(), []
    for chunk in CHUNKS:
        layout = cache.next_layout(prompt, chunk.stop - chunk.start)
        own = layout.shard((q[:, :, chunk], k[:, :, chunk], v[:, :, chunk]), ring.rank)
        outs.append((layout, prefill(*own, cache, prompt, layout=layout, travels=travels)))
    return outs


def as_in_one_pass(run, number):
    """Whether a chunk's outputs, put together from all ranks, are those of one pass, to 1e-5."""
    layout, _ = run.results[0][number]
    out = layout.unshard([outs[number][1] for outs in run.results])
    expected = true[:, :, CHUNKS[number]]
    return bool((out - expected).abs().max() / true.abs().max() < 1e-5)


run = VirtualCluster(P).run(in_chunks)
for number, chunk in enumerate(CHUNKS):
    right = as_in_one_pass(run, number)
    print(f"tokens {chunk.start:3} to {chunk.stop - 1:3}: as in one pass, to 1e-5: {right}")

# %% [markdown]
# Later chunks also have more keys to attend to:

# %% tags=["nbval-ignore-output"]
predict(
    "19.chunks",
    "A causal prompt in four chunks of equal length. The last chunk has how many times as many "
    "pairs of query and key as the first?",
    unit="times",
)

# %%
pairs = [sum(token + 1 for token in range(n * 1024, (n + 1) * 1024)) for n in range(4)]
print("pairs of each chunk, over those of the first:", [round(n / pairs[0], 2) for n in pairs])
compare("19.chunks", pairs[3] / pairs[0])

# %% [markdown]
# The attention of equal chunks costs 1 : 3 : 5 : 7; their linear layers cost the same.
#
# How long should a chunk be? A short one lets others in sooner, but computes less for each message and each reading of the weights. Here is the
# first cell's prompt, by the planner's model, on ranks that also decode. So they are divided as for decode, 8 for tensor parallelism × 2 for the ring:

# %%
print("chunk    chunks alone    with steps for others    longest wait of others")
for tokens in (512, 2_048, 8_192, 32_768):
    served = serve_time(ServeRequest("llama3-70b", "h100", sequences=1, context=2**20,
                                     token_ranks=2, head_ranks=8, sharing="copies", chunk=tokens))
    step_s = served.token.weights_s + served.token.tensor_s  # a token of others, with short caches
    with_others = served.first_token_s + len(served.chunks_s) * step_s
    print(f"{tokens:6,} {served.first_token_s:11.1f} s {with_others:20.1f} s",
          f"{1e3 * max(served.chunks_s):22,.0f} ms")

# %% [markdown]
# With chunks of 512 others wait a sixtieth of the time that they wait with 32,768. Their price: 2²⁰ tokens are
# 2,048 such chunks, and with a step of decode after each the first token comes after 180.0 s, not 156.0.
#
# ## 2 · Who should travel?
#
# The chunk's queries and the prefix's keys lie on different ranks, so one of the two must travel. In one pass around a ring a token's keys and values are
# fewer bytes than its queries and partials, and travel once. In chunks the same prefix travels again for every chunk, perhaps a
# hundred times, and the **queries** of one chunk are few. But if they travel, partial results, out and lse, must come home to the owner of the
# query ([arXiv 2411.01783](https://arxiv.org/abs/2411.01783)). In the picture a tall bar is keys and values, a square is queries. A
# two-coloured box is a partial: its left colour says whose queries, its right colour whose keys.

# %%
show(serving_view.travellers(4), serving_view.describe_travellers(4))

# %% tags=["nbval-ignore-output"]
predict(
    "19.travel",
    "One layer; chunks of 4,096 tokens on 8 ranks; 64 query heads and 8 K/V heads of 128. "
    "Queries, keys and values have 16 bits, partials 32. "
    "From which length of the prefix on do queries, with partials sent back, cost fewer bytes?",
    ["4,000", "16,000", "50,000", "500,000"],
)

# %%
sizes, ranks, chunk = Attention(H=64, K=8, D=128, dtype="bfloat16"), 8, 4096


def sent(prefix, travels):
    """The bytes that a rank sends for the chunk after `prefix` cached tokens."""
    each = [prefix // ranks] * ranks
    return prefill_traffic(sizes, contiguous(chunk, ranks), each, travels=travels).total_bytes


prefixes = [2**n for n in range(12, 21)]
lines = {"keys and values": [sent(n, "kv") for n in prefixes],
         "queries and partials": [sent(n, "q") for n in prefixes]}
meet = next(n for n in range(0, 2**20, 64) if sent(n, "kv") >= sent(n, "q"))
show(serving_view.bytes_by_prefix(prefixes, lines, meet),
     serving_view.describe_bytes(prefixes, lines, meet))
near = (4_000, 16_000, 50_000, 500_000)
compare("19.travel", f"{min(near, key=lambda n: abs(np.log(meet / n))):,}")

# %% [markdown]
# A token's key and value are 2·K·D numbers of 2 bytes, 4 KiB. Its query has H·D numbers of 2 bytes, 16 KiB, and its partial H·(D + 1) of 4
# bytes, 32¼ KiB: together 12.0625 times as much. Keys travel for prefix and chunk, queries for the chunk alone. So the bytes are equal when
# prefix and chunk together are as long as 12.0625 chunks, so when the prefix alone is as long as 11.0625: 45,312 tokens, where the lines meet. `prefill` counts the bytes and chooses for
# each chunk; `travels=` overrides it. The result is the same:

# %%
for travels in ("kv", "q", "auto"):
    run = VirtualCluster(P).run(in_chunks, travels)
    print(f"travels={travels:4}  right to 1e-5: {as_in_one_pass(run, 2)},",
          f"rank 0 sends {run.trace.bytes_sent(0):,} bytes in all")

# %% [markdown]
# `auto` sends least, since it chooses anew for each chunk. Here all numbers have 32 bits, and 4 query heads share a K/V head. So a token's query and
# partial are 8 · (2 · 16 + 1) = 264 numbers, its key and value 2 · 2 · 16 = 64: 4.125 times as many.
# The second chunk has seven tokens after 90, and 97 is more than 4.125 · 7: queries travel. In the last, 97 + 103 is less than 4.125 · 103: keys do.
#
# ## 3 · Pages
#
# Sequences grow and end. One piece of memory for each would have to be as long as the sequence might ever become. So memory is cut into
# **pages** of some tokens. A sequence has a *block table*, the list of its pages, and takes a page from the pool when its last one is full.
#
# On many ranks tokens are also dealt out. `interleave` is how many neighbours go to one rank: the first eight of a sequence to rank 0, the next
# eight to rank 1, and so on around. `page` is how many tokens a page holds *on each rank*, a multiple of `interleave`. Here both are 8, so a page on
# 4 ranks holds 32 consecutive tokens. Three sequences share a pool. The second is a **fork** of the first: it has the
# first 64 tokens in common, say a system prompt. The third has nothing in common with them.


# %%
def several(ring):
    """Three sequences; the second shares 64 tokens with the first. Who is on each page?"""
    cache = PagedCache(ring, kv_heads=K, head_dim=D, pages=10, page=8, interleave=8)
    first, third = cache.add(), cache.add()
    cache.append(k[:, :, :70], v[:, :, :70], [first], new=[70])
    forked = cache.fork(first, 64)
    free = [cache.free_pages]
    cache.append(k[:, :, :40], v[:, :, :40], [forked, third], new=[20, 20])  # 20 tokens for each
    free.append(cache.free_pages)
    names = {first: "first", forked: "fork", third: "third"}
    span, held = 8 * ring.world_size, [[] for _ in range(10)]
    for number, name in names.items():
        for at, page in enumerate(cache.tables.pages[number]):
            held[page].append((name, min(span, cache.length(number) - at * span)))
    return held, free, list(names.values())


# %% tags=["nbval-ignore-output"]
predict(
    "19.fork",
    "A page holds 32 tokens on all ranks together. The first sequence has 70 tokens; the "
    "fork shares 64 of them, and then grows by 20. How many pages does the fork take from "
    "the pool?",
    unit="pages",
)

# %%
held, free, names = VirtualCluster(P).run(several).results[0]
show(serving_view.pages(held, 32, names, P), serving_view.describe_pages(held))
taken_by_third = sum(any(name == "third" for name, _ in owners) for owners in held)
print("free pages after the fork, and after fork and third have grown:", free)
compare("19.fork", free[0] - free[1] - taken_by_third)

# %% [markdown]
# A column is a page, its rows are the ranks. A hatched page belongs to two sequences, and both read all tokens on it: nothing was copied. A
# shared page into which one owner must write is copied first (*copy on write*):


# %%
def shared_to_the_last_token(ring):
    """Free pages before a fork of all 70 tokens, after it, and when it has grown by one."""
    cache = PagedCache(ring, kv_heads=K, head_dim=D, pages=10, page=8, interleave=8)
    first = cache.add()
    cache.append(k[:, :, :70], v[:, :, :70], [first], new=[70])
    free, forked = [cache.free_pages], cache.fork(first, 70)
    free.append(cache.free_pages)
    cache.append(k[:, :, :1], v[:, :, :1], [forked], new=[1])
    return [*free, cache.free_pages]


print("free pages:", VirtualCluster(P).run(shared_to_the_last_token).results[0])

# %% [markdown]
# The fork took no page. Its 71st token fits in the page that it shares. So this was copied first, and the copy is the page that is gone.
#
# If a server frees a shared page as soon as one owner ends, the next user's tokens overwrite
# the prompt of the owner that remains. So a page counts its owners.
#
# A shared prefix also saves its prefill, so servers keep common ones. A new prompt has to match exactly: a single different token changes every later
# key, in all layers but the first.
#
# **Halfway. This is a good place to stop.** You know how a prompt is computed and kept. The rest is about decode.
#
# ## 4 · Decode when heads are divided
#
# In lesson 15's sharded cache the ranks that divide the tokens all had the same queries. A server divides the weights by heads (tensor parallelism), so each rank has H/P query
# heads. With 8 K/V heads, more than 8 ranks cannot divide the *cache* by heads without copies. The simplest way out divides it by tokens, over all P
# ranks. A rank then has the queries of some heads, and the keys of all heads for some tokens. (Section 6 divides the cache by both.) The new token's key and
# value, of all heads, go to the rank that caches it. Then a step of this *decode context parallelism* is:
#
# 1. **gather** the queries: every rank gets all heads of the new token;
# 2. **attend** with all heads to this rank's own tokens: a partial, out and lse, for each head;
# 3. **hand over**: each rank gets the partials of *its* heads from everybody, and merges them.
#
# In the picture each rank has two squares, after steps 2 and 3: heads from top to bottom, tokens from left to right. A filled box is a partial that the
# rank has:

# %%
show(serving_view.hand_over(P), serving_view.describe_hand_over(P))

# %% [markdown]
# The hand-over is a transposition (an all-to-all). `decode_heads` does the three steps, here for two sequences of different lengths at once.


# %%
def two_sequences(ring):
    """Decode the last tokens of sequences of 150 and 33 tokens with this rank's H/P heads."""
    cache = PagedCache(ring, kv_heads=K, head_dim=D, pages=16, page=8, interleave=8)
    both = [cache.add(), cache.add()]
    for number, n in zip(both, (150, 33), strict=True):
        cache.append(k[:, :, :n], v[:, :, :n], [number], new=[n])
    own = slice(ring.rank * H // P, (ring.rank + 1) * H // P)
    newest = q[:, own][:, :, [149, 32]]  # axis 2: one new token of each sequence
    return decode_heads(newest, cache, both)


run = VirtualCluster(P).run(two_sequences)
out = torch.cat(run.results, dim=1)
for at, (n, row) in enumerate(((150, 149), (33, 32))):
    alone = torch.from_numpy(oracle.attention(q[:, :, row : row + 1], k[:, :, :n], v[:, :, :n]).out)
    error = (out[:, :, at : at + 1] - alone).abs().max() / alone.abs().max()
    print(f"sequence of {n:3} tokens: right to 1e-5: {error < 1e-5}")
print("rank 0 sends", run.trace.bytes_sent(0), "bytes for both")

# %% [markdown]
# To each of 3 others a rank sends the queries of its own H/P = 2 heads, D numbers each, and later the partials of the *other's* 2 heads, D + 1
# numbers each. With 2 sequences and 4 bytes a number: 3 · 2 · (16 + 17) · 2 · 4 = 1,584 bytes. (The new keys and values are in the caches already.)

# %% tags=["nbval-ignore-output"]
predict(
    "19.shared",
    "64 query heads of 128 on 16 ranks, all in 32 bits. In lesson 15 a rank sends the partials of "
    "all heads to each other rank. With divided heads it sends queries, then partials. How "
    "many times fewer bytes does the second way send?",
    unit="times",
)

# %%
heads, many = 64, 16
of_all = (many - 1) * heads * (128 + 1) * 4  # lesson 15: out and lse of every head
divided = decode_heads_traffic(Attention(H=heads, K=8, D=128, dtype="float32"), many)
print(f"{of_all:,} bytes a token, {divided.total_bytes:,} with divided heads")
compare("19.shared", of_all / divided.total_bytes)

# %% [markdown]
# Partials of H/P heads are 1/P of the bytes; the queries are nearly as many again. So the ratio is about P/2.
#
# ## 5 · The merge, where the bugs are
#
# The merge has [published bugs](../docs/field-reports.md) of its own, most of them about the base of the logarithm. Here one query attends to
# the tokens of three ranks, and the third rank holds none yet. Errors are relative to the largest value.

# %%
row = q[:, :, 149:150]
held_by = slice(0, 100), slice(100, 150), slice(150, 150)
parts = [oracle.attention(row, k[:, :, own], v[:, :, own]) for own in held_by]
outs, lses = (torch.stack([torch.from_numpy(x) for x in each]) for each in zip(*parts, strict=True))
alone = torch.from_numpy(oracle.attention(row, k[:, :, :150], v[:, :, :150]).out)


def off(out):
    return f"{((out - alone).abs().max() / alone.abs().max()).item():.2f}"


total = Partial(outs[0], lses[0])
for part in zip(outs[1:], lses[1:], strict=True):
    total = merge(total, Partial(*part))
base_2 = lses / np.log(2)  # as some kernels return it
shares = torch.softmax(base_2, dim=0)
counts = torch.tensor([100, 50, 0]) / 150
print("merged by lse:                  off by", off(total.out))
print("lse of base 2 taken for base e: off by", off((shares[..., None] * outs).sum(0)))
print("weighted by numbers of tokens:  off by", off((counts.view(3, 1, 1, 1, 1) * outs).sum(0)))
unwritten = outs.clone()
unwritten[2] = torch.nan  # memory that the rank without tokens has not written
weights = torch.softmax(lses, dim=0)
print("lse of the rank without tokens:", lses[2].unique().tolist())
print("its out not written:            off by", off((weights[..., None] * unwritten).sum(0)))

# %%
total = Partial.identity(row)
for tokens in ([*range(100), 149], [*range(100, 150)], [149]):  # each rank has token 149
    part = oracle.attention(row, k[:, :, tokens], v[:, :, tokens])
    total = merge(total, Partial(*(torch.from_numpy(x).float() for x in part)))
print("the new token on every rank: off by", off(total.out))

# %% [markdown]
# - **The base.** Some kernels return lse to the base 2, others to the base e. If base 2 is taken for base e, every difference of two lse is 1.44
#   times too large, and the part with the larger lse gets too much weight. The other way round it gets too little.
# - **Token counts** say nothing about scores.
# - **A rank without tokens** has lse −∞ and out 0. If its out is memory that nobody wrote, it may hold a NaN, and 0 · NaN is NaN. While a
#   sequence is no longer than `interleave`, all ranks but one are empty.
# - **A new token that every rank appends** to its own cache is counted P times.
#
# All these answers look plausible, but for the NaN. One more bug lies outside the merge: rotary embedding gets a token's index in its
# rank's cache, not its position in the sequence. `cache.next_positions(sequence, n)` gives the positions of the next n tokens.
#
# ## 6 · More ranks than K/V heads
#
# Llama 3 70B has 8 K/V heads. How can 16 ranks divide its cache and its weights? In section 4's way each gathers the queries of all heads, and
# exchanges partials with 15 others. Three ways send less:
#
# | | K/V cache on a rank | feed-forward weights on a rank | partials are merged with | all-reduce over |
# |---|---|---|---|---|
# | **TP 16** | 1/8: each part lies on two ranks | 1/16 | nobody | 16 ranks |
# | **TP 8 × CP 2** (lesson 15) | 1/16 | 1/8 | one rank, on the other node | 8 ranks, of one node |
# | **Helix 8 × 2** ([arXiv 2507.07120](https://arxiv.org/abs/2507.07120)) | 1/16 | 1/16 | one rank, a neighbour | 16 ranks |
#
# Helix reads least: it divides the cache as the second way, and all weights but those of q, k and v as the first. Its price is that of TP 16: a layer's two all-reduces go over 16 ranks, not 8.
# In the picture the numbers are ranks, and a hatched part is held twice:

# %%
cache = kv_cache_bytes(model("llama3-70b"), 2**20)
grids = {  # of each rank: first head, share of the heads, first token, share of the tokens
    "TP 16": [(r // 2 / 8, 1 / 8, 0, 1) for r in range(16)],
    "TP 8 × CP 2": [(r % 8 / 8, 1 / 8, r // 8 / 2, 1 / 2) for r in range(16)],
    "Helix 8 × 2": [(r // 2 / 8, 1 / 8, r % 2 / 2, 1 / 2) for r in range(16)],
}
for name, parts in grids.items():
    print(f"{name}: {cache * parts[0][1] * parts[0][3] / 1e9:.1f} GB of cache on a rank")
show(serving_view.shares(grids), serving_view.describe_shares(grids))

# %% [markdown]
# So Helix has 8 *rows*, one for each K/V head, of two ranks that divide its tokens between them. A row decodes a token like this:
#
# 1. both ranks compute the queries, keys and values of the row's heads, and one of them caches the new ones;
# 2. each attends to its own tokens;
# 3. each hands over the partials of the heads that the other will merge, half of the row's, as in section 4;
# 4. the output projection and the feed-forward go on with 16 parts.
#
# A small grid of 2 × 2 ranks, heads × tokens, with our 2 K/V heads:

# %%
def on_grid(ring):
    """One decoded token on a grid of 2 × 2: this rank's heads, and the tokens in its cache."""
    grid = HelixGrid(ring, token_ranks=2, head_ranks=2)
    mine = grid.attended(K)  # the K/V heads of this rank's row
    cache = ShardedCache(grid.tokens, batch=1, kv_heads=1, head_dim=D)
    cache.append(k[:, mine, :150], v[:, mine, :150])
    return grid.attend(q[:, grid.attended(H), 149:150], cache), cache.local_length


run = VirtualCluster(P).run(on_grid)
out = torch.cat([part for part, _ in run.results], dim=1)
print("tokens in each rank's cache:", [length for _, length in run.results], "of one K/V head each")
print("right to 1e-5:", bool((out - alone).abs().max() / alone.abs().max() < 1e-5))

# %% [markdown]
# And the time of a token of Llama 3 70B, on 2 nodes of 8. *Add up* is the all-reduces of hidden states, which between nodes are slow; *merge* is the
# hand-over of partials:

# %%
h100 = hardware("h100")
# Ranks for tokens, ranks for heads; "copies": ranks that divide the tokens have the same weights.
WAYS = {"TP 16": (1, 16, "copies"), "TP 8 × CP 2": (2, 8, "copies"), "Helix 8 × 2": (2, 8, "helix")}


def token_ms(machine, way):
    """Milliseconds of a token after 2²⁰ others, by what they are spent on."""
    token_ranks, head_ranks, sharing = WAYS[way]
    grid = {"token_ranks": token_ranks, "head_ranks": head_ranks, "sharing": sharing}
    asked = ServeRequest("llama3-70b", machine, sequences=1, context=2**20, **grid)
    token = serve_time(asked).token
    seconds = token.weights_s, token.cache_s, token.tensor_s, token.merge_s, token.total_s
    return [1e3 * each for each in seconds]


def print_ways(where, machine):
    """Print the table of all ways, and return the fastest."""
    print(f"{where:18} weights   cache  add up   merge   total  (ms)")
    times = {way: token_ms(machine, way) for way in WAYS}
    for way, parts in times.items():
        print(f"{way:18}", "".join(f"{each:8.1f}" for each in parts))
    return min(times, key=lambda way: times[way][-1])


print("fastest:", print_ways("2 nodes of 8", h100))

# %% tags=["nbval-ignore-output"]
predict(
    "19.helix",
    "The same token on the same 16 chips, but all on one NVLink. Which way takes the least time?",
    ["TP 16", "TP 8 × CP 2", "Helix 8 × 2"],
)

# %%
compare("19.helix", print_ways("one of 16", replace(h100, ranks_per_node=16)))

# %% [markdown]
# Compared with TP 8 × CP 2, Helix saves 2.4 ms of reading weights, and on two nodes 0.8 ms of merging. Adding up over 16 ranks costs it 4.5 ms more on two
# nodes, where TP 8 × CP 2 wins, but only 1.1 ms more on one NVLink, where Helix wins.
#
# ## 7 · What travels for attention
#
# | in | travels | how much |
# |---|---|---|
# | prefill, short prefix | K and V | 2KD numbers (4 KiB with section 2's sizes) of each token of prefix and chunk, to all ranks |
# | prefill, long prefix | queries, and partials home | H (2D + 1) numbers (48¼ KiB) of each token of the chunk, out to all ranks and back |
# | decode, ranks have the same heads (lesson 15) | partials | H (D + 1) numbers, to each other rank |
# | decode, divided heads | queries, then partials of the receiver's heads | H/P (2D + 1) numbers, to each other rank |
# | decode, divided heads | the new K and V | 2KD numbers in all, to the rank that caches the token; none in Helix |
# | decode, Helix on N ranks | partials inside a row | H/N (D + 1) numbers, to each other rank of the row |
#
# ## Recap
#
# - Prefill is arithmetic. Decode is mostly reading; on 16 ranks messages (*add up* and *merge* in section 6) took 22 % to 47 % of the time. They want different divisions of the same ranks.
# - A chunk attends to the cached prefix and to itself; its positions go on. The attention of equal chunks costs 1 : 3 : 5 : 7.
# - Short prefix: keys travel. Long prefix: queries travel, and their partials come home.
# - Pages let sequences grow and share. A page is free when nobody has it; a shared page is copied before it is written.
# - Decode: gather queries, attend to own tokens, hand partials to the owners of their heads. The bytes do not depend on the length.
# - Merge by lse, of one base, with (0, −∞) where there is no key.
# - A grid divides the cache by heads and tokens. Dividing all weights but those of q, k and v among all its ranks, as Helix does, pays on one fast network.
#
# ## Self-check
#
# <details><summary>1. Why do two ranks with equally many tokens not have equal shares in a merge?</summary>A rank's share is proportional to
# the sum of $e^{score}$ over its keys, not to their number. lse is the logarithm of that sum.</details>
#
# <details><summary>2. Why does Helix not simply divide the tokens among all ranks?</summary>Then every rank would have to compute the queries of all
# heads, or gather them, and would send partials to all others. In a row it is one eighth of the heads, and one other rank.</details>
#
# Now [exercise 19](../exercises/19_serving.ipynb): places, merge, decode, prefill, and who should travel.
