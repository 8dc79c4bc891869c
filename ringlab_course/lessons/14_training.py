# %% [markdown]
# # 14 · Training a model in parallel
#
# **Afterwards you can** shard a transformer, its positions, labels, loss and gradients over the ranks of a ring so that
# it trains exactly as on one process; say what data, tensor, sequence, context and pipeline parallelism each shard, send
# and cost; and combine them on a mesh.
#
# **You need first** [lesson 08](08_striped_and_zigzag.ipynb), layouts; [lesson 09](09_backward_ring.ipynb), the backward ring.
#
# **Minutes** 75 to read and run; the exercise takes another 60.
#
# Attention over a ring is exact, forward and backward. Around it is a model: embeddings, norms, a feed-forward, a loss,
# an optimizer. They treat each token by itself, so sharding them looks trivial. It *is* trivial, except for three lines.
# When one of the three is wrong, the model still trains, and nothing raises an error.

# %%
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional as F

from ringlab import VirtualCluster, contiguous, launch, ring_attention, zigzag
from ringlab.cost import memory
from ringlab.cost.models import model as published
from ringlab.cost.traffic import ring_traffic
from ringlab_course import compare, corpus, predict
from ringlab.nn import IGNORE, Context, Degrees, ModelConfig, Recipe, Transformer
from ringlab.nn import train
from ringlab_course.figures import loss_curves
from ringlab_course.figures.loss_curves import describe_shares, shares
from ringlab.viz.style import show

# %% [markdown]
# ## 1 · A decoder, by hand
#
# Two layers, 4 query heads that share 2 K/V heads, and bytes as tokens, 256 of them. The text is real: the source of
# Python's standard library. The norm is RMSNorm, the feed-forward is gated by SiLU, and the output layer is the embedding
# again. Weights are ten times the usual first ones, so that attention matters already.

# %%
CONFIG, P, S = ModelConfig(width=32, heads=4, kv_heads=2, hidden=96), 4, 64
D = CONFIG.width // CONFIG.heads
text = torch.from_numpy(corpus.tokens(2 * S)).view(2, S)  # two sequences
start = {name: x.detach().double() for name, x in Transformer(CONFIG, seed=0).named_parameters()}
weights = {name: 10 * x if x.ndim > 1 else x for name, x in start.items()}
print(f"{len(weights)} tensors, {sum(x.numel() for x in weights.values()):,} weights")


# %%
def turn(x, positions):
    """Rotary positions: turn the pair (x[i], x[i + D/2]) by position · 10000^(−2i/D)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-6)

# %% [markdown]
# The decoder is handed its `attend`:


# %%
def decoder(w, tokens, positions, attend):
    """The logits (B, L, vocabulary) of these tokens; `attend` is causal attention of q, k, v."""
    x = w["embedding.weight"][tokens]
    for n in range(CONFIG.layers):
        own = {name.removeprefix(f"layers.{n}."): value for name, value in w.items()}
        y = norm(x, own["attention_norm.weight"])
        projected = (y @ own[f"attention.{c}.weight"].mT for c in "qkv")
        q, k, v = (x.unflatten(-1, (-1, D)).transpose(1, 2) for x in projected)
        out = attend(turn(q, positions), turn(k, positions), v)
        x = x + out.transpose(1, 2).flatten(2) @ own["attention.out.weight"].mT
        y = norm(x, own["feed_forward_norm.weight"])
        gate, up = (y @ own[f"feed_forward.{c}.weight"].mT for c in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ own["feed_forward.down.weight"].mT
    return norm(x, w["norm.weight"]) @ w["embedding.weight"].mT


# %% [markdown]
# Is it right? ringlab's own Transformer must give the same logits from the same weights:


# %%
def off(found, right):
    """The largest difference, relative to the largest right value."""
    return ((found - right).abs().max() / right.abs().max()).item()


whole = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
model = Transformer(CONFIG).double()
model.load_state_dict(weights)
logits = decoder(weights, text, torch.arange(S), whole)
print("by hand as ringlab's Transformer, to 1e-12:", off(logits, model(text)) < 1e-12)

# %% [markdown]
# In which lines does one token meet another? Only in `attend`. A norm, a matrix, SiLU and a sum each work on single
# rows. (And `turn` asks where a token *is*.) So each rank gets its rows, their global positions, and an
# `attend` that goes around the ring.

# %%
layout = zigzag(S, P)


def on_rank(ring, layout, tokens):
    positions = torch.from_numpy(layout.positions(ring.rank))
    options = {"causal": True, "block": "naive", "validate": False}
    attend = partial(ring_attention, ring=ring, layout=layout, **options)
    return decoder(weights, layout.shard(tokens, ring.rank, dim=-1), positions, attend)


run = VirtualCluster(P).run(on_rank, layout, text)
together = layout.unshard(run.results, dim=1)
print("logits of all ranks together, those of one process to 1e-12:", off(together, logits) < 1e-12)
print("exchanges of each rank:", run.trace.rounds(0))

# %% [markdown]
# That is P − 1 hops in each layer, and nothing else. In real code, too, a context-parallel model is an ordinary model with
# two more arguments.
#
# ## 2 · The first line: where a token is
#
# Rotary embedding turns q and k by their positions, so their product depends on the *difference* of the two. On a rank's
# shard it is tempting to count `torch.arange(L)`, as on one process.

# %% tags=["nbval-ignore-output"]
predict(
    "14.positions",
    "Zig-zag, and each rank counts its tokens from 0. Which scores are wrong?",
    choices=["none: only differences matter", "those between ranks", "also some inside a rank"],
)


# %%
def counted(layout, rank):
    return torch.arange(layout.length(rank))


# %% [markdown]
# We take all pairs of a query and a key that the causal mask leaves, and compare their true distance with the distance by
# these counts:


# %%
def wrong_distance(layout):
    """Share of visible pairs with a wrong distance, by rank of query and key; NaN without pairs."""
    true = [torch.from_numpy(layout.positions(rank)) for rank in range(layout.P)]
    local = [counted(layout, rank) for rank in range(layout.P)]
    table = torch.zeros(layout.P, layout.P)
    for i in range(layout.P):
        for j in range(layout.P):
            seen = true[i][:, None] >= true[j]
            same = true[i][:, None] - true[j] == local[i][:, None] - local[j]
            table[i, j] = (seen & ~same).sum() / seen.sum()
    return table


wrong_pairs = {made.name: wrong_distance(made) for made in (contiguous(S, P), zigzag(S, P))}
inside = wrong_pairs["zigzag"].diagonal().max()
compare("14.positions", "also some inside a rank" if inside > 0 else "those between ranks")

# %%
show(loss_curves.distances(wrong_pairs), loss_curves.describe_distances(wrong_pairs))

# %% [markdown]
# Under contiguous a rank's tokens are neighbours, so differences inside a rank are right, and all others are wrong.
# Under zig-zag a rank holds two chunks that are far apart, and its count goes on from one into the other. (Only on
# the last rank the two chunks are neighbours, hence its 0%.)
#
# **Take positions from the layout, in one place, and never count them.**
#
# ## 3 · The second line: labels before sharding
#
# The label of a token is the token after it. If every token is its own number, labels can be checked by eye: each must
# be one more.


# %%
def next_tokens(tokens):
    labels = torch.full_like(tokens, IGNORE)  # -100: cross_entropy leaves these out
    labels[:, :-1] = tokens[:, 1:]
    return labels


numbers = torch.arange(S)[None]
for rank in (0, 3):
    print(f"rank {rank}, tokens             {layout.shard(numbers, rank, dim=-1)[0].tolist()}")
    shifted_first = layout.shard(next_tokens(numbers), rank, dim=-1)
    cut_first = next_tokens(layout.shard(numbers, rank, dim=-1))
    print(f"        shifted, then cut  {shifted_first[0].tolist()}")
    print(f"        cut, then shifted  {cut_first[0].tolist()}")

# %%
wrong = 0
for rank in range(P):
    right = layout.shard(next_tokens(numbers), rank, dim=-1)
    wrong += int((next_tokens(layout.shard(numbers, rank, dim=-1)) != right).sum())
print(f"cut, then shifted: {wrong} of {S} labels are wrong or lost")

# %% [markdown]
# At the end of a rank's *last* chunk the label is lost. At the end of its *first* chunk the label comes from another part of
# the text. (Six are wrong and not eight: rank 3's two chunks are neighbours, and token 63 has no label anyway.) On long
# shards that is a small share of all labels, so the loss does not show it. Shift first, then shard. Sending labels along
# with the tokens costs one integer a token.
#
# ## 4 · The third line: sum or mean?
#
# Let only the second half of each text count, as when a model learns to answer and not to ask. The loss is a mean over
# the tokens that count:
#
# $$\mathcal{L} = \frac{1}{N}\sum_{t\ \text{counts}} -\log p(\text{label}_t), \qquad N = \text{the number that count, on all ranks together}.$$
#
# A rank holds all weights, and a *total*: the sum of −log p over its own n labels that count. Its backward gives the gradient of
# the *whole* loss through the rank's own rows, since other ranks' losses reach its K and V by the ring (lesson 09). How do P such
# gradients become one?

# %% tags=["nbval-ignore-output"]
predict(
    "14.reduce",
    "Each rank divides its total by N, counted over all ranks. How are their gradients combined?",
    choices=["sum over ranks", "mean over ranks", "mean weighted by tokens"],
)


# %%
def labelled(tokens):
    labels = next_tokens(tokens)
    labels[:, : tokens.shape[1] // 2] = IGNORE
    return labels


def total_of(logits, labels):
    flat = logits.flatten(0, 1), labels.flatten()
    return F.cross_entropy(*flat, ignore_index=IGNORE, reduction="sum")


def own_total(ring, layout, w, local=False):
    """A rank's total, and how many of its labels count; `local` counts positions from 0."""
    context = Context(ring, layout, block="naive", validate=False)
    labels = context.shard(labelled(text))
    positions = counted(layout, ring.rank) if local else context.positions
    logits = decoder(w, context.shard(text), positions, context.attend)
    return total_of(logits, labels), (labels != IGNORE).sum()


# %% [markdown]
# ringlab's `Context` holds a ring and a layout: `shard` cuts, `positions` are the rank's, `attend` goes around the ring. Now each
# rank can divide its total by N, or by its own n, and take the sum over ranks or the mean. That makes four ways.
# (`ring.all_reduce(x)` returns, on every rank, the sum of all ranks' x.)


# %%
def vector(loss, w):
    """The gradients of all weights, one after the other."""
    grads = torch.autograd.grad(loss, list(w.values()), retain_graph=True)
    return torch.cat([x.flatten() for x in grads])


def gradients(ring, total, n, w):
    """The four ways, each as a call that returns all gradients."""
    N = ring.all_reduce(n)
    return {
        "sum of (total / N)": lambda: ring.all_reduce(vector(total / N, w)),
        "mean of (total / N)": lambda: ring.all_reduce(vector(total / N, w)) / P,
        "sum of (total / n)": lambda: ring.all_reduce(vector(total / n, w)),
        "mean of (total / n)": lambda: ring.all_reduce(vector(total / n, w)) / P,
    }


# %% [markdown]
# Each is compared with the gradients of one process, and so is a fifth: the first of them, with positions counted from 0.

# %%
def leaves(values=weights):
    return {name: x.clone().requires_grad_() for name, x in values.items()}


def all_ways(ring, layout):
    w = leaves()
    found = {name: way() for name, way in gradients(ring, *own_total(ring, layout, w), w).items()}
    local = gradients(ring, *own_total(ring, layout, w, local=True), w)
    return found | {"the first, with local positions": local["sum of (total / N)"]()}


w, labels = leaves(), labelled(text)
loss = total_of(decoder(w, text, torch.arange(S), whole), labels) / (labels != IGNORE).sum()
right = vector(loss, w)


# %% tags=["nbval-ignore-output"]
both = (contiguous(S, P), zigzag(S, P))
found = [VirtualCluster(P, memory=False).run(all_ways, made).results[0] for made in both]
errors = {name: [off(grads[name], right) for grads in found] for name in found[0]}
for name, pair in errors.items():
    told = ["right" if error < 1e-10 else f"{error:.0%} off" for error in pair]
    print(f"{name:32} contiguous: {told[0]:10} zig-zag: {told[1]}")

# %%
exact = [name for name, pair in errors.items() if max(pair) < 1e-10]
print("right under both layouts:", ", ".join(exact))
compare("14.reduce", f"{exact[0].split()[0]} over ranks")

# %% [markdown]
# **The sum.** The gradient of a weight is a sum over all rows in which it is used, wherever these rows are. The division by N
# is already in it. Most libraries' data parallelism takes the *mean* (PyTorch's DDP and FSDP by default). That is right if
# each rank's loss is a mean over the same number of tokens. Here:
#
# - **mean of (total / N)**: all gradients are P times too small, so they are 75% off;
# - **mean of (total / n)**: a token counts for more on a rank where few count.
#
# The next cell prints n for each rank, and the ranks whose own mean is NaN:

# %%
for made in both:
    counts = [(made.shard(labels, rank, dim=-1) != IGNORE).sum().item() for rank in range(P)]
    nan = [rank for rank, n in enumerate(counts) if (torch.tensor(0.0) / n).isnan()]
    print(f"{made.name:11} labels that count: {counts}, NaN on ranks: {nan or 'none'}")

# %% [markdown]
# Under contiguous, nothing counts on the first two ranks. They divide 0 by 0, and the loss in their log is **NaN**. (Its
# gradient is 0 in PyTorch, so training goes on, and two of the four parts of the mean are missing.) Under zig-zag, ranks
# differ only by the label that the last token lacks, so the error is small. It grows with the
# difference between the counts, which differ whenever documents, padding or prompts differ in length.
#
# With gradients P times too small, plain gradient descent takes steps that are P times too short. And Adam?


# %%
def learn(ring, way, local=False, eps=1e-8):
    """The losses of 8 steps of Adam on one text, with a zig-zag."""
    w = leaves({name: x.float() for name, x in weights.items()})
    adam, losses = torch.optim.Adam(list(w.values()), lr=1e-3, eps=eps), []
    for _ in range(8):
        own, n = own_total(ring, layout, w, local)
        grad = gradients(ring, own, n, w)[way]()
        for x, part in zip(w.values(), grad.split([x.numel() for x in w.values()]), strict=True):
            x.grad = part.view_as(x)
        adam.step()
        losses.append((ring.all_reduce(own.detach()) / ring.all_reduce(n)).item())
    return losses


def learned(*how):
    return VirtualCluster(P, memory=False).run(learn, *how).results[0]


# %%
def same(one, other, bound):
    return max(abs(a - b) / b for a, b in zip(one, other, strict=True)) < bound


by_sum, by_mean = learned("sum of (total / N)"), learned("mean of (total / N)")
print("Adam: mean and sum give the same curve to 1e-5:", same(by_mean, by_sum, 1e-5))
smaller = learned("mean of (total / N)", False, 1e-8 / P)
print(f"the mean with an epsilon {P} times smaller gives it bit for bit:", smaller == by_sum)

# %% [markdown]
# **Adam hides it.** It divides a gradient by the gradient's own size, so a factor of 4 cancels. Only epsilon, the small number that
# keeps Adam from dividing by 0, does not shrink with the gradients. With plain gradient descent, each number of ranks would need
# another learning rate. So compare *gradients* with one process, not curves.
#
# ## 5 · Training runs
#
# ringlab's `train` has the three lines built in. A `Recipe` says what it trains: a model, a length, a number of steps. Short runs in
# float32, on one process and on four ranks:

# %%
recipe = Recipe(CONFIG, S=128, batch=2, steps=12, learning_rate=3e-3)
curves = {"1 process": train(None, recipe)}
for name, way in (("contiguous", "contiguous"), ("zig-zag", "zigzag")):
    run = VirtualCluster(4, memory=False).run(train, replace(recipe, layout=way))
    curves[f"4 ranks, {name}"] = run.results[0]
for name, found in loss_curves.differences(curves).items():
    print(f"{name}: largest relative difference of the loss below 1e-5: {max(found) < 1e-5}")

# %% [markdown]
# They add the same terms in another order, so last bits differ, and each step passes this on. For comparison, here are three
# of the mistakes of this lesson in the run of section 4. Grey is the right run. The lower half shows how far the others are
# from it. The blue curve is as near as a right run would be, although its gradients are 75% off: what is left is Adam's epsilon.
# (0 is drawn at 10⁻⁹.)

# %% tags=["nbval-ignore-output"]
wrong_curves = {
    "mean of (total / N): only Adam's epsilon": by_mean,
    "mean of (total / n)": learned("mean of (total / n)"),
    "local positions": learned("sum of (total / N)", True),
}
mistaken, title = {"right": by_sum, **wrong_curves}, "Three mistakes, with Adam"
show(loss_curves.figure(mistaken, title, below=""), loss_curves.describe(mistaken, title))

# %%
for name, losses in wrong_curves.items():
    falls = sum(losses[n + 1] < losses[n] for n in range(7))
    below = sum(one < 0.999 * own for one, own in zip(losses, by_sum, strict=True))
    print(f"{name}: falls in {falls} of 7 steps, lower than the right one at {below} of 8 points")

# %% [markdown]
# None of these curves looks broken. One even looks better: on this one text, local positions give a *lower* loss at every
# point. **A lower loss is no proof of a right program.** Now the right ones over 200 steps, recorded. A fourth run, *hybrid*, cuts
# tokens and heads ([lesson 15](15_choosing.ipynb)). How far is each from one process?

# %%
record = loss_curves.recorded()
title = "200 steps, recorded"
show(loss_curves.apart(record.curves, title), loss_curves.describe(record.curves, title))
print("recorded on", record.machine)
for name, found in loss_curves.differences(record.curves).items():
    print(f"{name}: largest relative difference {max(found):.1e}")

# %% [markdown]
# **This is a good place for a break.** One model now trains on a ring as it does on one process. The second half is about the
# rest of a large training run.
#
# ## 6 · What else can be cut
#
# A ring cuts one thing, the sequence. Every rank still holds the whole model, which may be too much. A training step has
# sequences, layers, heads and tokens. It can be cut along each of them:

# %%
show(shares(), describe_shares())

# %% [markdown]
# Each cut has a price, since what is cut must meet again. Much of it is paid in **all-reduces**, after which every rank has
# the sum of what all ranks had.
#
# | | a rank has | what is sent | when |
# |---|---|---|---|
# | **DP**, data parallelism | some sequences | gradients of all weights, in an all-reduce | once a step |
# | **TP**, tensor parallelism | some heads, and columns of the feed-forward, for *all tokens* | activations, in an all-reduce | twice a layer, forward and backward |
# | **CP**, context parallelism: this course | some tokens of every sequence | K and V, backward also their gradients; gradients of all weights | each hop; once a step |
# | **PP**, pipeline parallelism | some layers | activations, to the next rank; their gradients, back | once a sequence |
#
# Take Llama 3 8B in bfloat16, and 8 ranks that use one of these. It has 8 billion weights and 32 layers. The activations of a
# token are 4,096 numbers wide, its K and its V 1,024 each.

# %% tags=["nbval-ignore-output"]
predict(
    "14.bytes",
    "8 sequences of 131,072 tokens, 8 ranks. Which one sends the most bytes in a step?",
    choices=["DP", "TP", "CP", "PP"],
)

# %% [markdown]
# The table is *computed* from the model's sizes, not measured. *Sends* are the bytes of one rank in one forward and one backward.
# *State* are weights, gradients and the optimizer's numbers. *Kept* are only the layers' inputs; the backward computes the rest
# again. *Least batch* is what a way needs to give every rank work.

# %%
llama, n, B, context_length = published("llama3-8b"), 8, 8, 131_072
others = (n - 1) / n  # of everything a collective moves, the part that is not at home
tokens, grad_bytes = B * context_length, 4 * llama.parameters
activations = 2 * tokens * llama.d_model  # one activation of all tokens, bfloat16
all_reduce = 2 * others * grad_bytes  # of all gradients: once to be added, once to come back
ring = [ring_traffic(llama.attention(B), context_length, n, backward=b) for b in (False, True)]


def held(tp=1, layers=llama.layers, tokens=tokens // n):
    """Bytes of weights, gradients and optimizer; of the layers' inputs."""
    state = memory.state_bytes(llama, tp=tp) * layers / llama.layers
    return state, layers * memory.saved_bytes(llama, tokens, recomputation="full")

# %%
def row(name, sends, held_bytes, least):
    state, kept = held_bytes
    print(f"{name}{sends / 1e9:14,.0f}{state / 1e9:12,.0f}{kept / 1e9:10,.1f}   {least}")


SENDS = {
    "DP": all_reduce,
    "TP": llama.layers * 4 * 2 * others * activations,  # 2 all-reduces a layer, and 2 backward
    "CP": llama.layers * sum(each.total_bytes for each in ring) + all_reduce,
    "PP": 2 * activations,  # to the next rank, and the gradient back
}
print(f"{'sends, GB':>16}{'state, GB':>12}{'kept, GB':>10}   least batch")
row("DP", SENDS["DP"], held(), "8 sequences")
row("TP", SENDS["TP"], held(tp=n, tokens=tokens), "1 sequence")
row("CP", SENDS["CP"], held(), "1 sequence")
stage, idle = held(layers=llama.layers // n, tokens=tokens), (n - 1) / (B + n - 1)
row("PP", SENDS["PP"], stage, f"1 sequence; of 8, ranks idle {idle:.0%}")
compare("14.bytes", max(SENDS, key=SENDS.get))

# %% [markdown]
# - **Sends.** TP moves whole activations in every layer, so it belongs where links are fastest, inside a node. CP moves K
#   and V, which are narrow under grouped heads, and attention hides them (lesson 06).
# - **State.** 145 GB are 18 bytes a weight: 2 for it, 4 for its gradient, 12 for Adam's two moments and a float32 copy. CP
#   and DP shard none of it.
# - **Least batch.** DP needs a sequence for each rank. With one sequence of a million tokens it has nothing to share out; CP
#   has. In PP the last rank waits at the start, and the first one at the end: with 8 sequences, 7 of every 15 turns are idle.
#
# 145 GB of state or 275 GB of kept inputs are more than most GPUs hold. Two companions of DP and TP,
# [FSDP and SP](../docs/guide/training.md#fsdp-sp-and-the-mesh), mend that.
#
# ## 7 · On a mesh
#
# Each cut has a limit, so large runs combine them: world size = dp × cp × tp × pp. In `Degrees`, which holds these numbers, TP is
# the innermost axis: its ranks are neighbours, because it sends most.
#
# Of the three lines only the third changes. Losses are divided by the number of tokens that count over dp and cp *together*,
# and gradients are summed over both. Does the model still train as on one process? We run dp × cp on virtual ranks, then
# cp × tp on four processes:

# %%
short = replace(recipe, steps=4)
first = curves["1 process"][:4]
grid = VirtualCluster(4, memory=False).run(train, short, None, Degrees(dp=2, cp=2)).results[0]
print("dp × cp on virtual ranks: the curve of one process to 1e-5:", same(grid, first, 1e-5))
real = launch(train, 4, short, None, Degrees(cp=2, tp=2)).results[0]
print("cp × tp on processes: the curve of one process to 1e-5:", same(real, first, 1e-5))

# %% [markdown]
# A long run needs two things more: less memory, for example by running a layer again before its backward
# ([memory](../docs/guide/memory.md)), and checkpoints that any number of ranks can read ([training](../docs/guide/training.md)).
#
# ## Recap
#
# - In a transformer, tokens meet only in attention.
# - Positions come from the layout. Counted locally they are wrong between ranks, and under zig-zag inside a rank too.
# - Labels are made before the sequence is cut.
# - Each rank divides by the number of tokens that count on *all* ranks; loss and gradients are **sums**. A mean is P
#   times too small, and Adam hides it. A mean of means is wrong as soon as counts differ, and NaN on a rank where nothing
#   counts.
# - DP cuts a batch by sequences, TP by heads and columns, CP by tokens, PP by layers. TP sends most and goes inside a node.
#
# ## Self-check
#
# 1. Contiguous, 8 ranks, local positions. Would the loss on a short text followed by padding, so that rank 0 holds
#    all of it, show the mistake?
#    <details><summary>Answer</summary>No: inside a rank all differences are right.</details>
# 2. 16 ranks, dp = 4, cp = 4, own means per rank, gradients averaged over all. When is that right?
#    <details><summary>Answer</summary>When the same number of tokens count on every rank.</details>
# 3. Why does CP need no all-gather of activations between layers?
#    <details><summary>Answer</summary>Each row of a layer's output is the input of the same row of the next layer, on the
#    same rank.</details>
# 4. You double cp and halve dp, at the same batch. How do the bytes of the gradients' sum change?
#    <details><summary>Answer</summary>Not at all: the same number of ranks hold the same weights.</details>
#
# Now build it: [exercise 14](../exercises/14_training.ipynb), a shard of the batch, a share of the loss, the sum of
# gradients, and the step.
