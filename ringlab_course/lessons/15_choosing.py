# %% [markdown]
# # 15 · Choosing: ring, all-gather, Ulysses, hybrid, decode
#
# **Afterwards you can** count the bytes that each schedule sends, and the time that ranks wait for them; choose one for
# a model and a cluster, and say why; decode, token by token, with keys and values that are spread over ranks.
#
# **You need first** [lesson 06](06_what_it_costs.ipynb), messages that computing hides, and
# [lesson 08](08_striped_and_zigzag.ipynb), layouts.
#
# **Minutes** 45 to read and run; the exercise takes another 60.
#
# Every rank's queries must meet every rank's keys and values. A ring is one way to arrange that. Three other schedules
# give the same result, at another cost. "Ulysses sends less than a ring, so take Ulysses" is a common rule.
#
# Here is the case of this lesson. Llama 3 8B runs on 16 H100, in two nodes of 8. Two prompts arrive: a **report** of 32,768
# tokens, and a **shelf** of books, 1,048,576 tokens. For both, a ring sends more than twice as many bytes as Ulysses. Yet
# Ulysses is the best choice for neither, and the two prompts need different schedules. **So what decides?** Part 1 counts
# bytes, waiting and memory. Part 2 maps which schedule waits least where, and decides the case. At the end the model writes
# its answer, and needs none of the four.

# %%
import numpy as np

from ringlab import (
    ShardedCache,
    VirtualCluster,
    decode,
    oracle,
    ring_attention,
    zigzag,
)
from ringlab.cost import choose
from ringlab.cost.hardware import hardware
from ringlab.cost.models import model as published
from ringlab.cost.planner import Request, plan
from ringlab.cost.traffic import ring_traffic, ulysses_traffic
from ringlab.errors import RinglabError
from ringlab.viz.style import show
from ringlab_course import compare, corpus, predict
from ringlab_course.figures import decision_map, exchanges

# %% [markdown]
# # Part 1 · Bytes, waiting, memory
#
# ## 1 · Four ways to meet
#
# - **Ring**: queries stay, and the K/V blocks of the other ranks come by, one at a time.
# - **All-gather**: queries stay here, too, but a rank first collects the K/V blocks of all others, and only then
#   computes.
# - **Ulysses** (arXiv 2309.14509): the ranks trade tokens for heads. In an **all-to-all**, every rank sends a different
#   part of its data to each other rank. Each rank then has all tokens of a few heads, so it can attend in these heads
#   alone. A second all-to-all returns the output to the owners of the tokens.
# - **Hybrid** (arXiv 2405.07719): group the ranks in rows of U. Inside a row they trade tokens for heads, as in Ulysses.
#   Then the ranks with the same heads, one from each row, form a ring of P/U. U = 1 is the plain ring, U = P is
#   Ulysses. In code, rows of 2 on 4 ranks are called `hybrid(ring=2, ulysses=2)`.
#
# This is the first all-to-all of Ulysses, for 16 tokens and 4 heads on 4 ranks. Each box is a **piece**: one head of one
# shard.

# %%
show(exchanges.trade(), exchanges.describe_trade())

# %% [markdown]
# Now all four. Which part does rank 1 compute, and whose keys and values does it need?

# %%
show(exchanges.schedules(), exchanges.describe_schedules())

# %% [markdown]
# Each blue area holds a quarter of all (token, head) pairs, so the work is divided equally. (A causal mask needs the
# layouts of lesson 08.)
#
# ## 2 · Counting bytes
#
# The unit is a piece: L·D numbers, where L = S/P is the number of tokens on a rank. With P = 4 ranks and
# H = K = 32 heads, a rank holds 32 pieces each of q, k, v and the output (out).
#
# - **Ulysses**: each rank ends up with 32/4 = 8 heads. So it sends to each of the 3 others 8 pieces of q, 8 of k and 8
#   of v, and later 8 of out.
# - **Hybrid, U = 2**: the two ranks of a row halve the heads. So a rank sends its partner 16 pieces of q, 16 of k and
#   16 of v, and later 16 of out. After the trade it holds 16 heads of two shards: 32 pieces of K and 32 of V. There
#   are two rows, so each ring has two ranks and makes one hop.

# %%
P, S, H, D = 4, 256, 32, 8
by_hand = {
    "ring": 3 * (32 + 32),  # 3 hops, K and V
    "allgather": 3 * (32 + 32),  # to 3 others, K and V
    "ulysses": 3 * (8 + 8 + 8) + 3 * 8,  # to 3 others q, k, v; to 3 others out
    "hybrid(ring=2, ulysses=2)": (16 + 16 + 16) + 16 + 2 * (16 + 16),  # q, k, v; out; one hop
}
piece_bytes = S // P * D * 4  # float32
for name, pieces in by_hand.items():
    print(f"{name:26}{pieces:4} pieces, {pieces * piece_bytes:9,} bytes")

# %% [markdown]
# Now run all four on real text. The trace counts what rank 0 sent:

# %%
folded = zigzag(S, P)


def on_rank(ring, schedule, K):
    shards = (folded.shard(x, ring.rank) for x in corpus.qkv(S, heads=H, kv_heads=K, head_dim=D))
    options = {"schedule": schedule, "causal": True, "block": "naive", "validate": False}
    return ring_attention(*shards, ring=ring, layout=folded, **options)


def metered(schedule, K):
    """The outputs of all ranks put together, and the bytes that rank 0 sent."""
    run = VirtualCluster(P).run(on_rank, schedule, K)
    return folded.unshard(run.results), run.trace.bytes_sent(0)


truth = oracle.attention(*corpus.qkv(S, heads=H, head_dim=D), causal=True)[0]
for name, pieces in by_hand.items():
    result, rank_0_sent = metered(name, H)
    close = np.abs(result.numpy() - truth).max() / np.abs(truth).max() < 1e-5
    right = rank_0_sent == pieces * piece_bytes
    print(f"{name:26}{rank_0_sent:9,} bytes, as counted: {right}; equal to one process: {close}")

# %% [markdown]
# Ulysses sends half of what the ring sends. With more ranks it looks even better: the ring sends 64 · (P − 1) pieces,
# Ulysses fewer than 128 in all, because each piece of q, k, v and out travels at most once.
#
# ## 3 · Grouped heads turn the order round
#
# But so far K = H. With **grouped heads**, several query heads share a K/V head.

# %% tags=["nbval-ignore-output"]
predict(
    "15.times",
    "4 ranks, 32 query heads, 4 K/V heads: how many times the ring's bytes does Ulysses send?",
    unit="times",
)

# %%
(_, ring_sent), (_, ulysses_sent) = metered("ring", 4), metered("ulysses", 4)
print(f"ring:    {ring_sent // piece_bytes} pieces, 3 · (4 + 4)")
print(f"Ulysses: {ulysses_sent // piece_bytes} pieces, 3 · (8 + 1 + 1) + 3 · 8")
compare("15.times", ulysses_sent / ring_sent)

# %% [markdown]
# The order is reversed. With an eighth of the K/V heads, all of the ring's traffic shrinks to an eighth. But half of
# Ulysses' traffic was q and out, which have as many heads as before. As long as P divides H and K,
#
# $$\frac{\text{ring}}{\text{Ulysses}} = \frac{(P-1)\cdot 2K}{\frac{P-1}{P}\,(2H + 2K)} = P\,\frac{K}{H + K}.$$
#
# For H = K this is P/2. Llama 3 8B has four query heads to each K/V head, which makes P/5: up to 4 ranks the ring sends
# fewer bytes, and there the common rule is false.
#
# **The number of heads limits U.** A row shares the query heads equally, so U must divide H. If U also divides K, each
# rank gets its own K/V heads. Otherwise U must be a multiple of K. Then U/K ranks each receive the same K/V head whole, which is
# more than the formula says. One layer of our model, with the shelf:

# %%
llama = published("llama3-8b").attention()
print(f"{llama.H} query and {llama.K} K/V heads; GB that a rank sends in one layer")
print(f"{'P':>4}{'ring':>8}{'Ulysses':>10}")
for ranks in (2, 4, 8, 16, 32, 64):
    ring_gb = ring_traffic(llama, 2**20, ranks).total_bytes / 1e9
    try:
        ulysses_gb = f"{ulysses_traffic(llama, 2**20, ranks).total_bytes / 1e9:.2f}"
    except RinglabError:
        ulysses_gb = "none"
    print(f"{ranks:4}{ring_gb:8.2f}{ulysses_gb:>10}")

# %% [markdown]
# The ring's bytes level off at K and V of the whole sequence, and from 8 ranks on Ulysses sends less. So by the rule our 16
# ranks take Ulysses. (64 ranks cannot share 32 heads. They take a ring, or a hybrid with U ≤ 32.)
#
# ## 4 · Bytes are not seconds
#
# A hop runs while a rank computes (lesson 06). If it outlasts the computing, the rank waits, and this wait is **exposed**.
# During all-to-alls and all-gathers nothing is computed, so our cost model counts all of their time as exposed.
#
# We count the **forward** of one layer. Blocks are computed at the rate that FlashAttention-3, an
# attention kernel for the H100 (arXiv 2407.08608), reaches on long sequences without a mask. A ring over two nodes crosses
# between them, and the slowest link decides (lesson 06). So for now *every* link counts as InfiniBand: 50 GB/s.
#
# **The shelf: 65,536 tokens on each rank.** Ulysses gives each of the 16 ranks 2 of the 32 query heads. There are only
# 8 K/V heads, so two ranks need the same one, and both receive it whole.

# %%
h100 = hardware("h100")
nvlink, infiniband = h100.inside, h100.between
reach = h100.reached.attention_forward
rate = h100.peak("bfloat16") * reach
print(f"attention at {rate / 1e12:.0f} TFLOP/s, {reach:.1%} of the peak")
SHELF, REPORT = 65_536, 2_048  # tokens on each rank


def hop_seconds(tokens, link):
    return tokens * llama.block_bytes_per_token / link.bytes_per_s + link.latency_s


def block_seconds(tokens):
    return 4 * llama.H * llama.D * tokens**2 / 2 / rate  # half of the pairs: causal


hop, block = hop_seconds(SHELF, infiniband), block_seconds(SHELF)
ring_bytes = 15 * SHELF * llama.block_bytes_per_token
print(f"ring:    {ring_bytes / 1e6:,.0f} MB in 15 hops, each", end=" ")
print(f"{hop * 1e3:.1f} ms beside a block of {block * 1e3:.1f} ms: hidden")
pieces = 15 * ((2 + 1 + 1) + 2)  # to 15 others q, k, v; to 15 others out
ulysses_bytes = pieces * SHELF * llama.D * 2  # bfloat16 takes 2 bytes for a number
ulysses_s = ulysses_bytes / infiniband.bytes_per_s
print(f"Ulysses: {ulysses_bytes / 1e6:,.0f} MB at 50 GB/s: {ulysses_s * 1e3:.1f} ms, exposed")

# %% [markdown]
# The ring sends more than Ulysses, yet it exposes *nothing*, because every hop ends before its block. For the shelf, the common
# rule chooses wrong. (Ulysses' wait is little, too, beside sixteen blocks of computing. The share grows as shards shrink.)
#
# ## 5 · Short shards
#
# Now the report, 2,048 tokens on each rank. A shorter block has fewer queries *and* fewer keys, so its work shrinks with
# L². The hop shrinks only with L, and now it outlasts the block.
#
# Rows help. Take U = 2. After the trade a rank has twice the tokens in half of the heads.
#
# - A hop carries as many bytes as before.
# - A block has twice the queries and twice the keys, in half of the heads: 2 · 2 / 2, so it takes twice as long.
#
# In general, if U divides K, **a hop takes as long as before, and a block U times as long**.

# %%
timed = {}
for U in (1, 2, 4):
    name = "ring" if U == 1 else f"rows of {U}"
    timed[name] = 16 // U - 1, hop_seconds(REPORT, infiniband), U * block_seconds(REPORT)
show(exchanges.steps(timed), exchanges.describe_steps(timed))

# %% [markdown]
# A row pays with its two all-to-alls. In them a rank sends a U-th of its q, k, v and out to each of U − 1 others. (With
# fewer K/V heads than ranks in a row, each other rank still gets one whole K/V head.)


# %%
def trade_seconds(tokens, U, link):
    pieces = (U - 1) * 2 * (llama.H / U + max(1, llama.K / U))  # q and out, k and v
    return pieces * tokens * llama.D * 2 / link.bytes_per_s + 2 * link.latency_s


# %% [markdown]
# `choose.weigh` counts this for every schedule:

# %%
speeds = infiniband.bytes_per_s, infiniband.latency_s
for it in choose.weigh(llama, REPORT, 16, rate, *speeds):
    name = f"hybrid, U = {it.ulysses}" if it.schedule == "hybrid" else it.schedule
    print(f"{name:15}{it.exposed_s * 1e3:6.2f} ms exposed{it.sent_bytes / 1e6:6,.0f} MB sent")

# %% [markdown]
# Rows of 4 hide every hop, so larger rows only lengthen the all-to-alls. And the ring, best for the shelf, is almost the worst
# for the report.
#
# ## 6 · What a rank holds
#
# Memory counts, too. A rank's q, k, v and out are 32 + 8 + 8 + 32 = 80 pieces. What comes on top?

# %%
held = {
    "ring": 80 + (8 + 8),  # one visiting block of K and V
    "hybrid, U = 4": 80 + 4 * (8 + 2 + 2 + 8) + 4 * (2 + 2),  # its heads; a visiting block
    "ulysses": 80 + 16 * (2 + 1 + 1 + 2),  # its heads, of all 16 shards
    "allgather": 80 + 15 * (8 + 8),  # K and V of all others
}
for name, pieces in held.items():
    megabytes = pieces * REPORT * llama.D * 2 / 1e6
    print(f"{name:15}{pieces:4} pieces, {megabytes:4.0f} MB")

# %% [markdown]
# The ring holds the least, even counting the second block that arrives while it computes. Ulysses and hybrids hold everything
# at least twice, by tokens and by heads.

# %% [markdown]
# ---
# **End of part 1. This is a good place to stop.** You know now what each schedule sends, exposes and holds. That is enough
# for the stages 15.traffic and 15.choose of [the exercise](../exercises/15_choosing.ipynb). If you return in a fresh
# kernel, run all cells up to here first.
#
# ---

# %% [markdown]
# # Part 2 · Choosing
#
# ## 7 · Where the line lies
#
# A **decision map** shows all lengths and bandwidths at once, for our layer on 16 ranks. Tokens per rank grow to
# the right and bandwidth upwards. The colour is the schedule that exposes the least. For a hybrid the number is its U.
# Every link gets InfiniBand's latency, 14 µs. The dots are our two prompts. Where nothing fits, the layer is too large for the
# memory. (On very short shards kernels are slower than the rate assumed here, so the left edge is only roughly right.)

# %% tags=["nbval-ignore-output"]
points = {"report": (REPORT, 50e9), "shelf": (SHELF, 50e9)}
options = {"sizes": llama, "latency_s": infiniband.latency_s, "points": points}
decision_map.play("h100", P=16, hybrids=True, **options)

# %% [markdown]
# Right of the heavy line a ring hides all of its hops, and nothing can expose less. **Hybrids fill most of the left.**
# Farther left, blocks shrink faster than hops. A larger U makes blocks longer again, so the best U grows. At the top left
# messages are so short that latency counts most. A hybrid pays the latency of two all-to-alls and of each hop, Ulysses of two
# all-to-alls only: it wins there. In the thin strip a ring waits a little, and still less than any other.
#
# With more K/V heads and the same query heads, the line moves to the right: hops carry more, but the work stays the same.
#
# An all-gather is never best here. But it makes every mask simple: one kernel call sees all keys. Llama 3 was
# trained with one (arXiv 2407.21783).
#
# ## 8 · Two kinds of links
#
# So far every link was InfiniBand. But our GPUs stand in two nodes of 8. Rows of up to 8 fit inside a node, so they trade over
# its fast NVLink. The rings still cross between the nodes. Here is the report again:

# %%
hop = hop_seconds(REPORT, infiniband)
print(f"a hop takes {1e6 * hop:.0f} µs")
for U in (2, 4, 8):
    block = U * block_seconds(REPORT)
    fast, slow = (trade_seconds(REPORT, U, link) * 1e3 for link in (nvlink, infiniband))
    print(f"rows of {U}: a block {1e6 * block:3.0f} µs, hops exposed", end=" ")
    print(f"{(16 // U - 1) * max(0, hop - block) * 1e3:.2f} ms", end="; ")
    print(f"all-to-alls {fast:.2f} ms over NVLink, {slow:.2f} over InfiniBand")

# %% [markdown]
# Over NVLink the all-to-alls take about a ninth of the time. So **put the all-to-alls, which nothing hides, on the fastest
# links**. For the report that means rows of 4 inside the nodes.
#
# Now the whole model. **Prefill** is the forward that reads a whole prompt, before the model writes the first token. ringlab's
# planner counts its time: computing, and what is exposed. Would rows of 4 be the best for other prompts, too?

# %% tags=["nbval-ignore-output"]
predict(
    "15.rows",
    "With 2,048 tokens on a rank, rows of 4 are the best. Which schedule is with 1,024?",
    choices=["ring", "rows of 2", "rows of 4, as before", "rows of 8", "Ulysses"],
)

# %%
NAMES = {1: "ring", 2: "rows of 2", 4: "rows of 4", 8: "rows of 8", 16: "Ulysses"}
cluster = {"hardware": "h100", "nodes": 2, "purpose": "prefill", "tp": 1}  # no tensor parallelism


def prefill_seconds(prompt):
    """The seconds of a whole prefill, by schedule."""
    asked = {name: Request("llama3-8b", prompt, ring=16 // U, ulysses=U, **cluster)
             for U, name in NAMES.items()}
    return {name: plan(request).best.time.total_s for name, request in asked.items()}


times = {f"{prompt:,} tokens": prefill_seconds(prompt) for prompt in (2**14, 2**15, 2**16, 2**17)}
show(exchanges.prompts(times), exchanges.describe_prompts(times))
half = times["16,384 tokens"]
compare("15.rows", min(half, key=half.get).replace("rows of 4", "rows of 4, as before"))
shelf = prefill_seconds(2**20)
print("shelf:", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in shelf.items()))

# %% [markdown]
# Half the tokens make about half a hop, but a quarter of a block. So rows must be twice as long: **the shorter the prompt, the
# longer the rows**.
#
# The case is decided. The shelf takes a ring, and the report takes rows of 4; rows of 8 are hardly slower. With Ulysses, by the
# rule, the report would take about a quarter longer, and the shelf 2 % longer. **The choice matters most for short prompts**:
# there, a plain ring takes about twice as long as the best.
#
# ## 9 · Decode needs no ring
#
# To write text, a model processes one token at a time: one query, which meets all keys so far. Before that, ring attention
# prefills the prompt, and each rank keeps its K and V. These are the **K/V cache**, sharded as the prompt was.
#
# A ring would move all these keys and values for a single query. After the report, each rank would send 126 MB in each layer for
# each new token.

# %% tags=["nbval-ignore-output"]
predict(
    "15.token",
    "After the report, one new token. How much must a rank send in a layer?",
    choices=["126 MB, as in a ring", "8 MB, its own K and V once", "less than 1 MB"],
)

# %% [markdown]
# Lesson 02 has a cheaper way: attend to each part of the keys alone, then merge the parts by their lse. So only the *partial
# results* travel: out and lse of one token. The query need not travel, because here all ranks run the model on the new token:

# %%
show(exchanges.decode_step([64] * 4), exchanges.describe_decode_step([64] * 4))

# %% [markdown]
# `decode` does just that, and `ShardedCache.append` gives each new token to the rank that has the fewest.


# %%
def generate(ring, prompt, new):
    """Prefill and decode `new` tokens. Return outputs, and each rank's tokens before and after."""
    q, k, v = corpus.qkv(prompt + new, heads=H, kv_heads=4, head_dim=D)
    dealt = zigzag(prompt, ring.world_size)
    shards = [dealt.shard(x[:, :, :prompt], ring.rank) for x in (q, k, v)]
    # the prefill; its output is not needed here
    ring_attention(*shards, ring=ring, layout=dealt, validate=False)
    cache = ShardedCache.of_shards(ring, dealt, *shards[1:])
    outs, before = [], list(cache.lengths)
    for at in range(prompt, prompt + new):
        now = slice(at, at + 1)
        cache.append(k[:, :, now], v[:, :, now])
        outs.append(decode(q[:, :, now], cache, validate=False).numpy())
    return np.concatenate(outs, axis=2), before, cache.lengths


written, before, after = VirtualCluster(P).run(generate, 250, 6).results[0]
all_256 = oracle.attention(*corpus.qkv(256, heads=H, kv_heads=4, head_dim=D), causal=True).out
expected = all_256[:, :, 250:]
close = np.abs(written - expected).max() / np.abs(expected).max() < 1e-5
print(f"6 tokens after 250, equal to one process: {close}")
print(f"tokens on each rank: {before} after the prefill, {after} at the end")

# %%
for prompt in (256, 1024, 4096):
    one, two = (VirtualCluster(P).run(generate, prompt, new).trace.bytes_sent(0) for new in (1, 2))
    token_bytes = two - one  # the second token alone: the prefill's bytes are in both
    print(f"prompt {prompt:5,}: {token_bytes:,} bytes a token")
formula = (P - 1) * H * (D + 1) * 4
ours = (16 - 1) * llama.H * (llama.D + 1) * 4
print(f"by hand {formula:,} bytes; in our case {ours:,}")
compare("15.token", "less than 1 MB" if ours < 1e6 else "8 MB, its own K and V once")

# %% [markdown]
# That is (P − 1)·H·(D + 1)·4 bytes, because a rank sends each other rank D numbers of out and one of lse for each
# *query* head. Neither S nor K occurs in it.
#
# A ring could not even hide its hops here: one query makes L pairs with L keys, not L².
#
# The ranks divide the cache by its tokens. This is called **context parallelism of decode**. It does not divide the weights: every
# rank here runs the whole model on the new token. A server must divide both, and [lesson 19](19_serving.ipynb) is about that.
#
# ## Recap
#
# | | exposes | take it where |
# |---|---|---|
# | ring | the part of each hop that outlasts its block | shards are long, or K/V heads few |
# | all-gather | everything, in our model | masks are complicated, or its cost does not matter |
# | Ulysses | everything, in our model | shards are so short that latency counts most |
# | hybrid | the all-to-alls, and the part of each hop that outlasts its block | a plain ring cannot hide its hops; best with rows inside a node |
#
# - Grouped heads shrink all of a ring's traffic, and at most half of Ulysses'. The number of heads limits U.
# - Waiting decides, not bytes: a ring that sends the most may expose nothing. First look at the tokens per rank. The shorter
#   the shards, the longer the rows.
# - In decode the partial results travel. Their bytes do not grow with S.
#
# ## Self-check
#
# <details><summary>1. 32 query and 16 K/V heads, and P divides both: from how many ranks on does Ulysses send less than a
# ring?</summary>From 4 on: P·16/48 = P/3 is above 1.</details>
#
# <details><summary>2. A new kernel computes attention twice as fast. Where does the heavy line of the map
# go?</summary>To the right: a block takes half as long, so it needs more tokens to hide a hop.</details>
#
# <details><summary>3. A rank holds no token of the cache. Can it take part in a step of decode?</summary>Yes. Its part
# has lse = −∞, so its weight in the merge is 0.</details>
#
# Now decide: [exercise 15](../exercises/15_choosing.ipynb) asks for the bytes of any schedule, a report with reasons,
# and the decode step.
