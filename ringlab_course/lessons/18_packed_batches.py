# %% [markdown]
# # 18 · Packed and variable-length batches
#
# **Afterwards you can** pack documents into one row, share the row over ranks, and explain why mask, bounds, labels, positions and
# loss give the result of each document computed alone.
#
# **You need first** [lesson 08](08_striped_and_zigzag.ipynb), layouts, and [lesson 14](14_training.ipynb), labels and the loss of a
# sharded sequence.
#
# **Minutes** 75 to read and run; the exercise takes another 60.
#
# Real documents have all lengths, and a tensor is a rectangle. So training packs documents into long rows. Many [published
# bugs](../docs/field-reports.md) of context parallelism begin there: they handle by *rank* something that belongs to a *document*. Some show only
# with several documents, others only with uneven lengths. Most raise no error, and often the loss looks as it should.

# %%
import numpy as np
import torch
from torch.nn import functional as F

from ringlab import Mask, VirtualCluster, contiguous, ring_attention, striped, zigzag
from ringlab.cost.hardware import hardware
from ringlab.cost.models import model
from ringlab.cost.sequence_time import SequenceCosts
from ringlab.errors import LayoutError
from ringlab.nn import IGNORE, Context, ModelConfig, Transformer
from ringlab.packing import Packing
from ringlab.packing.comparison import compare as compare_assignments
from ringlab_course import compare, corpus, predict
from ringlab_course.figures import packed_view
from ringlab.viz.style import show

# %% [markdown]
# ## 1 · A rectangle of documents
#
# Here are 24 documents, many short ones and a few long ones, as is common in text. (We draw their lengths from a
# log-normal distribution.) The simplest batch gives each document a line, filled up to the longest with *padding*, tokens that mean nothing.

# %%
lengths = np.random.default_rng(18).lognormal(5.5, 1.1, 24).astype(int)
print("lengths, sorted:", *sorted(lengths.tolist()))

# %% tags=["nbval-ignore-output"]
predict(
    "18.padding",
    "24 documents, padded to the longest: what percentage of the batch is padding?",
    unit="%",
)

# %%
padding = 1 - lengths.sum() / (len(lengths) * lengths.max())
print(f"{lengths.sum():,} tokens in {len(lengths)} lines of {lengths.max():,}")
compare("18.padding", 100 * padding)
show(packed_view.rectangle(lengths, columns=lengths.max()),
     packed_view.describe_rectangle(lengths, columns=lengths.max()))

# %% [markdown]
# A matrix product computes padding like any other token. Packing writes the documents one after the other, without a gap (on the right, where
# two documents go on in the next line). On a ring such a batch is usually a single line, the **row**: a sequence of S tokens that all ranks
# share.
#
# ## 2 · Three ways to write a bound
#
# Four documents of 5, 1, 7 and 3 tokens are enough from here on. There are three common ways to write down where one ends:

# %%
documents = (5, 1, 7, 3)
row = Packing.of_lengths(documents)
print("cu_seqlens    ", row.cu_seqlens.tolist())
print("position ids  ", *row.position_ids)
print("document ids  ", *row.document_ids)

# %% [markdown]
# - **cu_seqlens**, cumulative lengths: 0, then the end of every document. Kernels for packed rows take these.
# - **Position ids** begin again at 0 with each document. The code that builds batches, the *collator*, often makes these.
# - **Document ids**, also called segment ids: a number for each token.
#
# Each form gives the other two, as long as no document is *empty*. An empty one repeats a bound in cu_seqlens. In document ids it is at most a
# number left out, and in position ids nothing shows it. All three describe the *whole row*, which is easily forgotten once the row has been cut.
#
# Two words for the rest of the lesson. **Position**: a token's index within its document. **Place**: its index within the row. (Earlier
# lessons had one document, and their *global positions*, as in `layout.positions(rank)`, are places.)

# %%
same = [Packing.of_cu_seqlens([0, 5, 6, 13, 16]), Packing.of_position_ids(row.position_ids),
        Packing.of_document_ids(row.document_ids)]
print([each.documents for each in same])

# %% [markdown]
# ## 3 · Which token sees which
#
# A query sees the keys of its own document at or before itself. In the picture a square is a visible pair, in the colour of the rank that
# owns the query:

# %%
S = sum(documents)
pictured = [contiguous(S, 2), zigzag(S, 2)]
show(packed_view.figure(pictured, documents), packed_view.describe(pictured, documents))

# %% [markdown]
# Four triangles, and nothing between them. A zig-zag balances one large triangle; with several it depends on where they fall. Here, nearly:

# %%
for layout in pictured:
    whole = row.mask().visible(np.arange(S), np.arange(S))
    print(layout.name, "pairs by rank:", [int(whole[layout.positions(r)].sum()) for r in range(2)])

# %% [markdown]
# If the mask does not know the documents, one large triangle is computed, and values leak from each document into the next. In [one published
# ring](https://github.com/axolotl-ai-cloud/axolotl/issues/3608) the first loss was 1.83 times that of a single GPU. A test needs no
# second implementation: change **one token**, and look which outputs move.

# %%
torch.manual_seed(18)
embedding = torch.randn(256, 3, 1, 2, 8, dtype=torch.float64)  # q, k and v of each token, 2 heads


def attend(tokens, visible):
    """Attention of a row, (2, S, 8); `visible` says which query sees which key."""
    q, k, v = embedding[tokens].permute(1, 2, 3, 0, 4)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.from_numpy(visible))[0]


def moved(visible, token):
    """The places of the outputs that change if this token becomes another one."""
    before = torch.arange(S)
    after = before.clone()
    after[token] = 99
    difference = attend(before, visible) - attend(after, visible)
    return torch.nonzero(difference.abs().amax((0, 2))).flatten().tolist()


# %% tags=["nbval-ignore-output"]
predict(
    "18.leak",
    "Token 6, the first of document 2, changes. With a causal mask that knows no "
    "documents, how many of the 16 outputs move?",
    unit="outputs",
)

# %%
places = np.arange(S)
causal, packed = Mask().visible(places, places), row.mask().visible(places, places)
print("outputs that move with documents:", moved(packed, 6))
print("outputs that move without:       ", moved(causal, 6))
compare("18.leak", len(moved(causal, 6)))

# %% [markdown]
# Token 6 may move its own document's outputs, here seven. Without documents it also moves the next document's three. The test in general: a
# token moves its own output and those after it in its document, and no other.
#
# ## 4 · The bounds of a shard
#
# Now cut the row. Each rank's kernel wants cu_seqlens for its own part. A fork of Megatron-LM computed them like this
# ([report](https://github.com/ISEEKYAN/Megatron-LM/issues/111)):
#
# ```python
# cu_seqlens = cu_seqlens // cp_size
# ```
#
# (`cp_size` is P.) This takes for granted that each rank has 1/P of every document. Contiguous shards break that: below, rank 0 holds no token of
# document 3, rank 1 none of document 0. Yet both ranks read the same bounds.

# %%
P = 2
print("cu_seqlens    ", row.cu_seqlens.tolist())
print("divided by P  ", (row.cu_seqlens // P).tolist())
for rank in range(P):
    held = row.document_ids[contiguous(S, P).positions(rank)]
    print(f"rank {rank} holds tokens of documents", *held)

# %% tags=["nbval-ignore-output"]
predict(
    "18.divided",
    "Bounds 0 2 3 6 8 give the 8 tokens of either rank the numbers 0 0 1 2 2 2 3 3. A query sees "
    "the keys that have its number, on either rank, and are not later in the row. For how many of "
    "the 16 queries are these exactly the right keys? (Shards are contiguous.)",
    unit="queries",
)


# %%
def by_divided_bounds(packing, layout):
    """The document of each token, if ranks number their tokens by the row's bounds over P."""
    local, document = packing.cu_seqlens // layout.P, np.empty(packing.length, int)
    for rank in range(layout.P):
        count = np.arange(layout.length(rank))
        document[layout.positions(rank)] = np.searchsorted(local, count, side="right") - 1
    return document


def seen_with(document):
    """Which query sees which key if these are the documents of the row's tokens."""
    places = np.arange(len(document))
    return (document[:, None] == document) & (places[:, None] >= places)


def right_queries(packing, layout):
    """The places of the queries that see exactly the right keys with divided bounds."""
    sees, right = map(seen_with, (by_divided_bounds(packing, layout), packing.document_ids))
    return np.flatnonzero((sees == right).all(axis=1)).tolist()


# %%
halves = contiguous(S, P)
for rank in range(P):
    print(f"rank {rank} takes its tokens for those of documents",
          *by_divided_bounds(row, halves)[halves.positions(rank)])
print("queries that see exactly the right keys:", right_queries(row, halves))
compare("18.divided", len(right_queries(row, halves)))
both = seen_with(row.document_ids), seen_with(by_divided_bounds(row, halves))
show(packed_view.mistaken(*both), packed_view.describe_mistaken(*both))

# %% [markdown]
# Both ranks read the same bounds, so token 8, the first of rank 1, gets number 0 like tokens 0 and 1, and sees them. Document 2 falls apart.
# (Queries 6 and 7 are right by luck: no token of documents 0 and 1 has got their number, 3.)
#
# When is the division right? If every rank holds equally many tokens of **every** document. [Lesson 08](08_striped_and_zigzag.ipynb)'s layout
# *two of each*, `per_document` in ringlab, cuts each document into 2P pieces and gives two to each rank. So a test of divided bounds passes with this layout, as long as
# all its lengths are multiples of 2P. Otherwise tokens are left over, and all go to the rank that has fewer
# so far. On two ranks seven tokens are four pieces of one, two for each; the other three go to rank 0.

# %%
even = Packing.of_lengths((8, 4, 12))
for packing in (even, row):
    layout = packing.layout("per_document", P)
    held, n = [packing.document_ids[layout.positions(r)] for r in range(P)], len(packing.documents)
    shares = [np.bincount(ids, minlength=n).tolist() for ids in held]
    right = len(right_queries(packing, layout))
    print(f"documents of {packing.documents}: {right} of {packing.length} queries right;",
          f"tokens of each document by rank {shares}")

# %% [markdown]
# Some libraries therefore pad every document to a multiple of 2P. (Then places in the padded row and in the real one differ, and mixing them up is
# [a bug of its own](https://github.com/NVIDIA/Megatron-LM/issues/4495).) What does the padding cost on our 24 documents?

# %% tags=["nbval-ignore-output"]
predict(
    "18.rounded",
    "8 ranks, so every document is rounded up to a multiple of 16 tokens. By what percentage "
    "does the row grow?",
    unit="%",
)

# %%
real = Packing.of_lengths(lengths.tolist())
rounded = real.padded(16)
print(f"{real.length:,} tokens, {rounded.length:,} with padding")
compare("18.rounded", 100 * (rounded.length / real.length - 1))
shortest = Packing.of_lengths([1] * 100).padded(16)
print("a hundred documents of one token:", shortest.length, "tokens with padding")

# %% [markdown]
# Here 1 %, but a row of one-token documents grows 16-fold. The padding is needed only because all ranks use one list of bounds, divided by P.
# The other way keeps each token's **place in the row**: two places and the row's bounds decide whether a query sees a key. ringlab works like this, in any layout and
# for any lengths, here on three ranks, whose shards are uneven. (A block: the keys of one rank, as the queries of one rank see them.)


# %%
def on_ring(ring, layout, packing, qkv):
    parts = layout.shard(qkv, ring.rank)
    return ring_attention(*parts, ring=ring, layout=layout, mask=packing.mask(), block="naive")


def blocks_seen(layout):
    """Whether any query of one rank sees any key of another: (P, P), of bool."""
    own = [layout.positions(rank) for rank in range(layout.P)]
    visible = row.mask().visible(places, places)
    return np.array([[visible[np.ix_(rows, keys)].any() for keys in own] for rows in own])


q, k, v = embedding[torch.arange(S)].permute(1, 2, 3, 0, 4)
alone = [F.scaled_dot_product_attention(*(x[..., own, :] for x in (q, k, v)), is_causal=True)
         for own in row.slices]
for layout in (contiguous(S, 3), zigzag(S, 3), striped(S, 3), row.layout("per_document", 3)):
    run = VirtualCluster(3).run(on_ring, layout, row, (q, k, v))
    error = (layout.unshard(run.results) - torch.cat(alone, dim=-2)).abs().max().item()
    print(f"{layout.name:13} as each document alone, to 1e-12: {error < 1e-12},",
          f"{np.count_nonzero(blocks_seen(layout))} of 9 blocks hold a visible pair")

# %% [markdown]
# A rank skips a block of which its queries see no key, and passes it on all the same: a later rank may need it.
#
# ## 5 · Labels
#
# The label of a token is the next token of **its document**. Two borders matter. At the end of a document there is no next token, and no label. At the
# end of a *run*, a stretch of the row that one rank holds without a gap, the next token is on another rank. Three ways to make labels:
#
# - *shift the row*, ignoring documents, then cut;
# - *cut first*, then shift on each rank, within documents;
# - *shift in documents*, then cut.

# %%
numbers = torch.arange(S)[None]  # every token is its own place
labels_of_row = row.next_tokens(numbers)[0]
print("labels:", *labels_of_row.tolist())


def shift(tokens, of=None):
    """The token after each; −100 after the last, and where the next one is of another document."""
    labels = torch.full_like(tokens, IGNORE)
    labels[:-1] = tokens[1:]
    if of is not None:
        labels[:-1][of[1:] != of[:-1]] = IGNORE
    return labels


# %% tags=["nbval-ignore-output"]
predict(
    "18.labels",
    "Striped over 2 ranks; each rank cuts first, then shifts within documents. How many "
    "of the 16 labels are wrong? (A label that is lost is wrong, too.)",
    unit="labels",
)

# %%
of = torch.from_numpy(row.document_ids)
layouts, cut_first = [contiguous(S, 2), zigzag(S, 2), striped(S, 2)], []
for layout in layouts:
    wrong, label = {"shift the row": 0, "cut first": 0, "in documents": 0}, np.empty(S, int)
    for rank in range(2):
        own = torch.from_numpy(layout.positions(rank))
        made = shift(numbers[0])[own], shift(numbers[0][own], of[own]), shift(numbers[0], of)[own]
        for name, labels in zip(wrong, made, strict=True):
            wrong[name] += int((labels != labels_of_row[own]).sum())
        label[own] = made[1]
    cut_first.append(label)
    print(f"{layout.name:11} wrong labels:", wrong)
    if layout.name == "striped":
        compare("18.labels", wrong["cut first"])
drawn = layouts, documents, cut_first, labels_of_row.numpy()
show(packed_view.labels(*drawn), packed_view.describe_labels(*drawn))

# %% [markdown]
# The picture shows *cut first*. A square is a token in the colour of its rank, with the place of its label in it (none: −100). A hollow one has a
# wrong label, or lost its own.
#
# - *Shift the row* invents a label at the end of every document but the last: the model is to guess how an unrelated text begins.
# - *Cut first* ([published](https://github.com/verl-project/verl/issues/4250)) breaks the label at the end of every
#   run, unless a document ends there too. A contiguous or zig-zag shard has one or two runs; in a striped shard every token is a run.
#
# So shift in the whole row, within documents, and let labels travel with their tokens. The same holds for loss weights and everything else
# that belongs to a token.
#
# ## 6 · Positions
#
# Rotary embedding turns q and k by angles proportional to a number. Three are at hand: the position in the document, the place in the row, and the index in the
# shard.


# %%
def turn(x, positions):
    """Rotary positions: turn the pair (x[i], x[i + 4]) by position · 100^(−i/4)."""
    turns = 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    angles = torch.as_tensor(positions)[:, None] * turns
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def with_positions(positions):
    """Attention of the row with these positions and the right mask."""
    visible = torch.from_numpy(packed)
    turned = turn(q, positions), turn(k, positions)
    return F.scaled_dot_product_attention(*turned, v, attn_mask=visible)


# %% tags=["nbval-ignore-output"]
predict(
    "18.positions",
    "The mask is right, but rotary embedding gets each token's place in the row instead "
    "of its position in the document. How does the output change?",
    ["not at all, but for rounding", "a little, in later documents", "much, in all but the first"],
)

# %%
index = np.empty(S, int)
for rank in range(2):
    index[zigzag(S, 2).positions(rank)] = np.arange(zigzag(S, 2).length(rank))
right = with_positions(row.position_ids)
for name, positions in (("place in the row", places), ("index in a zig-zag shard", index)):
    error = (with_positions(positions) - right).norm() / right.norm()
    print(f"{name:25} relative difference", f"{error:.2f}" if error > 1e-9 else "below 1e-9")
close = (with_positions(places) - right).abs().max() < 1e-9
compare("18.positions", "not at all, but for rounding" if close else "much, in all but the first")

# %% [markdown]
# A product of turned vectors depends on the *difference* of the two numbers, and within a document position and place differ by a constant.
# So places do no harm here. (They do with learned positions, and with methods that treat positions beyond a limit differently.) Indices in a
# shard do: neighbours on different ranks no longer differ by one. Places 3 and 4 get the indices 3 and 0.
#
# ## 7 · The loss
#
# The loss is a mean over the tokens that count. Who counts them? Four ranks hold these sums of −log p, over these numbers of tokens:

# %%
sums, counts = np.array([8.0, 30.0, 12.0, 100.0]), np.array([4, 10, 2, 50])
print("mean of all ranks' tokens:  ", round(sums.sum() / counts.sum(), 3))
print("mean of the ranks' means:   ", round((sums / counts).mean(), 3))

# %% tags=["nbval-ignore-output"]
predict(
    "18.loss",
    "A library adds up the sums of all ranks, and each rank divides by its own count. The loss "
    "that rank 0 reports is how many times the mean of all ranks' tokens?",
    unit="times",
)

# %%
factor = (sums.sum() / counts[0]) / (sums.sum() / counts.sum())
print(f"{factor:.1f} times")
compare("18.loss", factor)

# %% [markdown]
# Where all ranks have equal counts, the factor is P, as it was in [verl](https://github.com/verl-project/verl/issues/5983); here it differs by rank
# and by batch. The mean of means is wrong too: rank 2's two tokens have as much say as rank 3's fifty. **Count
# over all ranks, once, before anybody divides.** Padding has no labels, so it does not count.
#
# Packing can also change, unnoticed, what counts as *one vote* in the loss: a token, or a document. A mean over tokens gives a long document more say than a short one. A padded batch with a mean per
# line counts each *document* once instead, as in some losses of reinforcement learning. The packed loss must keep the choice:

# %%
losses = 1 + 4 / (1 + torch.from_numpy(row.position_ids).double())  # later tokens are easier
count = labels_of_row != IGNORE
by_token = losses[count].mean()
having = [own for own in row.slices if count[own].any()]  # a document of one token has no label
by_document = torch.stack([losses[own][count[own]].mean() for own in having]).mean()
print(f"each token counts once: {by_token:.3f}, each document counts once: {by_document:.3f}")

# %% [markdown]
# If a document lies on two ranks, neither knows its mean. In the exercise you find each token's weight with one reduction.
#
# ## 8 · A short document does not fill a ring
#
# So far one ring shared the whole row. Back to the 24 documents, now on 16 ranks. What if each document had a ring of its own, of as many ranks as
# suit it? The times of this section come from a model, not from a GPU: a training step of Llama 3 8B on H100s, 8 to a node. Reading the weights
# from memory, once for all documents, is left out.

# %%
costs = SequenceCosts.of(model("llama3-8b"), hardware("h100"))
for length in (72, 432, 5_526):  # three of the 24
    ms = [1e3 * costs.rank_s(length, ranks) for ranks in (1, 2, 4, 8, 16)]
    print(f"{length:5,} tokens on 1, 2, 4, 8, 16 ranks:", *(f"{each:6.1f}" for each in ms), "ms")

# %% [markdown]
# The long document gains from every rank, until the ring crosses to a second node. 72 tokens take 4.1 ms on one rank. An eighth of that would be 0.5
# ms, but eight ranks take 2.3: most of it is waiting for hops. **Dynamic context parallelism** gives each document its own number of ranks, its *degree*, here 1, 2, 4, 8 or 16.

# %% tags=["nbval-ignore-output"]
predict(
    "18.share",
    "Attention computes about n² / 2 pairs for n tokens. Which share of all pairs of the "
    "24 documents belongs to the longest one, of 5,526 tokens? (The next have 2,242 and 1,440.)",
    ["a quarter", "half", "three quarters", "nearly all"],
)

# %%
pairs = np.array([n * (n + 1) / 2 for n in lengths])
percent = 100 * pairs / pairs.sum()
print("pairs of the longest documents, in percent:", *np.sort(percent)[::-1][:4].round(1))
alone = np.array([costs.rank_s(length, 1) for length in lengths])
print(f"share of the time, each on one rank: {alone.max() / alone.sum():.0%}")
choices = {"a quarter": 25, "half": 50, "three quarters": 75, "nearly all": 100}
compare("18.share", min(choices, key=lambda name: abs(choices[name] - percent.max())))

# %% [markdown]
# The longest document has only 36 % of the *time*, since the linear layers cost every token the same. Now we compare four ways:
#
# - **packed**: one ring of 16 for the whole row, as so far;
# - **two rows**: the documents are dealt to two rows, longest first, and each row is packed on a ring of 8, inside one node;
# - **static**: rings of one size, whichever is fastest; each ring does its share of the documents one after another;
# - **dynamic**: a degree for each document, chosen so that all ranks end at about the same time.
#
# A rank has memory for 2,048 tokens in all. So 5,526 tokens need at least 4 ranks (3 is no degree), 2,242 need 2, all others 1. That gives a **bound**
# for all four ways: on these fewest ranks, count time × ranks of each document, and divide the sum evenly among the 16. No way can be faster, since
# more ranks for a document add waiting and remove no work.

# %%
found = compare_assignments(lengths.tolist(), P=16, capacity=2048, costs=costs)
rows = [[], []]
for length in sorted(lengths.tolist(), reverse=True):
    min(rows, key=sum).append(length)
times = {"packed": costs.row_s(lengths.tolist(), 16),
         "two rows": max(costs.row_s(each, 8) for each in rows),
         "static": found.static_s, "dynamic": found.dynamic_s, "bound": found.least_s}
for way, time in times.items():
    print(f"{way:8} {1e3 * time:5.0f} ms, {time / found.least_s:.2f} of the bound")

# %% [markdown]
# In the picture each column is a rank, and each block a document, as wide as the ranks that share it, with its tokens where there is room. (Colours
# repeat; the white above a column is waiting. The bound is for the rank that ends last, so others may end below it.)

# %%
placed = [[[(each, costs.rank_s(lengths[each], degree) * 1e3) for each, degree in on_rank]
           for on_rank in packed_view.on_ranks(made)] for made in (found.static, found.dynamic)]
titles = ["static: one degree for all", "dynamic"]
show(packed_view.groups(placed, titles, lengths, found.least_s * 1e3),
     packed_view.describe_groups(placed, ["static", "dynamic"]))

# %% [markdown]
# Under *static* each document has a ring of eight to itself, and the short ones do not fill it: 72 tokens wait for hops most of their 2.3 ms, and
# even of the 5.2 ms of 432 tokens only 24.9 / 8 = 3.1 are computing. Under *dynamic* 21 documents are on one rank each, where nothing of them travels.
#
# *Packed* on one ring is slow because that ring crosses the nodes. A document of n tokens on d ranks sends the keys and values of n · (d − 1) tokens. In
# one ring of 16 the whole row goes around, and between the nodes its hops take longer than the computing. *Two rows* send half as much, and none of
# it between nodes. In a row short documents share the hops with long ones, so that this plain way is as fast as *dynamic* here:

# %%
print(f"packed, one ring of 16: {real.length * 15:7,} tokens' keys and values travel")
print(f"two rows, rings of 8  : {real.length * 7:7,}")
for name, made in (("static", found.static), ("dynamic", found.dynamic)):
    placed_once = [each for batch in made.micro_batches for each in batch]
    travelling = sum(lengths[each.sequence] * (each.degree - 1) for each in placed_once)
    print(f"{name:22}: {travelling:7,}")

# %% [markdown]
# ## 9 · All of it in a step
#
# Last, a step of training: a small decoder on 3 ranks, with labels, positions, mask, and a loss that counts over all ranks. `Packing.shard`
# shifts labels within documents, cuts, and adds position ids. Loss and the embedding's gradient must be those of one process that computes each
# document alone. (`spoil` is for later.)


# %%
CONFIG = ModelConfig(width=32, heads=4, kv_heads=2, hidden=64)
text = torch.from_numpy(corpus.tokens(S))[None]


def step(ring, layout, spoil=None):
    """This rank's share of the loss, and its gradient of the embedding."""
    decoder = Transformer(CONFIG, seed=0).double()
    part = row.shard(layout, ring.rank, input_ids=text, labels=text) | {"mask": row.mask()}
    if spoil:
        part |= spoil(part, torch.from_numpy(layout.positions(ring.rank)))
    # agreed: all ranks check that their layouts and masks are the same
    own = Context.agreed(ring, layout, mask=part["mask"], position_ids=part["position_ids"][0])
    # Only a fault brings a count of its own.
    total = part.get("count", ring.all_reduce((part["labels"] != IGNORE).sum()))
    share = total_loss(decoder(part["input_ids"], own), part["labels"]) / total
    share.backward()
    return share.item(), ring.all_reduce(decoder.embedding.weight.grad)


def total_loss(logits, labels):
    rows, own = logits.flatten(0, 1), labels.flatten()
    return F.cross_entropy(rows, own, ignore_index=IGNORE, reduction="sum")


# %%
decoder = Transformer(CONFIG, seed=0).double()
each_alone = [total_loss(decoder(text[:, own])[:, :-1], text[:, own][:, 1:]) for own in row.slices]
loss = sum(each_alone) / (labels_of_row != IGNORE).sum()
loss.backward()
for layout in (zigzag(S, 3), row.layout("per_document", 3)):
    shares, gradients = zip(*VirtualCluster(3).run(step, layout).results, strict=True)
    same = abs(sum(shares) - loss.item()) < 1e-12
    close = torch.allclose(gradients[0], decoder.embedding.weight.grad, atol=1e-12)
    print(f"{layout.name:13} as each document alone: loss {same}, embedding's gradient {close}")

# %% [markdown]
# And with a bug?

# %%
faults = {
    "none": None,
    # ringlab refuses this mask with the right positions. Places do no harm, by section 6.
    "mask without documents": lambda part, own: {"mask": Mask(), "position_ids": own[None]},
    "labels cut first": lambda part, own: {"labels": shift(part["input_ids"][0], of[own])[None]},
    # A rank's sum over 3 times its own count; the three add up to the mean of means.
    "mean of ranks' means": lambda part, own: {"count": 3 * (part["labels"] != IGNORE).sum()},
    "index as position": lambda part, own: {"position_ids": torch.arange(len(own))[None]},
}
for name, spoil in faults.items():
    try:
        run = VirtualCluster(3).run(step, zigzag(S, 3), spoil)
        total = sum(share for share, _ in run.results)
        print(f"{name:23} loss {total:.3f}, as alone: {abs(total - loss.item()) < 1e-12}")
    except LayoutError as refusal:
        print(f"{name:23} refused:", *str(refusal).splitlines(), sep="\n    ")

# %% [markdown]
# Three losses that nobody would doubt, and no error. (The decoder is untrained, so its loss is near ln 256 = 5.55 whatever the bug. In the published
# ring of section 3 the same leak gave 1.83 times the loss.) The comparison with documents computed alone finds all three. (ringlab compares position
# ids with layout and mask, and refuses wrong ones; most code does not.)
#
# ## Recap
#
# - A row of packed documents saves the padding. cu_seqlens, position ids and document ids say the same thing, of the *whole row*.
# - Bounds divided by P are right only if each rank holds the same number of tokens of every document. For a mask, places in the row are always right.
# - To find a wrong mask, change one token and look which outputs move.
# - Labels and positions are made before the cut, within documents, and travel with their tokens.
# - The loss is divided by a count over all ranks; padding does not count. Whether tokens or documents count once is a choice: keep it.
# - A short document alone does not fill a ring: pack it with others, or give it one rank. A ring that crosses nodes needs long sequences.
#
# ## Self-check
#
# <details><summary>1. A library's test stripes four documents of 512 tokens over four ranks and passes. Which bug of this lesson can it not
# see?</summary>Divided bounds: every rank has equally many tokens of each document. Nor can it
# tell a mean over tokens from one over documents.</details>
#
# <details><summary>2. In section 5, why did cutting first spoil one label with contiguous shards and all twelve with striped ones?</summary>A
# label is lost or replaced at the end of every run, unless a document ends there too, and in a striped shard every token is a run.</details>
#
# <details><summary>3. Position ids count through the whole row. When does it matter?</summary>Not for rotary embedding, which knows differences
# only; for learned positions and for methods that treat positions beyond a limit differently.</details>
#
# <details><summary>4. Why not give every short document a ring of its own on all 16 ranks?</summary>Each rank would compute on a few tokens of it, and
# wait for fifteen hops that nothing hides.</details>
#
# Now [exercise 18](../exercises/18_packed_batches.ipynb): bounds, shards, the ring, and the weights of the loss.
