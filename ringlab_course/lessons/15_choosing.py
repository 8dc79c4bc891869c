# %% [markdown]
# # 15 · Choosing: ring, all-gather, Ulysses, hybrid, decode
#
# **Afterwards you can** choose a schedule for a model and a cluster, and say why; prefill and decode with a K/V cache that is spread over ranks; compare a sliding
# window's receptive field with full attention.
#
# **You need first** [lesson 06](06_what_it_costs.ipynb), what hides; [lesson 08](08_striped_and_zigzag.ipynb), layouts.
#
# **Minutes** 75 to read and run; the exercise takes another 60.
#
# Queries of all ranks have to meet keys of all ranks. A ring is one way to arrange that; the answer is the same, exactly, in every other. So the choice is about bytes,
# about who waits, and about memory. Whoever knows only rings runs them where something else waits less; whoever has read "Ulysses sends less" is often wrong.

# %%
from dataclasses import replace

import numpy as np
import torch

from ringlab import Mask, ShardedCache, VirtualCluster, contiguous, decode, oracle, ring_attention, zigzag
from ringlab.cost import choose
from ringlab.cost.hardware import hardware
from ringlab.cost.models import model as published
from ringlab.cost.planner import Request, plan
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import ring_traffic, ulysses_traffic
from ringlab_course import compare, corpus, predict
from ringlab.errors import RinglabError
from ringlab_course.figures import decision_map
from ringlab.viz.style import GREEN, ORANGE, new_figure, show, styled

# %% [markdown]
# ## 1 · Four ways to meet
#
# - **ring**: queries stay, K and V of all ranks come by, one block at a time;
# - **all-gather**: queries stay, all K and V come first;
# - **Ulysses** (arXiv 2309.14509): ranks trade. An all-to-all turns *some tokens, all heads* into *all tokens, some heads*; each rank attends to its heads alone; a
#   second all-to-all takes the output home;
# - **hybrid** (arXiv 2405.07719): rows of U ranks trade, then rings go through the rows. U = 1 is the ring, U = P is Ulysses.
#
# 16 tokens, 4 ranks, 4 heads. What rank 1 works on in its second step:


# %%
def held(rows, tokens, heads):
    """A grid (heads, tokens): 1 where rank 1 holds queries, 2 where it holds keys of another rank."""
    grid = np.zeros((4, 16))
    grid[np.ix_(heads, tokens)] = 2
    grid[np.ix_(heads, rows)] = 1
    return grid


every, own, pair = range(4), range(4, 8), range(8)
panels = {
    "ring": held(own, range(4), every),
    "all-gather": held(own, range(16), every),
    "Ulysses": held(range(16), range(16), [1]),
    "hybrid, U = 2": held(pair, range(8, 16), [2, 3]),
}

# %%
with styled():
    figure = new_figure((8.0, 2.3))
    for axes, (name, grid) in zip(figure.subplots(1, 4, sharey=True), panels.items(), strict=True):
        for kind, look in ((1, {"color": ORANGE, "hatch": "//"}), (2, {"color": GREEN, "hatch": ".."})):
            heads, tokens = np.nonzero(grid == kind)
            axes.bar(tokens, 0.9, 1.0, heads - 0.45, align="edge", edgecolor="white", linewidth=0, **look)
        axes.set(title=name, xlim=(0, 16), xticks=range(0, 17, 4), yticks=range(4), xlabel="tokens")
    figure.axes[0].set_ylabel("heads")
show(
    figure,
    "Heads against tokens, what rank 1 of 4 works on. Ring: its 4 tokens in all heads, keys of another 4. "
    "All-gather: its 4 tokens, keys of all 16. Ulysses: all 16 tokens in one head. "
    "Hybrid of rows of 2: the 8 tokens of its row in 2 heads, keys of the other row's 8.",
)

# %% [markdown]
# Orange: its queries, with their keys. Green: keys of others. Now run all four, on real text, and meter what each rank sends, beside what `ringlab.cost` says without
# running anything.

# %%
P, S, H, D = 4, 256, 32, 8
layout = zigzag(S, P)
SCHEDULES = {
    "ring": ("ring", 1),
    "allgather": ("allgather", 1),
    "ulysses": ("ulysses", P),
    "hybrid(ring=2, ulysses=2)": ("hybrid", 2),
}


def on_rank(ring, name, K, mask=None):
    shards = (layout.shard(x, ring.rank) for x in corpus.qkv(S, heads=H, kv_heads=K, head_dim=D))
    return ring_attention(
        *shards, ring=ring, layout=layout, schedule=name, mask=mask or Mask(), block="naive", validate=False
    )


def metered(name, K):
    """The outputs of all ranks put together, and the bytes that rank 0 sent."""
    run = VirtualCluster(P).run(on_rank, name, K)
    return layout.unshard(run.results), run.trace.bytes_sent(0)


# %%
sizes = Attention(H=H, K=H, D=D, dtype="float32")
truth = oracle.attention(*corpus.qkv(S, heads=H, head_dim=D), causal=True)[0]
print(f"{'schedule':26}{'sent by a rank':>16}{'by the model':>14}   equal to one process")
for name, (kind, rows) in SCHEDULES.items():
    out, sent = metered(name, H)
    way = choose.way(sizes, P, kind, rows)
    close = np.abs(out.numpy() - truth).max() / np.abs(truth).max() < 1e-5
    print(f"{name:26}{sent:16,}{way.sent_bytes * S // P:14,}   {close}")

# %% [markdown]
# Ring and all-gather: K and V to P − 1 others, 2·K heads of a rank's tokens. Ulysses: 2·H + 2·K heads, of which each of P − 1 others gets a P-th. So
#
# $$\frac{\text{ring}}{\text{Ulysses}} = \frac{2K(P-1)}{(2H + 2K)\frac{P-1}{P}} = P\,\frac{K}{H + K},$$
#
# P/2 where K = H. That is the "Ulysses moves less" of many texts.
#
# ## 2 · Grouped heads
#
# Today's models have far fewer K/V heads than query heads: 64 and 8, say.

# %% tags=["nbval-ignore-output"]
predict(
    "15.grouped",
    "32 query heads on 4 ranks. K/V heads go from 32 down to 4, 8:1. What becomes of the bytes?",
    choices=["all send an eighth", "ring an eighth, Ulysses over half", "nothing: q has all its heads"],
)

# %%
shares = {}
for name, (kind, rows) in SCHEDULES.items():
    (_, before), (_, after) = metered(name, 32), metered(name, 4)
    grouped = choose.way(replace(sizes, K=4), P, kind, rows).sent_bytes * S // P
    shares[kind] = after / before
    print(
        f"{name:26}{before:10,} → {after:8,} bytes, {after / before:5.1%}; the model agrees: {after == grouped}"
    )
few = shares["ring"] == 1 / 8 and shares["ulysses"] > 1 / 2
compare("15.grouped", "ring an eighth, Ulysses over half" if few else "all send an eighth")

# %% [markdown]
# The ring sends K and V only, so all of its traffic shrinks. Ulysses sends q and the output too, and these have as many heads as before: (H + K)/2H = 9/16 of it stays.
#
# **Ulysses does not always move less.** At 8:1 the ratio above is P/9: up to 8 ranks the ring sends *fewer* bytes. And the degree is bounded: U ranks can share the heads
# if U divides H, and divides K or is a multiple of it; then several ranks hold the same K/V head, each a whole one, and P stands for K in the bytes of Ulysses. A layer
# of Llama 3 70B, a million tokens:

# %%
llama = published("llama3-70b").attention()
print(f"{llama.H} query and {llama.K} K/V heads; GB that a rank sends in one layer")
print(f"{'P':>4}{'ring':>8}{'Ulysses':>10}   least of the hybrids")
for ranks in (2, 4, 8, 16, 32, 64, 128):
    ring = ring_traffic(llama, 2**20, ranks).total_bytes / 1e9
    try:
        ulysses = f"{ulysses_traffic(llama, 2**20, ranks).total_bytes / 1e9:.2f}"
    except RinglabError:
        ulysses = "none"
    hybrids = [it for it in choose.ways(llama, ranks) if it.schedule == "hybrid"]
    least = min(hybrids, key=lambda it: it.sent_bytes, default=None)
    told = f"U = {least.ulysses}: {least.sent_bytes * 2**20 / ranks / 1e9:.2f}" if least else "–"
    print(f"{ranks:4}{ring:8.2f}{ulysses:>10}   {told}")


# %%
def six_ranks(ring):
    shards = (torch.zeros(1, heads, 2, D) for heads in (H, 4, 4))
    return ring_attention(*shards, ring=ring, layout=contiguous(12, 6), schedule="ulysses", validate=False)


try:
    VirtualCluster(6).run(six_ranks)
except RinglabError as error:
    print(error)

# %% [markdown]
# Past 9 ranks a ring's bytes stay where they are (all K and V but its own), and those of Ulysses fall. With 128 ranks there are not heads enough, and the hybrid is what
# remains of it.
#
# ## 3 · Bytes are not seconds
#
# A hop runs beside a block, so what counts is what nothing hides (lesson 06). Before the first all-to-all is done there is nothing to compute, and the second cannot begin
# before all is computed: both are exposed, whole. So is an all-gather. `choose.weigh` counts that, with the memory that each takes:

# %%
h100 = hardware("h100")


def report(tokens, ranks, link, most, memory=4e9):
    found = choose.weigh(
        llama, tokens, ranks, h100.peak("bfloat16"), link.bytes_per_s, link.latency_s, memory
    )
    print(f"{tokens:,} tokens on each of {ranks} ranks, {link.bytes_per_s / 1e9:.0f} GB/s, room: 4 GB")
    for it in found[:most]:
        wait, sent = it.exposed_s * 1e3, it.sent_bytes / 1e6
        print(
            f"  {it.schedule:10} U = {it.ulysses:2}   {it.reason:8}{wait:7.2f} ms exposed, {sent:6,.0f} MB sent"
        )
    if refused := [str(it.ulysses) for it in found if it.reason == "heads"]:
        print(f"  heads that so many ranks cannot share: U = {', '.join(refused)}")


report(2048, 16, h100.inside, 3)
report(2048, 16, h100.between, 6)
report(65536, 16, h100.between, 3)
report(2048, 96, h100.between, 2)

# %% [markdown]
# With 65,536 tokens on a rank the ring sends most of all, and costs nothing; what holds the tokens *and* the heads does not even fit. With 2,048 on the slower link a ring of 16 is
# late at each hop. Rows of 2 halve the number of hops and put twice the work beside each, which is then hardly late: a trade inside the row is the price. Ulysses sends
# less than they do, and waits for all of it. With 96 ranks some rows are refused, by a reason and not by silence.
#
# The whole of it as a **decision map**: across, tokens per rank; up, bandwidth; the colour is who exposes least. It begins with 8 K/V heads: move K up to 32, then P.

# %% tags=["nbval-ignore-output"]
decision_map.play("h100", P=16, hybrids=True)

# %% [markdown]
# Right of the heavy line a ring, whatever the heads. Left of it, where shards are short or links slow, rows: a few ranks in each where K/V heads are few, all of them (Ulysses) where they
# are many, or shards very short. An all-gather nearly nowhere; its merits are others. Llama 3 was trained with one (arXiv 2407.21783), as any mask is simple then, and grouped K and V are small.
#
# ## 4 · For a cluster
#
# A cluster has two kinds of links, and ringlab's planner weighs every split of its ranks over both, with weights, activations and cache in memory:

# %%
for name in ("llama2-7b", "llama3-8b"):
    sized = published(name)
    for tokens in (2**15, 2**17, 2**20):
        best = plan(Request(name, tokens, "h100", nodes=2, purpose="prefill")).best
        split = f"ring {best.degrees.ring:2} × Ulysses {best.degrees.ulysses}"
        print(
            f"{name}, {sized.H} and {sized.K:2} heads, prefill {tokens:9,} tokens: {split}, {best.step_s:7.2f} s"
        )
chosen = plan(Request("llama3-70b", 2**20, "h100", nodes=2, purpose="decode"))
print(chosen.answer)

# %% [markdown]
# Models of about one size, the same GPUs; the second model has a quarter of the K/V heads. **Grouped heads move the choice towards the ring, and so do long sequences.** Rows, where there are some,
# lie inside a node: *what nothing hides goes on the fastest links*. Tensor parallelism is such a thing too, and shares out heads as well; what it takes, Ulysses cannot have. Last, decode:
# tensor parallelism of 8 (tp), and 2 ranks that share the cache (cp), with neither ring nor Ulysses. Why, we shall see.
#
# ## 5 · A window instead
#
# Mistral 7B bounded attention to the last 4,096 tokens. Then blocks out of reach need not travel, in any schedule that moves blocks:

# %%
layout = contiguous(S, P)
for window in (256, 128, 64, 16):
    run = VirtualCluster(P).run(on_rank, "ring", 4, Mask(window=window))
    print(f"window {window:3} of {S} tokens: hops {run.trace.rounds(0)}, bytes {run.trace.bytes_sent(0):7,}")

# %% tags=["nbval-ignore-output"]
predict(
    "15.window",
    "32 layers, each with a window of 4,096 tokens. How many tokens can the last output depend on?",
    unit="tokens",
)


# %%
def reached(layers, window, tokens):
    """Of how many tokens the last one's output depends on, counted path by path."""
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    seen = (distance >= 0) & (distance < window)
    found = np.eye(tokens, dtype=bool)[-1]
    for _ in range(layers):
        found = found @ seen
    return int(found.sum())


for layers in (1, 2, 4, 8):
    print(
        f"window 16, {layers} layers: {reached(layers, 16, 256):4} tokens, layers · (window − 1) + 1 = {layers * 15 + 1}"
    )
compare("15.window", 32 * (4096 - 1) + 1)

# %% [markdown]
# One hop is left with the smallest window: the first tokens of a shard look across its border. (Contiguous shards, as a window gives all rows alike work.) And the reach is layers ×
# window, nearly. Full attention reaches everything in one. But **to reach is not to see**: what is far is handed on once a layer, and mixed with a whole window each time. Let
# each layer look at all of its window alike, and follow what the last token takes in:

# %%
for layers, window in ((1, 4096), (8, 4096), (32, 4096)):
    one = np.full(window, 1 / window)
    width = 1 << (layers * window).bit_length()
    mass = np.fft.irfft(np.fft.rfft(one, width) ** layers, width)[: layers * (window - 1) + 1]
    far = mass[len(mass) // 4 * 3 :].sum()
    print(
        f"{layers:2} layers: reach {len(mass):7,}; the furthest quarter gives {far:.2g} of all that is taken in"
    )

# %% [markdown]
# A quarter with one layer, less than a millionth with 32. Training can do better than "all alike", but it has to carry each fact from window to window, not knowing who
# will ask. That is why today's models mix: some layers with a window, some with full attention, and the latter need their ring.
#
# ## 6 · Decode
#
# A model that writes takes in one token at a time: one query, and all keys so far. First the prompt is **prefilled**, by ring attention as in training, and each rank
# keeps its K and V: the cache is sharded as the prompt was.


# %%
def generate(ring, prompt, new, merge="all-reduce"):
    """Prefill, then `new` steps; the outputs, the tokens of each rank."""
    q, k, v = corpus.qkv(prompt + new, heads=H, kv_heads=4, head_dim=D)
    layout = zigzag(prompt, ring.world_size)
    shards = [layout.shard(x[:, :, :prompt], ring.rank) for x in (q, k, v)]
    ring_attention(*shards, ring=ring, layout=layout, validate=False)
    cache = ShardedCache.of_shards(ring, layout, *shards[1:])
    outs = []
    for at in range(prompt, prompt + new):
        now = slice(at, at + 1)
        cache.append(k[:, :, now], v[:, :, now])
        outs.append(decode(q[:, :, now], cache, merge=merge, validate=False))
    return torch.cat(outs, dim=2), cache.lengths


run = VirtualCluster(P).run(generate, 250, 6)
out, lengths = run.results[0]
truth = oracle.attention(*corpus.qkv(256, heads=H, kv_heads=4, head_dim=D), causal=True)[0][:, :, 250:]
print(
    "6 tokens after 250, all of one process:", np.abs(out.numpy() - truth).max() / np.abs(truth).max() < 1e-5
)
print(f"tokens of the ranks at the end: {lengths}")

# %% [markdown]
# A new token goes to the rank that has fewest, and nobody needs to ask: all have counted alike. Had they all gone to the last rank, it alone would grow and read longest.
#
# How do the other ranks' keys come to the query? A ring would bring them: P − 1 hops, S/P tokens each.

# %% tags=["nbval-ignore-output"]
predict(
    "15.decode",
    "The prompt grows from 256 to 4,096 tokens. What a rank sends for one new token",
    choices=["grows 16 times", "grows a little", "stays the same"],
)

# %%
sent = {}
for prompt in (256, 1024, 4096):
    for merge in ("all-reduce", "tree"):
        traces = [VirtualCluster(P).run(generate, prompt, new, merge).trace for new in (1, 2)]
        sent[prompt, merge] = traces[1].bytes_sent(0) - traces[0].bytes_sent(0)
    around = (P - 1) * 2 * 4 * D * 4 * prompt // P
    told = ", ".join(f"{merge} {sent[prompt, merge]:,}" for merge in ("all-reduce", "tree"))
    print(f"prompt {prompt:5,}: {told} bytes a token; K and V around a ring: {around:7,}")
print(f"(P − 1) · H · (D + 1) · 4 = {(P - 1) * H * (D + 1) * 4:,} bytes")
compare("15.decode", "stays the same" if len({*sent.values()}) == 2 else "grows 16 times")

# %% [markdown]
# **Decode needs no ring.** One query is smaller than any block of keys, so it is the query that should travel, and as all ranks hold it already, not even that does. Each rank attends
# to its own keys and has (out, lse); the merge of lesson 02 puts them together, exactly: H·(D + 1) numbers from each, whatever S. (A tree does it in log₂ P rounds;
# arXiv 2408.04093.)
#
# And could a ring not hide its hops here, as in training? A block of c keys has c pairs with one query, with c queries c². Llama 3 70B, 131,072 tokens on 8 H100:

# %%
c, link = 2**17 // 8, h100.inside
hop = c * llama.block_bytes_per_token / link.bytes_per_s
block = 4 * llama.H * llama.D * c / h100.peak("bfloat16")
read = c * llama.block_bytes_per_token / h100.memory_bytes_per_s
partials = 7 * llama.H * (llama.D + 1) * 4
print(
    f"a hop {hop * 1e6:.0f} µs; a block's arithmetic {block * 1e6:.1f} µs, reading its keys {read * 1e6:.0f} µs"
)
print(
    f"all partial results: {partials / 1e3:.0f} kB, {partials / link.bytes_per_s * 1e6:.1f} µs, and latency"
)

# %% [markdown]
# What takes time in decode is reading: of the weights and of the cache. That is what more ranks share out.
#
# ## Recap
#
# | | a rank sends, in heads of its tokens | exposed | take it where |
# |---|---|---|---|
# | ring | 2K·(P−1) | what hops take longer than blocks | shards are long enough to hide; any heads |
# | all-gather | 2K·(P−1) | all | few K/V heads, short sequences, simple code |
# | Ulysses | (2H+2K)·(P−1)/P, beyond K ranks P for K | all | heads enough for all ranks, fast links, short shards |
# | hybrid | Ulysses in rows, a ring of P/U | the rows', and what hops take longer | nodes: rows inside, ring between |
# | decode | H·(D+1) *numbers* to each other rank | all, and little | one token at a time |
#
# - Grouped heads shrink what moves K and V. They do little for Ulysses, and bound its degree.
# - A window saves hops; reach grows by one window a layer, but what comes from afar is thin.
#
# ## Self-check
#
# 1. 32 query and 8 K/V heads: from how many ranks on does Ulysses send less than a ring? *(P·8/40 > 1, so from 6 on; the first of these that can share the heads is 8.)*
# 2. Why does a hybrid's hop carry as many bytes as the ring's while U divides K? *(U times the tokens, a U-th of the heads.)* And what has changed? *(P/U − 1 hops instead
#    of P − 1, beside U times the work.)*
# 3. Multi-query attention, K = 1, 8 ranks, Ulysses. How many copies of K and V are there? *(8: each rank holds the one head, of all tokens.)*
# 4. Decode with a batch of 64 sequences: what grows? *(Partial results, 64 times; reading the cache too. Weights are read once for all.)*
# 5. The cache is contiguous, and a window of 4,096 looks at the last rank's keys only. What is lost? *(Parallel reading: one rank works. Dealt in small pieces, all do.)*
#
# Now decide: [exercise 15](../exercises/15_choosing.ipynb), bytes by schedule, a report with reasons, and the decode step.
