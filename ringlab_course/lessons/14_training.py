# %% [markdown]
# # 14 · Training a model in parallel
#
# **Afterwards you can** shard a transformer, its positions, labels, loss and gradients over the ranks of a ring so that training is that of one process;
# say what data, tensor, sequence, context and pipeline parallelism each shard, send and cost; and combine them on a mesh.
#
# **You need first** [lesson 08](08_striped_and_zigzag.ipynb), layouts; [lesson 09](09_backward_ring.ipynb), the backward ring.
#
# **Minutes** 90 to read and run; the exercise takes another 60.
#
# Attention over a ring is exact, forward and backward. Around it stands a model: embeddings, norms, a feed-forward, a loss, an optimizer. Sharding those
# looks trivial, as they treat each token by itself. It *is* trivial, but for three lines. Each of the three, when wrong, still trains, and nobody raises.

# %%
import tempfile
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional as F

from ringlab import VirtualCluster, contiguous, launch, ring_attention, zigzag
from ringlab.cost import memory
from ringlab.cost.models import model as published
from ringlab.cost.traffic import ring_traffic
from ringlab_course import compare, corpus, predict
from ringlab.nn import IGNORE, Context, Degrees, ModelConfig, Recipe, Transformer, train, training_step
from ringlab_course.figures import loss_curves
from ringlab.viz.style import new_figure, show, styled

# %% [markdown]
# ## 1 · A decoder, by hand
#
# Two layers, 4 query heads that share 2 K/V heads, bytes as tokens: 256 of them. The text is real: the source of Python's standard library. Weights have the
# names that they have in ringlab's model; they are ten times as large as those that training begins with, so that attention does something already.

# %%
CONFIG, P, S = ModelConfig(width=32, heads=4, kv_heads=2, hidden=96), 4, 64
D = CONFIG.width // CONFIG.heads
text = torch.from_numpy(corpus.tokens(2 * S)).view(2, S)  # two sequences
start = {name: x.detach().double() for name, x in Transformer(CONFIG, seed=0).named_parameters()}
weights = {name: 10 * x if x.ndim > 1 else x for name, x in start.items()}
print(f"{len(weights)} tensors, {sum(x.numel() for x in weights.values()):,} weights")


# %%
def turn(x, positions):
    """Rotary positions: turn the pair (x[i], x[i + D/2]) of each token by position · 10000^(−2i/D)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-6)


# %%
def decoder(w, tokens, positions, attend):
    """The logits (B, L, vocabulary) of these tokens; `attend` is softmax(QKᵀ)V."""
    x = w["embedding.weight"][tokens]
    for n in range(CONFIG.layers):
        own = {name.removeprefix(f"layers.{n}."): value for name, value in w.items()}
        y = norm(x, own["attention_norm.weight"])
        q, k, v = (
            (y @ own[f"attention.{c}.weight"].mT).unflatten(-1, (-1, D)).transpose(1, 2) for c in "qkv"
        )
        out = attend(turn(q, positions), turn(k, positions), v)
        x = x + out.transpose(1, 2).flatten(2) @ own["attention.out.weight"].mT
        y = norm(x, own["feed_forward_norm.weight"])
        gate, up = (y @ own[f"feed_forward.{c}.weight"].mT for c in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ own["feed_forward.down.weight"].mT
    return norm(x, w["norm.weight"]) @ w["embedding.weight"].mT


# %%
def off(found, right):
    """The largest difference, relative to the largest right value."""
    return ((found - right).abs().max() / right.abs().max()).item()


whole = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
model = Transformer(CONFIG).double()
model.load_state_dict(weights)
logits = decoder(weights, text, torch.arange(S), whole)
print("by hand and ringlab's Transformer: relative difference below 1e-12:", off(logits, model(text)) < 1e-12)

# %% [markdown]
# Now look for the lines in which one token meets another. There is one: `attend`. A norm, a matrix, SiLU, a sum: each works on a row. (And one line asks
# where a token *is*: `turn`.) So give each rank its rows, the global positions of them, and an `attend` that goes around the ring.

# %% tags=["nbval-ignore-output"]
predict(
    "14.exchanges",
    "2 layers, 4 ranks, forward pass of the whole decoder. How many times does a rank send something?",
    unit="exchanges",
)

# %%
layout = zigzag(S, P)


def on_rank(ring, layout, tokens):
    positions = torch.from_numpy(layout.positions(ring.rank))
    attend = partial(ring_attention, ring=ring, layout=layout, causal=True, block="naive", validate=False)
    return decoder(weights, layout.shard(tokens, ring.rank, dim=-1), positions, attend)


run = VirtualCluster(P).run(on_rank, layout, text)
print(
    "logits of all ranks, put together: below 1e-12:", off(layout.unshard(run.results, dim=1), logits) < 1e-12
)
compare("14.exchanges", run.trace.rounds(0))

# %% [markdown]
# **(P − 1) hops in each layer**, and nothing else. In real code, too, a context-parallel model is an ordinary model with two arguments more.
#
# ## 2 · The first line: where a token is
#
# Rotary embedding turns q and k by their positions, and the product of the two then depends on the *difference*. On a rank's shard it is tempting to
# count `torch.arange(L)`, as on one process.

# %% tags=["nbval-ignore-output"]
predict(
    "14.positions",
    "Zig-zag, and each rank counts its tokens from 0. Which scores are wrong?",
    choices=["none: only differences matter", "those between ranks", "also some inside a rank"],
)


# %%
def counted(layout, rank):
    return torch.arange(layout.length(rank))


def wrong_distance(layout):
    """By rank of the query and rank of the key: the share of pairs whose distance is wrong with local positions."""
    true = [torch.from_numpy(layout.positions(rank)) for rank in range(layout.P)]
    local = [counted(layout, rank) for rank in range(layout.P)]
    table = torch.zeros(layout.P, layout.P)
    for i in range(layout.P):
        for j in range(layout.P):
            seen = true[i][:, None] >= true[j]
            same = true[i][:, None] - true[j] == local[i][:, None] - local[j]
            table[i, j] = (seen & ~same).sum() / max(int(seen.sum()), 1)
    return table


shares = {made.name: wrong_distance(made) for made in (contiguous(S, P), zigzag(S, P))}
inside = shares["zigzag"].diagonal().max()
compare("14.positions", "also some inside a rank" if inside > 0 else "those between ranks")

# %%
with styled():
    figure = new_figure((6.8, 3.3))
    for axes, (name, share) in zip(figure.subplots(1, 2, sharey=True), shares.items(), strict=True):
        axes.imshow(share, vmin=0, vmax=1, cmap="cividis")
        for (i, j), value in [((i, j), share[i, j]) for i in range(P) for j in range(P)]:
            axes.text(
                j, i, f"{value:.0%}", ha="center", va="center", color="black" if value > 0.5 else "white"
            )
        axes.set(
            title=name, xlabel="rank of the key", ylabel="rank of the query", xticks=range(P), yticks=range(P)
        )
        axes.grid(False)
told = "; ".join(
    f"{n}: on the diagonal {', '.join(f'{x:.0%}' for x in s.diagonal())}" for n, s in shares.items()
)
show(
    figure,
    f"Two 4 by 4 tables: the share of visible pairs whose distance is wrong where ranks count from 0. {told}.",
)

# %% [markdown]
# Contiguous, a rank's tokens are neighbours: differences inside a rank are right, and only those to other ranks are wrong. Zig-zag, a rank holds two
# chunks that are far apart, and counts on from one into the other. (The last rank's two chunks happen to be neighbours. Zero also stands where nothing is
# visible, and where both ends are moved alike.) The model still trains: it learns other distances, and is useless on one process.
#
# **Positions come from the layout, in one place, and are never counted.** ringlab's `Context` hands them to every layer.
#
# ## 3 · The second line: labels before sharding
#
# The label of a token is the token after it. With every token its own number, a label can be checked by eye: it must be one more.


# %%
def next_tokens(tokens):
    labels = torch.full_like(tokens, IGNORE)  # -100: cross_entropy leaves these out
    labels[:, :-1] = tokens[:, 1:]
    return labels


numbers = torch.arange(S)[None]
for rank in (0, 3):
    print(f"rank {rank}, tokens             {layout.shard(numbers, rank, dim=-1)[0].tolist()}")
    print(f"        shifted, then cut  {layout.shard(next_tokens(numbers), rank, dim=-1)[0].tolist()}")
    print(f"        cut, then shifted  {next_tokens(layout.shard(numbers, rank, dim=-1))[0].tolist()}")

# %%
wrong = 0
for rank in range(P):
    right = layout.shard(next_tokens(numbers), rank, dim=-1)
    wrong += int((next_tokens(layout.shard(numbers, rank, dim=-1)) != right).sum())
print(f"cut, then shifted: {wrong} of {S} labels are wrong or lost")

# %% [markdown]
# At the end of a rank's *last* chunk the label is lost; at the end of its *first* it is a token from the other end of the text. On long shards that is a
# small share of all labels, which is why nobody sees it in the loss. Shift first, then shard; labels are integers, and cost nothing beside K and V.
#
# ## 4 · The third line: sum or mean?
#
# Let only the second half of each text count, as when a model learns to answer and not to ask. The loss is a mean over the tokens that count:
#
# $$\mathcal{L} = \frac{1}{N}\sum_{t\ \text{counts}} -\log p(\text{label}_t), \qquad N = \text{how many count, on all ranks together}.$$
#
# Every rank holds all weights, and finds the gradient of *its* tokens. Now they have to become one.

# %% tags=["nbval-ignore-output"]
predict(
    "14.reduce",
    "Ranks divide their losses by the N of all. How are the gradients of the weights combined?",
    choices=["sum over ranks", "mean over ranks", "mean weighted by tokens"],
)


# %%
def labelled(tokens):
    labels = next_tokens(tokens)
    labels[:, : tokens.shape[1] // 2] = IGNORE
    return labels


def total(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def by_global_count(logits, labels, ring):
    return total(logits, labels) / ring.all_reduce((labels != IGNORE).sum())


def own_mean(logits, labels, ring):
    return total(logits, labels) / (labels != IGNORE).sum()


# %%
def from_layout(context):
    return context.positions


def gradients(ring, layout, tokens, w, share=by_global_count, reduce=1.0, place=from_layout):
    """What this rank has after one step's communication: the true loss, and the gradient of each weight."""
    context = Context(ring, layout, block="naive", validate=False)
    labels = context.shard(labelled(tokens))
    logits = decoder(w, context.shard(tokens), place(context), context.attend)
    grads = torch.autograd.grad(share(logits, labels, ring), list(w.values()))
    loss = ring.all_reduce(by_global_count(logits.detach(), labels, ring))
    return loss, [ring.all_reduce(x) * reduce for x in grads]


# %%
def leaves(values=weights):
    return {name: x.clone().requires_grad_() for name, x in values.items()}


def alone(tokens, w):
    """One process: the loss and gradients that all others are held to."""
    logits = decoder(w, tokens, torch.arange(tokens.shape[1]), whole)
    loss = own_mean(logits, labelled(tokens), None)
    return loss.detach(), torch.autograd.grad(loss, list(w.values()))


# %%
def flat(grads):
    return torch.cat([x.flatten() for x in grads])


WAYS = {
    "sum of shares of the global count": {},
    "mean of shares of the global count": {"reduce": 1 / P},
    "mean of each rank's own mean": {"share": own_mean, "reduce": 1 / P},
    "sum of each rank's own mean": {"share": own_mean},
    "sum, positions counted locally": {"place": lambda context: counted(context.layout, context.ring.rank)},
}
loss, right = alone(text, leaves())
for name, way in WAYS.items():
    cells = []
    for made in (contiguous(S, P), zigzag(S, P)):
        result = VirtualCluster(P).run(
            lambda ring, made=made, way=way: gradients(ring, made, text, leaves(), **way)
        )
        error = off(flat(result.results[0][1]), flat(right))
        cells.append("right" if error < 1e-10 else f"{'more' if error > 0.1 else 'less'} than 10% off")
    print(f"{name:36} contiguous: {cells[0]:19} zig-zag: {cells[1]}")
compare("14.reduce", "sum over ranks")

# %% [markdown]
# **The sum.** A loss that is a sum over tokens has a gradient that is a sum over tokens; that some of them live elsewhere changes nothing. The N is in it
# already. Every library's data parallelism takes the *mean*, and is right to do so where each rank's loss is a mean over as many tokens. Here:
#
# - **mean of shares**: all gradients are P times too small;
# - **mean of own means**: a token on a rank where few count weighs more than one where many do. How many do, and what each rank divides by:

# %%
for made in (contiguous(S, P), zigzag(S, P)):
    cuts = [made.shard(labelled(text), rank, dim=-1) for rank in range(P)]
    means = [own_mean(torch.zeros(*labels.shape, 256), labels, None).item() for labels in cuts]
    counts = [int((labels != IGNORE).sum()) for labels in cuts]
    print(
        f"{made.name:11} labels that count: {counts}, own means of a model that knows nothing: "
        f"{', '.join(f'{mean:.3f}' for mean in means)}"
    )

# %% [markdown]
# Contiguous, the first two ranks have nothing to count and divide 0 by 0: the loss that is logged is **NaN**. (The gradient of it is 0 in PyTorch, so that
# training goes on, with two of four parts missing from a mean over four.) Zig-zag, ranks differ by the one label that the last token lacks, and the
# error is small. It is as large as counts differ, and they differ whenever documents, padding or prompts do.
#
# What would a gradient P times too small do? Plain gradient descent takes steps that are P times too short:


# %%
def learn(ring, layout, steps, optimizer, **way):
    """The losses of some steps on one text; `optimizer` makes one of the weights."""
    w = leaves({name: x.float() for name, x in weights.items()})
    chosen, losses = optimizer(list(w.values())), []
    for _ in range(steps):
        loss, grads = gradients(ring, layout, text, w, **way)
        for x, grad in zip(w.values(), grads, strict=True):
            x.grad = grad
        chosen.step()
        losses.append(loss.item())
    return losses


def learned(optimizer, **way):
    return VirtualCluster(P).run(lambda ring: learn(ring, layout, 12, optimizer, **way)).results[0]


# %%
def same(one, other, bound):
    return max(abs(a - b) / b for a, b in zip(one, other, strict=True)) < bound


LR = 0.005
SGD, Adam = partial(torch.optim.SGD, lr=LR), partial(torch.optim.Adam, lr=1e-3)
slow = learned(SGD, reduce=1 / P)
print("SGD,  mean: the curve of the sum:", same(slow, learned(SGD), 1e-3))
print(
    "SGD,  mean: the curve of the sum with a quarter of the rate:",
    same(slow, learned(partial(SGD, lr=LR / P)), 1e-5),
)
print("Adam, mean: the curve of the sum, to 1e-3:", same(learned(Adam, reduce=1 / P), learned(Adam), 1e-3))

# %% [markdown]
# **Adam hides it.** It divides a gradient by its own size, so a factor of 4 cancels, and such a bug can live for years, until somebody clips gradients by
# their norm, changes the optimizer, or doubles the ranks and finds another learning rate best. So compare *gradients* with one process, not curves.
#
# ## 5 · On top of each other
#
# ringlab's `training_step` is those three lines around a model: labels, then shards; a share of the global count; the sum of gradients. Short runs, in
# float32, one process against four ranks:

# %%
recipe = Recipe(replace(CONFIG), S=128, batch=2, steps=24, learning_rate=3e-3)
curves = {"1 process": train(None, recipe)}
for name, way in (("contiguous", "contiguous"), ("zig-zag", "zigzag")):
    curves[f"4 ranks, {name}"] = (
        VirtualCluster(4, memory=False).run(train, replace(recipe, layout=way)).results[0]
    )
title = "One process and four ranks"
show(loss_curves.figure(curves, title), loss_curves.describe(curves, title))

# %%
for name, found in loss_curves.differences(curves).items():
    print(f"{name}: largest relative difference of the loss below 1e-5: {max(found) < 1e-5}")

# %% [markdown]
# The grey band is one process; the others lie on it. Below, how far from it they are: they add up the same terms in another order, so the last bits
# differ, and training passes the difference on. That is all that may differ. For comparison, with buttons: what the mistakes of this lesson do to the
# same run.


# %% tags=["nbval-ignore-output"]
def curve(**way):
    runs = VirtualCluster(P, memory=False).run(lambda ring: learn(ring, layout, 12, Adam, **way))
    return runs.results[0]


by_hand = {"right": curve()}
mistakes = {
    "mean of gradients": {"reduce": 1 / P},
    "mean of own means": WAYS["mean of each rank's own mean"],
    "local positions": WAYS["sum, positions counted locally"],
}
wrong_curves = {name: curve(**way) for name, way in mistakes.items()}
loss_curves.play({name: by_hand | {name: found} for name, found in wrong_curves.items()})

# %%
for name, found in wrong_curves.items():
    falls = sum(found[n + 1] < found[n] for n in range(len(found) - 1))
    print(f"{name}: the loss falls in {falls} of {len(found) - 1} steps")

# %% [markdown]
# None of them looks broken. Now the same for 200 steps, as they were recorded on the machine that the cell names, with a hybrid of ring and Ulysses
# besides:

# %%
record = loss_curves.recorded()
title = "200 steps, recorded"
show(loss_curves.figure(record.curves, title), loss_curves.describe(record.curves, title))
print("recorded on", record.machine)
for name, found in loss_curves.differences(record.curves).items():
    print(f"{name}: largest relative difference {max(found):.1e}")

# %% [markdown]
# ## 6 · DP, TP, SP, CP, PP
#
# A ring shards one thing, the sequence. There are others to shard, and each has its price. Take Llama 3 8B in bfloat16 and 8 ranks that do one of them:
#
# - **DP**, data: each rank has other *sequences*, and all weights. Gradients are summed. (FSDP, or ZeRO: the same, but weights, gradients and the
#   optimizer's state lie in shards, and are gathered layer by layer.)
# - **TP**, tensor: each rank has some of the heads and of the feed-forward's columns, of *all tokens*. Half-made activations are summed, twice a layer.
# - **SP**, sequence: TP's companion. Between those matrices norms and sums would be done by all ranks for all tokens; with SP each does its own. Summing
#   becomes a reduce-scatter before and an all-gather after, as many bytes, and less memory. It is *not* context parallelism: attention sees all tokens of
#   few heads.
# - **CP**, context: this course. Each rank has some *tokens* of every sequence. K and V travel, gradients are summed as in DP.
# - **PP**, pipeline: each rank has some *layers*. Activations go from one to the next.

# %% tags=["nbval-ignore-output"]
predict(
    "14.bytes",
    "8 sequences of 131,072 tokens, 8 ranks. Which one sends the most bytes in a step?",
    choices=["DP", "TP with SP", "CP", "PP"],
)

# %%
llama, n, B, context_length = published("llama3-8b"), 8, 8, 131_072
tokens, weight_bytes = B * context_length, 2 * llama.parameters
summing = (
    2 * (n - 1) / n * 4 * llama.parameters
)  # all-reduce of float32 gradients: reduce-scatter, all-gather
activations = 2 * tokens * llama.d_model  # one activation of all tokens, bfloat16
ring_bytes = llama.layers * sum(
    ring_traffic(llama.attention(B), context_length, n, backward=back).total_bytes for back in (False, True)
)
sent = {
    "DP": summing,
    "FSDP": (n - 1) / n * (2 * weight_bytes + 4 * llama.parameters),  # weights twice, gradients once
    "TP with SP": 2
    * llama.layers
    * 4
    * (n - 1)
    / n
    * activations,  # 4 collectives a layer, forward and backward
    "CP": ring_bytes + summing,
    "PP": 2 * activations,  # to the next stage, and the gradient back
}
compare("14.bytes", max(sent, key=sent.get))


# %%
def held(fsdp=1, tp=1, layers=llama.layers, tokens=tokens // n):
    """GB of weights, gradients and optimizer; and of what layers keep for their backward if only inputs are kept."""
    state = memory.state_bytes(llama, fsdp=fsdp, tp=tp) * layers / llama.layers
    return state / 1e9, layers * memory.saved_bytes(llama, tokens, recomputation="full") / 1e9


holds = {
    "DP": held(),
    "FSDP": held(fsdp=n),
    "TP with SP": held(tp=n),
    "CP": held(),
    "PP": held(layers=llama.layers // n, tokens=tokens),
}
shards = {
    "DP": "sequences",
    "FSDP": "sequences, state",
    "TP with SP": "heads, columns, state",
    "CP": "tokens",
    "PP": "layers, state",
}
print(f"{'':12}{'shards':24}{'sends, GB':>10}{'state, GB':>12}{'kept, GB':>10}   works from")
for name in sent:
    least = {"DP": "8 sequences", "FSDP": "8 sequences"}.get(name, "1 sequence")
    state, kept = holds[name]
    print(f"{name:12}{shards[name]:24}{sent[name] / 1e9:10,.0f}{state:12,.0f}{kept:10,.1f}   {least}")

# %% [markdown]
# Read the columns. **Sends**: TP moves whole activations in every layer, so it belongs where links are fastest, inside a node. CP moves K and V, which
# under grouped heads are narrow, and hides them behind attention (lesson 06); nobody hides TP's. DP sends gradients once a step, PP an activation per
# boundary. **State**: CP and DP shard none of it, which is why FSDP goes over both at once: for the weights, a rank with other tokens is as good as a rank
# with other sequences. **Kept**: all shard activations, *but DP only while there are sequences enough*. With one sequence of a million tokens DP has
# nothing to share; CP has.
#
# PP pays in time. With m microbatches of a batch, the first stage waits at the end and the last one at the beginning:

# %%
for m in (1, 8, 32):
    print(f"PP, {n} stages, {m:2} microbatches: idle {(n - 1) / (m + n - 1):.0%} of the time")

# %% [markdown]
# ## 7 · On a mesh
#
# They multiply: world size = dp × cp × tp (× pp). Ranks form a grid; each has a group of its own along every axis. The innermost axis lies on
# neighbouring ranks, so it goes to who sends most.

# %%
degrees = Degrees(dp=2, cp=2, tp=2)
print("rank   dp cp tp   its ring   same place in other sequences")
for rank in range(degrees.ranks):
    place, tp = divmod(rank, degrees.tp)
    dp, cp = divmod(place, degrees.cp)
    ring = [(dp * degrees.cp + c) * degrees.tp + tp for c in range(degrees.cp)]
    across = [(d * degrees.cp + cp) * degrees.tp + tp for d in range(degrees.dp)]
    print(f"{rank:4}   {dp:2} {cp:2} {tp:2}   {ring!s:8}   {across}")

# %% [markdown]
# Each sequence has its own ring; gradients are summed over dp *and* cp, by the token count of both. On virtual ranks, dp × cp; then tp as well on four
# processes, where torch's DTensor splits the heads and FSDP the state, and the ring runs inside for the heads that a rank has:

# %%
short = replace(recipe, steps=6)
first = curves["1 process"][:6]
grid = VirtualCluster(4, memory=False).run(train, short, None, Degrees(dp=2, cp=2)).results[0]
print("2 × 2 virtual ranks, dp × cp: the curve of one process to 1e-5:", same(grid, first, 1e-5))
real = launch(train, 4, short, None, Degrees(cp=2, tp=2)).results[0]
print("2 × 2 processes, cp × tp: the curve of one process to 1e-5:", same(real, first, 1e-5))

# %% [markdown]
# ## 8 · What is left of memory
#
# With attention linear in L, other tensors are the largest: the feed-forward's hidden values, wider than the model itself. Two remedies, both of
# which compute again instead of keeping. **Recompute** keeps a layer's input only, and runs it anew before its backward, *its ring included*. The
# **blockwise feed-forward** of the Ring Attention paper lets some tokens through at a time. A rank's peak in one step, measured:


# %%
def one_step(ring, config, tokens):
    model = Transformer(config)
    context = Context(ring, zigzag(tokens.shape[1], ring.world_size), validate=False)
    return training_step(model, torch.optim.SGD(model.parameters(), lr=0.1), tokens, context)


long = torch.from_numpy(corpus.tokens(4096))[None]
deep = ModelConfig(width=32, heads=2, kv_heads=1, hidden=512, layers=4)
losses = []
for name, config in {
    "everything kept": deep,
    "recompute": replace(deep, recompute=True),
    "blocks of 64 tokens": replace(deep, feed_forward_block=64),
    "both": replace(deep, recompute=True, feed_forward_block=64),
}.items():
    ran = VirtualCluster(2).run(one_step, config, long)
    losses.append(ran.results[0])
    print(f"{name:20} peak {ran.memory[0].peak_bytes / 2**20:5.1f} MiB   {ran.trace.rounds(0)} exchanges")
print("the same loss, to 1e-6:", same(losses, losses[:1] * 4, 1e-6))

# %% [markdown]
# Recompute sends more: K and V go around once more, so that a ring that was hidden in the forward must be hidden again.
#
# ## 9 · On with other ranks
#
# A checkpoint should not know how many ranks wrote it. Weights are whole, or described shard by shard; the position in the data is *the number of the next
# batch*; the layout is no part of it. Twelve steps on four ranks, and the rest on two, in another layout:

# %%
with tempfile.TemporaryDirectory() as folder:
    half = replace(recipe, steps=12)
    VirtualCluster(4, memory=False).run(train, half, folder)
    rest = replace(recipe, layout="contiguous")
    resumed = VirtualCluster(2, memory=False).run(train, rest, folder).results[0]
print(
    f"{len(resumed)} steps in two runs: the curve of one process to 1e-5:",
    same(resumed, curves["1 process"], 1e-5),
)

# %% [markdown]
# ## Recap
#
# - In a transformer only attention lets tokens meet. A context-parallel model is an ordinary one, with a ring in its attention.
# - Positions come from the layout. Counted locally they are wrong between ranks, and under zig-zag inside a rank.
# - Labels are made before the sequence is cut.
# - Each rank divides by the number of tokens that count on *all* ranks; loss and gradients are **sums**. A mean is P times too small, and Adam hides it; a
#   mean of means is wrong as soon as ranks differ, and NaN where one has nothing to count.
# - DP shards sequences, TP heads and columns, SP what lies between them, CP tokens, PP layers. TP sends most and goes inside a node; FSDP goes over dp × cp.
# - Memory is bought with computing again. Checkpoints know neither ranks nor layout.
#
# ## Self-check
#
# 1. Contiguous, 8 ranks, local positions. Would the loss on one *short* text, all of it on rank 0, show the mistake? *(No: inside a rank differences are
#    right.)*
# 2. 16 ranks, dp = 4, cp = 4, own means per rank, gradients averaged over all. When is that right? *(When as many tokens count on every rank.)*
# 3. Why is there no all-gather of activations between layers under CP? *(A layer's output is needed by the same rows of the next one, and they are at home.)*
# 4. You double cp and halve dp, at the same batch. What happens to the bytes of the gradients' sum? *(Nothing: as many ranks hold the same weights.)*
# 5. A rank gets no token at all. What must it still do? *(Take part: in every hop, in the count, in the sum, with zeros.)*
#
# Now build it: [exercise 14](../exercises/14_training.ipynb), a shard of the batch, a share of the loss, the sum of gradients, and the step.
