# %% [markdown]
# # 15 · Choosing: ring, all-gather, Ulysses, hybrid, decode
#
# **Afterwards you can** count what each schedule sends, and how much of that time no computation hides; choose one for
# a model and a cluster, and say why; decode with a K/V cache that is spread over ranks; say what a sliding
# window reaches (section 6, optional).
#
# **You need first** [lesson 06](06_what_it_costs.ipynb) for what hides, [lesson 08](08_striped_and_zigzag.ipynb) for
# layouts, and section 6 of [lesson 14](14_training.ipynb) for tensor parallelism.
#
# **Minutes** 75 to read and run; the exercise takes another 60.
#
# Every rank's queries must meet every rank's keys. A ring is one way to arrange that. There are others. All give the
# same result, but they differ in bytes, in waiting and in memory. "Ulysses sends less than a ring" is a common rule,
# and for today's models it is often false.

# %%
import numpy as np

from ringlab import (
    Mask,
    ShardedCache,
    VirtualCluster,
    contiguous,
    decode,
    oracle,
    ring_attention,
    zigzag,
)
from ringlab.cost import choose
from ringlab.cost.hardware import hardware
from ringlab.cost.memory import kv_cache_bytes, parameter_bytes
from ringlab.cost.models import model as published
from ringlab.cost.planner import Request, plan
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import least_tokens_hidden, ring_traffic, ulysses_traffic
from ringlab.errors import RinglabError
from ringlab.viz.style import show
from ringlab_course import compare, corpus, predict
from ringlab_course.figures import decision_map, exchanges

# %% [markdown]
# ## 1 · Four ways to meet
#
# - **Ring**: queries stay. The K/V blocks of the other ranks come by, one at a time.
# - **All-gather**: queries stay. The K/V blocks of all other ranks come first, all at once; then a rank computes.
# - **Ulysses** (arXiv 2309.14509): the ranks trade tokens for heads. In an **all-to-all**, every rank sends a different
#   part of its data to each other rank. Each rank then attends in its heads alone, and a second all-to-all returns the
#   output to the owners of the tokens.
#
# This is the first all-to-all, for 16 tokens and 4 heads on 4 ranks:

# %%
show(exchanges.trade(), exchanges.describe_trade())

# %% [markdown]
# - **Hybrid** (arXiv 2405.07719): the ranks form rows of U. Within a row they trade as in Ulysses; then the ranks with
#   the same heads, one from each row, form a ring of P/U. U = 1 is the ring, and U = P is Ulysses.
#
# Now all four. Which part does rank 1 compute, and whose keys does it need?

# %%
show(exchanges.schedules(), exchanges.describe_schedules())

# %% [markdown]
# Each blue area holds a quarter of all (token, head) pairs: without a mask, the work is divided equally (a
# causal mask needs the layouts of lesson 08). Ring and all-gather move keys and values only. Ulysses moves q, k, v and
# the output, but each only once.
#
# ## 2 · Counting bytes
#
# Count in **heads of a shard**: one head of the L = S/P tokens that a rank owns, so L·D numbers. Take P = 4 ranks and
# H = K = 32 heads. In Ulysses each rank ends up with 32/4 = 8 heads, so it sends 8 heads of q, of k and of v to each of
# 3 others, and later 8 heads of the output to each of 3 others. The hybrid with U = 2 does both things in turn:
#
# - In its row a rank has *one* partner, and shares the heads with it: it sends 16 heads each of q, k, v, and later of out.
# - Then it owns 16 heads of its row's tokens, which are *two* shards. There are two rows, so the ring makes one hop, with
#   K and V.

# %%
P, S, H, D = 4, 256, 32, 8
trade, hop = (16 + 16 + 16) + 16, 2 * (16 + 16)  # q, k, v, and out; K and V of 2 shards
by_hand = {
    "ring": 3 * (32 + 32),  # 3 hops, K and V
    "allgather": 3 * (32 + 32),  # to 3 others, K and V
    "ulysses": 3 * (8 + 8 + 8) + 3 * 8,  # to 3 others q, k, v; to 3 others out
    "hybrid(ring=2, ulysses=2)": 1 * trade + 1 * hop,  # to 1 partner; 1 hop
}
shard = S // P * D * 4  # bytes of one head of a shard, float32
for name, heads in by_hand.items():
    print(f"{name:26}{heads:4} heads of a shard, {heads * shard:9,} bytes")

# %% [markdown]
# Now run all four on real text. The trace counts what rank 0 sent:

# %%
layout = zigzag(S, P)
CAUSAL = Mask()  # a mask is causal unless it says otherwise


def on_rank(ring, schedule, K, mask=None):
    shards = (layout.shard(x, ring.rank) for x in corpus.qkv(S, heads=H, kv_heads=K, head_dim=D))
    options = {"schedule": schedule, "mask": mask or CAUSAL, "block": "naive", "validate": False}
    return ring_attention(*shards, ring=ring, layout=layout, **options)


def metered(schedule, K):
    """The outputs of all ranks put together, and the bytes that rank 0 sent."""
    run = VirtualCluster(P).run(on_rank, schedule, K)
    return layout.unshard(run.results), run.trace.bytes_sent(0)


truth = oracle.attention(*corpus.qkv(S, heads=H, head_dim=D), causal=True)[0]
for name, heads in by_hand.items():
    out, sent = metered(name, H)
    close = np.abs(out.numpy() - truth).max() / np.abs(truth).max() < 1e-5
    right = sent == heads * shard
    print(f"{name:26}{sent:9,} bytes, as counted: {right}; equal to one process: {close}")

# %% [markdown]
# Ulysses sends half of what the ring sends. That is the rule in so many texts, and with more ranks it looks even better:
# the ring's count grows with P − 1, while Ulysses' stays below 4·32.
#
# But here K = H. Today's models have **grouped heads**: 4 or 8 query heads share a K/V head.

# %% tags=["nbval-ignore-output"]
predict(
    "15.times",
    "4 ranks, 32 query heads, 4 K/V heads: how many times the ring's bytes does Ulysses send?",
    unit="times",
)

# %%
(_, ring_sent), (_, ulysses_sent) = metered("ring", 4), metered("ulysses", 4)
print(f"ring:    {ring_sent // shard} heads of a shard, 3 · (4 + 4)")
print(f"Ulysses: {ulysses_sent // shard} heads of a shard, 3 · (8 + 1 + 1) + 3 · 8")
compare("15.times", ulysses_sent / ring_sent)

# %% [markdown]
# The order is reversed. All of the ring's traffic is K and V, so all of it shrinks to an eighth. With 32 K/V heads,
# half of the bytes that Ulysses sent were q and out, and these have as many heads as before. As long as P divides H
# and K,
#
# $$\frac{\text{ring}}{\text{Ulysses}} = \frac{(P-1)\cdot 2K}{\frac{P-1}{P}\,(2H + 2K)} = P\,\frac{K}{H + K}.$$
#
# For H = K that is P/2. For 8:1 it is P/9: up to 8 ranks the ring sends fewer bytes.
#
# **The number of heads limits U**, too. U ranks can share H query heads only if U divides H. With more ranks than K/V
# heads, several ranks need the same K/V head, and each gets the *whole* head, because their query heads differ.
# Ulysses then sends more than the formula says. In all cases U must divide K or be a multiple of it. One layer of
# Llama 3 70B, with a million tokens:

# %%
llama = published("llama3-70b").attention()
print(f"{llama.H} query and {llama.K} K/V heads; GB that a rank sends in one layer")
print(f"{'P':>4}{'ring':>8}{'Ulysses':>10}")
for ranks in (2, 4, 8, 16, 32, 64, 128):
    ring = ring_traffic(llama, 2**20, ranks).total_bytes / 1e9
    try:
        ulysses = f"{ulysses_traffic(llama, 2**20, ranks).total_bytes / 1e9:.2f}"
    except RinglabError:
        ulysses = "none"
    print(f"{ranks:4}{ring:8.2f}{ulysses:>10}")

# %% [markdown]
# The ring's bytes approach all K and V of the sequence, and stay there. From 16 ranks on, Ulysses sends less; and 128
# ranks cannot share 64 heads at all. A hybrid with rows of up to 64 can still run.
#
# ## 3 · Bytes are not seconds
#
# A hop runs while a block is computed (lesson 06). If it takes *longer* than its block, what is left over is **exposed**.
# All-to-alls and all-gathers have nothing to hide behind: Ulysses cannot compute before the first all-to-all is done, and
# the second cannot begin before all is computed. A hybrid exposes its all-to-alls, and what is left over of each hop.
#
# First by hand: 16 nodes with one GPU each, so *every* link is InfiniBand, and 65,536 tokens on each. (Section 4 has
# nodes of 8.) In Ulysses each rank ends up with 4 of the 64 query heads and one whole K/V head.

# %%
h100 = hardware("h100")
peak, link = h100.peak("bfloat16"), h100.between


def hop_and_block(tokens, link):
    """The seconds of a hop of the ring, and those of the block that is computed meanwhile."""
    hop_s = tokens * llama.block_bytes_per_token / link.bytes_per_s + link.latency_s
    block_s = 4 * llama.H * llama.D * tokens**2 / 2 / peak  # half of the pairs: causal
    return hop_s, block_s


head = 65536 * llama.D * 2  # bytes of one head of a shard: bfloat16 takes 2 for a number
sent = 15 * ((4 + 1 + 1) + 4) * head  # to 15 others q, k, v; to 15 others out
hop_s, block_s = hop_and_block(65536, link)
print(f"ring: each hop {hop_s * 1e3:.1f} ms beside a block of {block_s * 1e3:.1f} ms: hidden")
print(f"Ulysses: {sent / 1e6:,.0f} MB at 50 GB/s: {sent / link.bytes_per_s * 1e3:.1f} ms, exposed")

# %% [markdown]
# `choose.weigh` counts this for every schedule, at the GPU's peak rate, with latencies. It also counts what a rank holds:
# q, k, v, out and what has come from others.


# %%
def scenario(tokens, ranks, link):
    """Print what every schedule exposes, sends and holds for one layer, least exposed first."""
    rates = peak, link.bytes_per_s, link.latency_s
    speed = f"{link.name}, {link.bytes_per_s / 1e9:.0f} GB/s"
    print(f"{tokens:,} tokens on each of {ranks} ranks, {speed}")
    for it in choose.weigh(llama, tokens, ranks, *rates):
        exposed, sent, held = it.exposed_s * 1e3, it.sent_bytes / 1e6, it.held_bytes / 1e9
        name = f"{it.schedule}, U = {it.ulysses}" if it.schedule == "hybrid" else it.schedule
        print(f"  {name:15}{exposed:8.2f} ms exposed{sent:8,.0f} MB sent{held:6.1f} GB held")


scenario(65536, 16, link)

# %% [markdown]
# **Long shards, a slow link.** The ring sends as much as the all-gather, more than all others, and exposes *nothing*.
# It also holds the least: Ulysses and hybrids keep q, k, v and out twice, by tokens and by heads; an all-gather keeps all
# K and V.
#
# Held by the ring, in heads of a shard: q and out are 2H, own K/V 2K, one visiting block 2K. (Our
# ring has one more in flight.)
#
# **Short shards, the same link.** A block's work shrinks with the square of the shard, a hop only with the shard.
# In rows of 2 a rank sends its partner half of the heads of q, k, v and out: 32 + 4 + 4 + 32 = 72 heads of a shard.

# %%
tokens = 2048
hop_s, block_s = hop_and_block(tokens, link)
head = tokens * llama.D * 2
trade_s = 72 * head / link.bytes_per_s + 2 * link.latency_s
print(f"ring of 16: 15 hops, each {hop_s * 1e3:.3f} ms beside a block of {block_s * 1e3:.3f} ms")
print(f"rows of 2: two all-to-alls, {trade_s * 1e3:.3f} ms in all; then a ring of 8")

# %% [markdown]
# In rows of 2, a hop has two shards of half the heads, so as many bytes as before. A block has twice as many queries and
# keys, so four times the pairs, in half the heads: twice the work. U = 8 sends the fewest bytes.

# %% tags=["nbval-ignore-output"]
predict(
    "15.least",
    "2,048 tokens on each of 16 ranks, one GPU per node, so InfiniBand everywhere. Which exposes "
    "the least?",
    choices=["ring", "hybrid, U = 2", "hybrid, U = 8", "Ulysses"],
)

# %%
scenario(tokens, 16, link)
best = choose.weigh(llama, tokens, 16, peak, link.bytes_per_s, link.latency_s)[0]
compare("15.least", f"hybrid, U = {best.ulysses}" if best.schedule == "hybrid" else best.schedule)

# %% [markdown]
# Rows of 2 leave 7 of the 15 hops, with twice the work beside each, so most of each hop is hidden. The two all-to-alls
# make up most of the exposed time. In larger rows they carry more of the bytes.
#
# **Short shards, a fast link.** Suppose that NVLink connected all 16 ranks, nine times as fast:

# %%
scenario(2048, 16, h100.inside)

# %% [markdown]
# The ring hides again. A **decision map** shows all such cases: tokens per rank to the right, bandwidth upwards, and
# the colour is the schedule that exposes the least. It begins with an H100, NVLink's latency, and 32 query and 8
# K/V heads. The rows below the map give, for each machine, the shard from which its ring hides. (ICI and DCN are a TPU's
# links, inside a pod and between pods.) Read it, then change P.

# %% tags=["nbval-ignore-output"]
decision_map.play("h100", P=16, hybrids=True)

# %% [markdown]
# Right of the heavy line a ring hides all of its hops, and nothing can expose less. Left of it, a hop is longer than its
# block. **Hybrids fill the left**, because rows of U leave fewer hops with U times the work beside each, and their
# all-to-alls cost less time than they save. With 8 K/V heads Ulysses wins only where latency counts most: short
# shards, fast links.
#
# Orange marks a ring that is exposed but still the best. Just left of the line, it exposes less than any all-to-all
# costs. At the lower right nothing else fits, even with the whole GPU for one layer's attention.
#
# Now the same map with 32 K/V heads. Which area grows?

# %% tags=["nbval-ignore-output"]
predict(
    "15.line",
    "On InfiniBand an H100's ring hides from 10,062 tokens per rank on. From how many with 32 K/V "
    "heads instead of 8?",
    unit="tokens",
)

# %%
all_heads = {"sizes": Attention(1, 32, 32, 128), "P": 16, "hybrids": True}
show(decision_map.figure(**all_heads), decision_map.describe(**all_heads))
rates = peak, link.bytes_per_s, all_heads["sizes"]
compare("15.line", round(least_tokens_hidden(*rates, latency_s=link.latency_s)))

# %% [markdown]
# A hop is four times as long, so the line moves right, to about four times as many tokens. The hybrids' band is
# narrower, and Ulysses wins everywhere left of it. At the lower right memory decides: beyond 1.3 million tokens only
# a ring fits. An all-gather never wins here, but with all keys on a rank every mask is simple. Llama 3 was trained
# with one (arXiv 2407.21783).
#
# ## 4 · Two kinds of links
#
# A cluster has fast links inside a node and slow ones between nodes. Take 2,048 tokens per rank again, on 2 nodes of
# 8 GPUs. Rows of up to 8 fit inside a node and trade over NVLink; only hops need InfiniBand, and the slowest link
# decides (lesson 06):

# %%
nvlink, infiniband = h100.inside, h100.between
hop_s, block_s = hop_and_block(tokens, infiniband)
for U in (2, 4, 8):
    # to U - 1 others, a U-th of the heads of q, k, v and out
    heads = (U - 1) * (64 + 8 + 8 + 64) // U
    rows_s = heads * head / nvlink.bytes_per_s + 2 * nvlink.latency_s
    exposed_s = (16 // U - 1) * max(0, hop_s - U * block_s)  # same bytes, U times the work
    print(f"rows of {U} on NVLink: {rows_s * 1e3:.2f} ms, hops exposed {exposed_s * 1e3:.2f} ms")

# %% [markdown]
# With one GPU per node, rows of 2 were best. Here rows of 4 are: their trade is cheap, and they hide all hops. So *what
# nothing hides goes on the fastest links*. The planner of ringlab tries every split of the ranks over both kinds. Here
# it splits the 16 GPUs for **prefill**: reading a whole prompt, without a backward.

# %% tags=["nbval-ignore-output"]
predict(
    "15.rows",
    "Prefill of 32,768 tokens on 2 nodes of 8 H100. Llama 2 7B (32 K/V heads) or Llama 3 8B (8): "
    "which uses the larger rows?",
    choices=["llama2-7b", "llama3-8b"],
)

# %%
rows = {}
for name in ("llama2-7b", "llama3-8b"):
    sized = published(name)
    for tokens in (2**15, 2**17, 2**20):
        best = plan(Request(name, tokens, "h100", nodes=2, purpose="prefill")).best
        split = f"ring {best.degrees.ring:2} × Ulysses {best.degrees.ulysses}"
        heads = f"{sized.H} query, {sized.K:2} K/V heads"
        print(f"{name}, {heads}, {tokens:9,} tokens: {split}, {best.step_s:7.2f} s")
        rows[tokens, best.degrees.ulysses] = name
compare("15.rows", rows[2**15, max(U for tokens, U in rows if tokens == 2**15)])

# %% [markdown]
# Up to 131,072 tokens the splits differ; with a million, both are a ring of 16. **Grouped heads and long sequences
# both favour the ring.** Fewer K/V heads make shorter hops, longer shards longer blocks; both hide the ring.
#
# ## 5 · Decode
#
# When a model writes, it takes in one token at a time: one query, and all keys so far. First the prompt is prefilled by
# ring attention, and each rank keeps its K and V. This **K/V cache** is sharded as the prompt was.
#
# A ring would move the keys: P − 1 hops of S/P tokens, for one query. But lesson 02 has a cheaper way: attend to each
# part of the keys alone, then merge the parts by their lse.

# %%
q, k, v = corpus.qkv(256, heads=H, head_dim=D)
last, pieces = q[:, :, -1:], (slice(0, 90), slice(90, 100), slice(100, 256))
parts = [oracle.attention(last, k[:, :, own], v[:, :, own], causal=False) for own in pieces]
lse = np.logaddexp.reduce([part.lse for part in parts])
out = sum(np.exp(part.lse - lse)[..., None] * part.out for part in parts)
whole = oracle.attention(last, k, v, causal=False).out
print(
    "three parts of 90, 10 and 156 keys, merged, equal the whole:",
    np.allclose(out, whole, rtol=1e-12, atol=1e-14),
)
print(f"one part: {parts[0].out.size} numbers of out, {parts[0].lse.size} of lse")

# %% [markdown]
# So the *partial results* travel: out and lse of one token. The query need not, as all ranks run the model on the new
# token:

# %%
show(exchanges.decode_step([64] * 4), exchanges.describe_decode_step([64] * 4))

# %% [markdown]
# `decode` does just that. `ShardedCache.append` gives each new token to the rank that has the fewest; all ranks count
# alike, so they need not ask each other.


# %%
def generate(ring, prompt, new):
    """Prefill, then `new` steps of decode; the outputs, and the number of tokens on each rank."""
    q, k, v = corpus.qkv(prompt + new, heads=H, kv_heads=4, head_dim=D)
    layout = zigzag(prompt, ring.world_size)
    shards = [layout.shard(x[:, :, :prompt], ring.rank) for x in (q, k, v)]
    # the prefill; its output is not needed here
    ring_attention(*shards, ring=ring, layout=layout, validate=False)
    cache = ShardedCache.of_shards(ring, layout, *shards[1:])
    outs = []
    for at in range(prompt, prompt + new):
        now = slice(at, at + 1)
        cache.append(k[:, :, now], v[:, :, now])
        outs.append(decode(q[:, :, now], cache, validate=False).numpy())
    return np.concatenate(outs, axis=2), cache.lengths


out, lengths = VirtualCluster(P).run(generate, 250, 6).results[0]
whole = oracle.attention(*corpus.qkv(256, heads=H, kv_heads=4, head_dim=D), causal=True).out
truth = whole[:, :, 250:]
close = np.abs(out - truth).max() / np.abs(truth).max() < 1e-5
print(f"6 tokens after 250, equal to one process: {close}")
print(f"tokens on each rank at the end: {lengths}")

# %% tags=["nbval-ignore-output"]
predict(
    "15.token",
    "A prompt of 4,096 tokens on 4 ranks; 32 query heads, 4 K/V heads, D = 8, float32. For one new "
    "token each rank sends its partial result to each other rank. How many bytes does a rank send?",
    unit="bytes",
)

# %%
sent = {}
for prompt in (256, 1024, 4096):
    one, two = (VirtualCluster(P).run(generate, prompt, new).trace.bytes_sent(0) for new in (1, 2))
    sent[prompt] = two - one
    around = (P - 1) * 2 * 4 * D * 4 * prompt // P
    print(f"prompt {prompt:5,}: {sent[prompt]:,} bytes a token; K and V around a ring: {around:7,}")
compare("15.token", sent[4096])

# %% [markdown]
# That is (P − 1)·H·(D + 1)·4 bytes: D numbers of out and one of lse, for each *query* head and each other rank. Neither S
# nor K occurs in it. (A tree of log₂ P rounds sends less still; arXiv 2408.04093.)
#
# Could a ring not hide its hops here, as in training? A block of c keys has c² pairs with c queries, but only c
# pairs with one query. For Llama 3 70B with 131,072 tokens on 8 H100:

# %%
c, link = 2**17 // 8, h100.inside
hop = c * llama.block_bytes_per_token / link.bytes_per_s
block = 4 * llama.H * llama.D * c / h100.peak("bfloat16")
read = c * llama.block_bytes_per_token / h100.memory_bytes_per_s
partials = 7 * llama.H * (llama.D + 1) * 4
print(f"a hop {hop * 1e6:.0f} µs; a block's arithmetic {block * 1e6:.1f} µs")
print(f"reading the block's keys and values {read * 1e6:.0f} µs")
sending = partials / link.bytes_per_s
print(f"a rank's partial results: {partials / 1e3:.0f} kB, {sending * 1e6:.1f} µs, and latency")

# %% [markdown]
# **Decode needs no ring.** Its time goes into *reading*, the weights and the cache, and both can be divided among ranks.
# **Tensor parallelism** (TP, lesson 14) divides the weights: each rank has some heads and some columns of the
# feed-forward, for all tokens, and the ranks add up their results. A cache that is sharded by tokens is **context
# parallelism** (CP). How would you divide 70 billion weights and a million tokens among 16 GPUs? The planner:

# %%
print(plan(Request("llama3-70b", 2**20, "h100", nodes=2, purpose="decode")).answer)
sized = published("llama3-70b")
weights, cache = parameter_bytes(sized) / 8e9, kv_cache_bytes(sized, 2**20) / 16e9
print(f"{weights:.1f} GB of weights and {cache:.1f} GB of cache per GPU")

# %% [markdown]
# TP divides the weights by 8 and, since each rank keeps one of the 8 K/V heads, the cache too. CP then halves the cache.
# TP of 16 would keep each K/V head twice and leave the node, which has 8 GPUs.
#
# ## 6 · Optional: a window instead
#
# A **sliding window** makes the task itself smaller: each token sees only the last few, 4,096 in Mistral 7B. K/V
# blocks that nobody sees need not travel.

# %% tags=["nbval-ignore-output"]
predict(
    "15.hops",
    "4 ranks with contiguous shards of 64 tokens, and a window of 16. How many hops does the ring "
    "make?",
    choices=["0", "1", "2", "3"],
)

# %%
hops = {}
for window in (256, 128, 64, 16):
    for layout in (contiguous(S, P), zigzag(S, P)):
        run = VirtualCluster(P).run(on_rank, "ring", 4, Mask(window=window))
        hops[layout.name, window] = run.trace.rounds(0)
    folded, straight = hops["zigzag", window], hops["contiguous", window]
    print(f"window {window:3} of {S} tokens: hops {straight} if contiguous, {folded} in a zig-zag")
compare("15.hops", str(hops["contiguous", 16]))

# %% [markdown]
# One hop remains even for a window of 16 tokens: the first tokens of a shard see across its border. In a zig-zag a rank
# has two chunks, whose predecessors lie on two ranks, rank − 1 and rank + 1. With a window of 16 only those two blocks
# are needed. The second comes in one message from rank + 2, which got it in its first hop.
#
# A token still reaches beyond its window, through the layers: the tokens that it sees have seen others.

# %% tags=["nbval-ignore-output"]
predict(
    "15.window",
    "3 layers, each with a window of 4 tokens: the token itself and the 3 before it. On how many "
    "tokens can the last output depend?",
    unit="tokens",
)


# %%
def reached(layers, window, tokens=512):
    """The number of tokens that the last output depends on, counted layer by layer."""
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    seen = (distance >= 0) & (distance < window)
    found = np.eye(tokens, dtype=bool)[-1]
    for _ in range(layers):
        found = found @ seen
    return int(found.sum())


for layers, window in ((1, 4), (2, 4), (3, 4), (8, 16), (32, 16)):
    formula = layers * (window - 1) + 1
    found = reached(layers, window)
    print(f"layers {layers:2}, window {window:2}: {found:3} tokens; the formula says {formula}")
compare("15.window", reached(3, 4))

# %% [markdown]
# Each further layer adds window − 1 tokens. But **to reach is not to see**. What is far away is handed on once a
# layer, and mixed with a whole window each time. Suppose that each layer takes the plain mean over its window, and
# leave out the residual connections, which pass each token on unchanged. How much of the last output comes from the
# furthest quarter of what it reaches?

# %%
for layers in (1, 8, 32):
    window, width = 4096, 1 << (layers * 4096).bit_length()
    mean = np.fft.rfft(np.full(window, 1 / window), width)
    # the mean applied `layers` times is a convolution power: a power of its Fourier transform
    weight = np.fft.irfft(mean**layers, width)[: layers * (window - 1) + 1]  # by distance
    far = weight[len(weight) // 4 * 3 :].sum()
    print(f"layers {layers:2}: {len(weight):7,} tokens; the furthest quarter gives {far:.2g}")

# %% [markdown]
# A trained model does better than a plain mean. Still, many current models mix layers with a window and layers with full
# attention, and the latter need one of the schedules above.
#
# ## Recap
#
# | | where it exposes | take it where |
# |---|---|---|
# | ring | what is left over of each hop that is longer than its block | shards are long, or K/V heads are few |
# | all-gather | everything | masks are complicated, or its cost does not matter |
# | Ulysses | everything, but each tensor travels only once | K/V heads are many; or shards are short and links fast |
# | hybrid | the rows' all-to-alls, and what is left over of each hop | a ring alone does not hide; rows inside a node |
# | decode | partial results, whose bytes do not grow with S | one token at a time |
#
# - Grouped heads shrink all of a ring's traffic and little of Ulysses'. The number of heads limits U.
# - Bytes decide nothing by themselves: a ring that sends the most may expose nothing.
# - A window saves hops. Its reach grows by window − 1 tokens per layer, but little arrives from far away.
#
# ## Self-check
#
# <details><summary>1. 32 query and 8 K/V heads: from how many ranks on does Ulysses send less than a
# ring?</summary>From 8 on. P·8/40 is above 1 from 6 on, and 8 is the next P that divides both numbers of
# heads.</details>
#
# <details><summary>2. Why does a hybrid's hop carry as many bytes as the ring's while U divides K, and what has
# changed?</summary>It carries U times the tokens of a U-th of the heads. But there are P/U − 1 hops, and U
# times the work during each.</details>
#
# <details><summary>3. Multi-query attention, K = 1, on 8 ranks with Ulysses. How many copies of K and V are
# there?</summary>Eight: each rank holds the one head, for all tokens.</details>
#
# <details><summary>4. Right after the prefill, with a window of 4,096 and contiguous shards of at least 4,096 tokens, only
# the last rank has keys in the window. What is lost?</summary>Parallel reading: one rank does all the work. If the
# prompt is dealt in small pieces, all ranks share it.</details>
#
# Now decide: [exercise 15](../exercises/15_choosing.ipynb) asks for the bytes of any schedule, a report with reasons, and
# the decode step.
