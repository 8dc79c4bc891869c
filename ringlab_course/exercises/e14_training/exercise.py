# %% [markdown]
# # Exercise 14 · Training a model in parallel
#
# **You build** a training step on sequences that are spread over ranks, equal to that of one process: a shard of the
# batch, a share of the loss, the gradients of all ranks, and the step made of them.
# **You need** [lesson 14](../notebooks/14_training.ipynb). **Minutes** 60.
#
# | stage | function | what is checked |
# |---|---|---|
# | 14.shard | `shard_batch` | tokens, labels and positions in any layout; predictions that do not count |
# | 14.loss | `loss_share` | shares that add up, their gradients, ranks with nothing that counts, large logits, bfloat16 |
# | 14.sum | `sum_gradients` | weights without a gradient, one reduction, bfloat16 |
# | 14.step | `training_step` | loss and weights of one process to 1e-5, in any layout; each rank decodes its own tokens only |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded.
#
# **Not allowed:** `ringlab.nn`, ringlab's attention and PyTorch's. Functions must not change their arguments, the weights
# included.

# %%
import math

import torch
from torch.nn import functional as F

from ringlab import VirtualCluster, launch, zigzag
from ringlab_course import check, corpus, hint


class Gather(torch.autograd.Function):
    """All ranks' rows of x (B, L, E), in order; backward, the sum of their gradients of mine."""

    @staticmethod
    def forward(ctx, ring, x, lengths):
        ctx.ring, ctx.lengths = ring, lengths
        shapes = [(x.shape[0], length, x.shape[2]) for length in lengths]
        return torch.cat(ring.all_gather(x.detach().contiguous(), shapes), dim=1)

    @staticmethod
    def backward(ctx, grad):
        total = ctx.ring.all_reduce(grad.contiguous())
        return None, total.split(ctx.lengths, dim=1)[ctx.ring.rank], None


def turn(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None] * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


# %% [markdown]
# ## 14.shard · A shard of the batch
#
# `tokens` (B, S), int64, are whole sequences. `counts` (B, S) is True where the prediction made *at* a token counts.
# `own` (L,) holds the global positions of a rank's tokens. Return `(tokens, labels, positions)`: the rank's tokens (B, L);
# their labels (B, L), each the token after it, or −100 if its prediction does not count or it is the last of its
# sequence; and their positions (L,), as rotary embedding needs them.



# %% grade="14.shard"
def shard_batch(tokens, counts, own):
    """Return this rank's (tokens, labels, positions)."""
    # BEGIN SOLUTION the rank's tokens, labels and positions
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    labels = labels.masked_fill(~counts, -100)
    return tokens[:, own], labels[:, own], own
    # END SOLUTION


# %%
check("14.shard")

# %% [markdown]
# Stuck? `hint("14.shard")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 14.loss · A share of the loss
#
# `logits` (B, L, V) and `labels` (B, L) are this rank's. The loss is the mean of −log p(label) over the labels of all
# ranks other than −100; there is at least one. Return this rank's *share* of it, a scalar tensor through which gradients
# flow: the shares of all ranks add up to the loss. A rank may have no token, or none that counts. Compute in float32 or
# wider. `ring.all_reduce(x)` returns the sum of all ranks' x, and leaves x as it is.



# %% grade="14.loss"
def loss_share(ring, logits, labels):
    """Return this rank's share of the loss."""
    # BEGIN SOLUTION the share
    count = ring.all_reduce((labels != -100).sum())
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    rows, own = logits.flatten(0, 1), labels.flatten()
    return F.cross_entropy(rows, own, ignore_index=-100, reduction="sum") / count
    # END SOLUTION


# %%
check("14.loss")

# %% [markdown]
# Stuck? `hint("14.loss")` in a new cell helps.

# %% [markdown]
# ## 14.sum · The gradients of all ranks
#
# `weights` is a list of tensors of one dtype, equal on all ranks. `gradients` is a list of the same length, what this rank's
# backward found: the gradient of the whole loss through this rank's own rows, to which other ranks' losses contribute by way
# of its K and V; None for a weight that these rows do not touch, as `torch.autograd.grad` with `allow_unused=True` returns
# it. Return the list of the gradients of the *loss* with respect to the weights, the same on every rank, each in the shape
# and dtype of its weight. Add in float32, or in float64 if the weights are. All weights together share **one** reduction.



# %% grade="14.sum"
def sum_gradients(ring, weights, gradients):
    """Return the gradients of all ranks together."""
    # BEGIN SOLUTION the gradients of all ranks together
    dtype = torch.promote_types(weights[0].dtype, torch.float32)
    pairs = zip(weights, gradients, strict=True)
    parts = [torch.zeros_like(w) if g is None else g for w, g in pairs]
    flat = ring.all_reduce(torch.cat([part.flatten().to(dtype) for part in parts]))
    pieces = flat.split([w.numel() for w in weights])
    return [piece.view_as(w).to(w.dtype) for piece, w in zip(pieces, weights, strict=True)]
    # END SOLUTION


# %%
check("14.sum")

# %% [markdown]
# Stuck? `hint("14.sum")` in a new cell helps.

# %% [markdown]
# ## 14.step · The step
#
# `decoder` is given: an embedding, one layer of attention with rotary positions, and the embedding again as output
# layer. Its attention gathers K and V (`Gather`, at the top), as the training of Llama 3 did; its backward sums the
# gradients of all ranks for a rank's K and V. (`ring_attention` does the same with less memory.) Every rank must call it
# and go backward through it, even without tokens. No rank may run it on tokens that it does not own.
#
# `weights` is a dict, `tokens` and `counts` are whole, `owned[r]` holds rank r's positions. Return `(loss, weights)`: the
# loss of all tokens before the step, and a new dict after one step of gradient descent, $w - \mathrm{rate}\cdot\nabla_w$,
# the same on every rank. Do not change the weights that you are given. You may use `ring.all_reduce` as often as you like:
# here only the exchanges of K and V are checked.



# %% grade="14.step"
def decoder(ring, w, tokens, positions, owned):
    x = w["embedding"][tokens]
    q, k, v = turn(x @ w["q"], positions), turn(x @ w["k"], positions), x @ w["v"]
    lengths = [len(own) for own in owned]
    k, v = Gather.apply(ring, torch.cat([k, v], dim=-1), lengths).chunk(2, dim=-1)
    hidden = owned[ring.rank][:, None] < torch.cat(owned)[None]
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
    return (x + scores.softmax(-1) @ v @ w["out"]) @ w["embedding"].mT


def training_step(ring, weights, tokens, counts, owned, rate):
    """Return (loss, weights after the step)."""
    # BEGIN SOLUTION one step
    w = {name: x.clone().requires_grad_() for name, x in weights.items()}
    own, labels, positions = shard_batch(tokens, counts, owned[ring.rank])
    share = loss_share(ring, decoder(ring, w, own, positions, owned), labels)
    found = sum_gradients(ring, list(w.values()), torch.autograd.grad(share, list(w.values())))
    stepped = {name: x - rate * g for (name, x), g in zip(weights.items(), found, strict=True)}
    return ring.all_reduce(share.detach()), stepped
    # END SOLUTION


# %%
check("14.step")

# %% [markdown]
# Stuck? `hint("14.step")` in a new cell helps.

# %% [markdown]
# ## On real text
#
# When all stages pass, run `on_real_text()` in a new cell: it trains on one rank, on 4 virtual ranks and on 2
# processes, and compares their losses.


# %%
def train(ring, S, steps):
    """The losses of some steps on the beginning of the corpus."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"embedding": (256, 16)} | dict.fromkeys(("q", "k", "v", "out"), (16, 16))
    weights = {name: 0.3 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    tokens, losses = torch.from_numpy(corpus.tokens(S))[None], []
    layout = zigzag(S, ring.world_size)
    owned = [torch.from_numpy(layout.positions(rank)) for rank in range(ring.world_size)]
    for _ in range(steps):
        loss, weights = training_step(
            ring, weights, tokens, torch.ones_like(tokens, dtype=torch.bool), owned, 0.5
        )
        losses.append(float(loss))
    return losses


def on_real_text(S=256, steps=10):
    """Print whether many ranks train as one."""
    alone = VirtualCluster(1).run(train, S, steps).results[0]
    runs = {
        "4 virtual ranks": VirtualCluster(4).run(train, S, steps),
        "2 processes": launch(train, 2, S, steps),
    }
    print("one rank: the loss falls:", alone[-1] < alone[0])
    for name, run in runs.items():
        worst = max(abs(a - b) / b for a, b in zip(run.results[0], alone, strict=True))
        print(f"{name}: every loss that of one rank to 1e-5: {worst < 1e-5}")


# %% tags=["solution-only"]
on_real_text()

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/14_training.ipynb` runs the hidden ones, on inputs of its own.
