# %% [markdown]
# # Exercise 18 · Packed and variable-length batches
#
# **You build** the four parts of a program that shares a packed row over ranks: the bounds of its documents, the labels and
# positions of a shard, the ring itself, and the weights of the loss. Each is a part that often goes wrong.
# **You need** [lesson 18](../notebooks/18_packed_batches.ipynb). **Minutes** 60.
#
# | stage | function | what is checked |
# |---|---|---|
# | 18.bounds | `bounds_of` | cu_seqlens and documents from position ids; documents of one token |
# | 18.shard | `shard_packed` | tokens, labels and positions of a shard, in any layout |
# | 18.ring | `packed_ring` | values in any layout, exactly P − 1 exchanges, and no work on blocks of which this rank sees nothing |
# | 18.weights | `token_weights` | a loss in which each document has the same say, on whatever ranks it lies |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded.
#
# **Allowed:** ringlab's `merge`. **Not allowed:** ringlab's masks, packing, ring attention and `ringlab.nn`, PyTorch's attention, and
# writing into a tensor that a function receives.

# %%
import math
from itertools import pairwise

import torch

from ringlab import VirtualCluster, launch, oracle, zigzag
from ringlab_course import check, corpus, hint
from ringlab.merge import Partial, merge

# %% [markdown]
# ## 18.bounds · Bounds from position ids
#
# `position_ids` (S,), int64, comes from a collator that packs documents into one row: for each token, its position in its
# document, from 0. S is at least 1. Return `(cu_seqlens, documents)`:
#
# - `cu_seqlens` (n + 1,), **int32**: for n documents, the place of the first token of each, and S at the end. Kernels for packed
#   rows take these.
# - `documents` (S,), int64: for each token, the number of its document, from 0.
#
# A document may have a single token.


# %% grade="18.bounds"
def bounds_of(position_ids):
    """Return (cu_seqlens, documents)."""
    # BEGIN SOLUTION where each document begins, and the document of each token
    first = position_ids == 0
    starts = torch.nonzero(first).flatten()
    end = torch.tensor([len(position_ids)])
    return torch.cat([starts, end]).to(torch.int32), first.cumsum(0) - 1
    # END SOLUTION


# %%
check("18.bounds")

# %% [markdown]
# Stuck? `hint("18.bounds")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 18.shard · A shard of a packed row
#
# - `tokens` (S,), int64, is the whole row, and `cu_seqlens` (n + 1,), int32, has its bounds.
# - `own` (L,), int64, holds the places in the row of this rank's tokens, in the order in which the rank stores them.
#
# Return `(tokens, labels, positions)`, each (L,), int64, in the order of `own`:
#
# - the rank's tokens;
# - their labels: the next token **of the same document**, −100 for the last token of a document;
# - their positions: each token's place minus the place of its document's first token.
#
# A document may be empty: then a bound is repeated. A rank may own no token.
#
# NumPy's `searchsorted` with `side="right"` is `torch.searchsorted` with `right=True`.


# %% grade="18.shard"
def shard_packed(tokens, cu_seqlens, own):
    """Return this rank's (tokens, labels, positions)."""
    # BEGIN SOLUTION labels and positions of the whole row, then the rank's part
    bounds = cu_seqlens.long()
    lengths = bounds.diff()
    labels = torch.cat([tokens[1:], tokens.new_full((1,), -100)])
    labels[bounds[1:][lengths > 0] - 1] = -100
    positions = torch.arange(len(tokens)) - bounds[:-1].repeat_interleave(lengths)
    return tokens[own], labels[own], positions[own]
    # END SOLUTION


# %%
check("18.shard")

# %% [markdown]
# Stuck? `hint("18.shard")` in a new cell helps.

# %% [markdown]
# ## 18.ring · The ring over packed documents
#
# Return this rank's `(out, lse)`: out (B, H, L, D), lse (B, H, L). A query sees the keys of its own document at or before itself.
#
# - `q` (B, H, L, D), `k` and `v` (B, K, L, D), float32, are this rank's.
# - `places[r]`, int64, holds the places in the row of rank r's tokens, in any order. So "before" means a smaller place, not a
#   smaller index in the shard. `cu_seqlens` has the bounds of the row's documents. Ranks may hold different numbers of tokens, and a
#   document may be empty. A rank without tokens returns out and lse with L = 0.
#
# **Attention.** `attend` is given. Call it as `ring.compute(label, attend, q, k, v, visible)`, where `label` is any text. Call it
# once for each block of which some query of your rank sees a key, and not at all for the others: a check looks for more or fewer
# calls. A rank without tokens never calls it. `attend` returns a `Partial` with the block's `out` and `lse`. `merge(a, b)` merges
# two of them. Begin with `Partial.identity(q)`, which adds nothing. After the last merge, return the result's `.out` and `.lse`.
#
# **The ring.** `ring.rank` is this rank r, `ring.world_size` is P. Your own block is the first, before any exchange. After h
# exchanges you hold the block of rank (r − h) mod P. Make exactly P − 1 exchanges with the next rank, each with keys and values
# together, also on a rank without tokens. `ring.shift(k, v, length=n)` sends k and v on, and returns (k, v) of the block that
# arrives. `length` is the length of the block that *arrives*; take it from `places`. Pass on a block even if none of your queries
# sees a key of it, because another rank's may.


# %% grade="18.ring"
def attend(q, k, v, visible):
    """Given: the Partial of a block; `visible` (Lq, Lk): which query sees which key.

    A row of `visible` may be all False.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    safe = lse.masked_fill(lse == -math.inf, 0.0)
    return Partial(torch.exp(scores - safe[..., None]) @ v, lse)


def packed_ring(ring, q, k, v, places, cu_seqlens):
    """Return this rank's (out, lse) over the keys of each query's document, up to the query."""
    # BEGIN SOLUTION attend to each block of which some query of this rank sees a key
    lengths = cu_seqlens.long().diff()
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    state, rows = Partial.identity(q), places[ring.rank]
    for step in range(ring.world_size):
        keys = places[ring.origin(step)]
        visible = (document[rows][:, None] == document[keys]) & (rows[:, None] >= keys)
        if visible.any():
            part = ring.compute(f"attend {step}", attend, q, k, v, visible)
            state = merge(state, part)
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v, length=len(places[ring.origin(step + 1)]))
    return state.out, state.lse
    # END SOLUTION


# %%
check("18.ring")

# %% [markdown]
# Stuck? `hint("18.ring")` in a new cell helps.

# %% [markdown]
# ## 18.weights · Weights of the loss
#
# In a mean over tokens, a long document has more say than a short one. Here all documents with a label have the same say: the loss is
# the mean of their means, and a document's mean is over its tokens with a label. A document without a label is left out.
#
# - `counted` (L,), bool, says which of this rank's tokens count, that is, have a label.
# - `documents` (L,), int64, says to which of the `n` documents each of this rank's tokens belongs, with a label or without.
#
# Return the `weights` (L,), float32 or float64, of this rank's tokens. The loss is the sum of weight · (loss of the token) over
# all tokens of all ranks. A token without a label has the weight 0. At least one token of the row has a label.
#
# A document may lie on several ranks, in unequal parts. A rank may hold no token with a label, or no token at all.
# `ring.all_reduce(x)` returns the sum of all ranks' x, and leaves x as it is. Call it exactly **once** on every rank, even on one
# without tokens. One call is enough for any number of documents, and a hidden check looks for a second one.


# %% grade="18.weights"
def token_weights(ring, counted, documents, n):
    """Return the weight of each of this rank's tokens in the loss."""
    # BEGIN SOLUTION the weight of each token
    own = torch.bincount(documents[counted], minlength=n)
    total = ring.all_reduce(own)
    present = (total > 0).sum()
    return counted / (total[documents].clamp(min=1) * present)
    # END SOLUTION


# %%
check("18.weights")

# %% [markdown]
# Stuck? `hint("18.weights")` in a new cell helps.

# %% [markdown]
# ## All four together, on real text
#
# When all stages pass, run `on_real_text()` in a new cell. It cuts the beginning of the course's corpus into seven documents of
# uneven lengths, in one row. Your ring then runs on 4 virtual ranks and on 4 processes, and its output is compared with float64
# attention, document by document. Both lines should say `relative error below 1e-5: True` and `sum of all weights 1.0`. The first
# document has a single token, and so no label. Why is the sum not 6/7?


# %%
def on_real_text(P=4, lengths=(1, 37, 300, 2, 90, 7, 75), H=4, K=2, D=32):
    """Print whether a packed row on many ranks is as good as one document after the other."""
    S = sum(lengths)
    ids = torch.cat([torch.arange(n) for n in lengths])
    cu, documents = bounds_of(ids)
    layout, (q, k, v) = zigzag(S, P), corpus.qkv(S, heads=H, kv_heads=K, head_dim=D)
    places = [torch.from_numpy(layout.positions(rank)) for rank in range(P)]
    tokens = torch.from_numpy(corpus.tokens(S))
    parts = [oracle.attention(*(x[:, :, a:b] for x in (q, k, v)), causal=True).out
             for a, b in pairwise(cu.tolist())]
    true = torch.cat([torch.from_numpy(part) for part in parts], dim=2)

    def program(ring):
        own = places[ring.rank]
        out, _ = packed_ring(ring, *layout.shard((q, k, v), ring.rank), places, cu)
        _, labels, _ = shard_packed(tokens, cu, own)
        weights = token_weights(ring, labels != -100, documents[own], len(lengths))
        return out, weights.sum()

    runs = {"virtual ranks": VirtualCluster(P).run(program), "processes": launch(program, P)}
    for name, run in runs.items():
        outs, sums = zip(*run.results, strict=True)
        error = ((layout.unshard(outs) - true).abs().max() / true.abs().max()).item()
        total = round(float(sum(sums)), 6)
        print(f"{name}: relative error below 1e-5: {error < 1e-5}, sum of all weights {total}")


# %% tags=["solution-only"]
on_real_text()

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/18_packed_batches.ipynb` also runs the hidden ones, on its own inputs.
