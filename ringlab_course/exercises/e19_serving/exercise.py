# %% [markdown]
# # Exercise 19 · Serving a long context
#
# **You build** what a server with a long context is made of: the place of every token in a divided cache, the merge of all ranks, decode
# with divided heads, prefill of a chunk after a cached prefix, and the bytes that decide who should travel.
# **You need** [lesson 19](../notebooks/19_serving.ipynb). **Minutes** 75.
#
# | stage | function | lesson | what is checked |
# |---|---|---|---|
# | 19.place | `place` | none | the rank and the slot of any token |
# | 19.merge | `merge_all` | section 6 | values, ranks without keys, large lse |
# | 19.decode | `decode` | section 6 | values with divided heads, empty ranks, bytes |
# | 19.prefill | `prefill` | sections 2 and 3 | values in any layout, after any prefix; messages |
# | 19.travel | `bytes_sent` | section 3 | both ways, to the byte |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded.
#
# **Not allowed:** `ringlab.serving`, ringlab's decode, merge, ring attention and formulas of traffic, PyTorch's attention, and writing into
# the tensors that a function gets.

# %%
import math

import torch

from ringlab import VirtualCluster, launch, oracle, zigzag
from ringlab_course import check, corpus, hint

# %% [markdown]
# ## 19.place · Pieces on ranks
#
# An answer grows by a token in every step, and the ranks that cache it should fill evenly. Caches come in pages, so a rank gets a piece of
# `interleave` tokens at a time. A sequence is cut into such pieces, and piece n lies on rank n mod P. Each rank stores its pieces one after another. With `interleave` 4 and P = 2, for example, tokens
# 0 to 3 are on rank 0, 4 to 7 on rank 1, and 8 to 11 on rank 0 in its slots 4 to 7. `tokens` (n,), int64, are positions in the sequence.
# Return `(ranks, slots)`, int64: the rank of each token, and its index among the tokens of this sequence on that rank.



# %% grade="19.place"
def place(tokens, interleave, P):
    """Return (ranks, slots) of these tokens."""
    # BEGIN SOLUTION the rank and the slot
    number = tokens // interleave
    return number % P, number // P * interleave + tokens % interleave
    # END SOLUTION


# %%
check("19.place")

# %% [markdown]
# Stuck? `hint("19.place")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 19.merge · The merge of all ranks
#
# `outs` (R, …, D) and `lses` (R, …) are R partials of the same queries over different keys. lse is a natural logarithm, −∞ where a partial
# has no key for a query; its out is then 0. Return the partial `(out, lse)` over the keys of all, (…, D) and (…). A query that sees no key
# at all has out 0 and lse −∞: mind that −∞ − (−∞) is NaN. lse may be large: exponentials of it overflow.


# %% grade="19.merge"
def merge_all(outs, lses):
    """Return (out, lse) of R partials along the first axis."""
    # BEGIN SOLUTION shares of the whole sum
    top = lses.amax(0)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    shares = weights / total.masked_fill(total == 0, 1.0)
    return (shares[..., None] * outs).sum(0), top + total.log()
    # END SOLUTION


# %%
check("19.merge")

# %% [markdown]
# Stuck? `hint("19.merge")` in a new cell helps.

# %% [markdown]
# ## 19.decode · Decode with divided heads
#
# One new token. The weights are shared out by heads, so this rank has the queries of its own H/P heads: `q` (B, H/P, 1, D); rank r has
# heads r·H/P to (r + 1)·H/P − 1. The cache is shared out by tokens: `k` and `v` (B, K, L, D) are all K heads of this rank's L tokens. On the
# rank that caches the new token, L counts it already. L differs from rank to rank, and may be 0. Query head h reads K/V head h // (H // K).
# Return out (B, H/P, 1, D) of this rank's heads over the tokens of **all** ranks.
#
# - `ring.rank` is this rank, `ring.world_size` is P. `ring.all_gather(x)` returns the list of all ranks' x.
#   `ring.comm.exchange` sends two tensors to rank a, and returns the two that arrive from rank b. These are written into `room_x` and
#   `room_y`, which have their shapes and dtypes:
#
#       room_x, room_y = torch.empty_like(x), torch.empty_like(y)
#       from_b = ring.comm.exchange(send=(x, y), to=a, receive=(room_x, room_y), source=b).wait()
#
#   In round d = 1 … P − 1, for example, send to rank (r + d) mod P and receive from rank (r − d) mod P.
#   A slice of a tensor may have gaps in memory: call `.contiguous()` on what you send.
# - A rank sends to each other rank its queries and the partials of *that* rank's heads, and nothing else: (P − 1) · H/P · (2D + 1) numbers
#   for each of the B sequences, however long they are.
# - Your `merge_all` merges P partials.


# %% grade="19.decode"
def attend(q, k, v):
    """Given: (out, lse) of queries (B, H, n, D) over keys (B, K, L, D); (0, −∞) without keys."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    lse = torch.logsumexp(scores, dim=-1)
    safe = lse.masked_fill(lse == -math.inf, 0.0)
    return torch.exp(scores - safe[..., None]) @ v, lse


def decode(ring, q, k, v):
    """Return out of this rank's heads over the tokens of all ranks."""
    # BEGIN SOLUTION gather queries, attend to own tokens, hand partials to their owners
    P, heads = ring.world_size, q.shape[1]
    out, lse = attend(torch.cat(ring.all_gather(q), dim=1), k, v)
    outs, lses = (x.split(heads, dim=1) for x in (out, lse))
    mine = {ring.rank: (outs[ring.rank], lses[ring.rank])}
    for distance in range(1, P):
        to, source = (ring.rank + distance) % P, (ring.rank - distance) % P
        sent = outs[to].contiguous(), lses[to].contiguous()
        room = tuple(torch.empty_like(x) for x in sent)
        mine[source] = ring.comm.exchange(send=sent, to=to, receive=room, source=source).wait()
    return merge_all(*(torch.stack(parts) for parts in zip(*mine.values(), strict=True)))[0]
    # END SOLUTION


# %%
check("19.decode")

# %% [markdown]
# Stuck? `hint("19.decode")` in a new cell helps.

# %% [markdown]
# ## 19.prefill · Prefill of a chunk
#
# A long prompt is computed in chunks, and the chunks before this one are cached. `q` (B, H, L, D), `k`, `v` (B, K, L, D) are this rank's
# tokens of the chunk; `cached_k`, `cached_v` (B, K, C, D) its tokens of the prefix. Every rank knows where everybody's tokens stand in the
# sequence: `positions[r]` (L,) for rank r's tokens of the chunk, `cached[r]` (C,) for its tokens of the prefix. L and C differ from rank to
# rank; heads are grouped as in `decode`. Return `(out, lse)` of this rank's queries over all keys at or before them, in the prefix and in
# the chunk.
#
# - Keys and values travel: P − 1 exchanges with the next rank, in which each rank's block, prefix and chunk together, goes around once.
#   After d of them you hold the block of rank o = `ring.origin(d)`: its tokens stand at `cached[o]`, then `positions[o]`. With d = 0 it is
#   your own block. Each of the P blocks gives a partial, and `merge_all` merges them in the end.
#   `ring.shift(k, v, length=n)` sends k and v to the next rank, and returns the block that *arrives*. n is the number of its tokens. After d
#   exchanges, the next block to arrive is that of rank o = `ring.origin(d + 1)`, so n = len(cached[o]) + len(positions[o]). Empty blocks are
#   exchanged, too.
# - The `attend` above has no mask. Here you need one, which compares positions. Set masked scores to −∞ by `masked_fill`. The other lines of
#   `attend` then also hold for a query that sees no key of a block.
# - Blocks differ in length; a rank may hold no token of the prefix, of the chunk, or of both.


# %% grade="19.prefill"
def prefill(ring, q, k, v, cached_k, cached_v, positions, cached):
    """Return (out, lse) of this rank's queries over prefix and chunk."""
    # BEGIN SOLUTION a causal ring whose blocks hold prefix and chunk
    k, v = torch.cat([cached_k, k], dim=2), torch.cat([cached_v, v], dim=2)
    places = [torch.cat(pair) for pair in zip(cached, positions, strict=True)]
    group, rows = q.shape[1] // k.shape[1], positions[ring.rank]
    outs, lses = [], []
    for step in range(ring.world_size):
        visible = rows[:, None] >= places[ring.origin(step)]
        wide_k, wide_v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = (q @ wide_k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf)
        lse = torch.logsumexp(scores, dim=-1)
        safe = lse.masked_fill(lse == -math.inf, 0.0)
        outs.append(torch.exp(scores - safe[..., None]) @ wide_v)
        lses.append(lse)
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v, length=len(places[ring.origin(step + 1)]))
    return merge_all(torch.stack(outs), torch.stack(lses))
    # END SOLUTION


# %%
check("19.prefill")

# %% [markdown]
# Stuck? `hint("19.prefill")` in a new cell helps.

# %% [markdown]
# ## 19.travel · Who should travel
#
# P ranks prefill a chunk of `new` tokens after a `prefix`; P divides both. Either keys and values travel, as in your `prefill`: each rank
# sends P − 1 blocks, and a block is a rank's part of prefix and chunk. Or queries do: each rank passes on the queries of P − 1 ranks, and
# returns the partials of P − 1 blocks, each to the owner of its queries. An element of q, k and v has `itemsize` bytes. A partial is out and lse, in float32,
# or in float64 if q, k and v are. So each of its numbers has max(`itemsize`, 4) bytes. Return `(keys_and_values, queries)`, two ints: the bytes that a rank sends either way,
# for one sequence and one layer.



# %% grade="19.travel"
def bytes_sent(prefix, new, P, H, K, D, itemsize):
    """Return the bytes that a rank sends if (keys and values, queries) travel."""
    # BEGIN SOLUTION bytes of both ways
    keys = (P - 1) * (prefix + new) // P * 2 * K * D * itemsize
    partial = H * (D + 1) * max(itemsize, 4)
    return keys, (P - 1) * (new // P) * (H * D * itemsize + partial)
    # END SOLUTION


# %%
check("19.travel")

# %% [markdown]
# Stuck? `hint("19.travel")` in a new cell helps.

# %% [markdown]
# ## All together, on real text
#
# When all stages hold, run `serve()` in a new cell. It computes a prompt of real text in chunks on 4 virtual ranks and on 4 processes, with
# the cache shared out by your `place`, decodes the last token, and compares it with attention in float64. Chunks are zig-zag shards; a chunk's
# keys move from there to the cache without being sent or counted. A real server would send them, or compute the chunk where the cache wants it.


# %%
def serve(S=193, P=4, H=8, K=2, D=16, chunk=64, interleave=16):
    """Print whether a prompt in chunks and a decoded token are as good as one attention."""
    q, k, v = corpus.qkv(S, heads=H, kv_heads=K, head_dim=D)
    ranks, _ = place(torch.arange(S), interleave, P)
    true = torch.from_numpy(oracle.attention(q, k, v, causal=True).out)

    def program(ring):
        outs = []
        for start in range(0, S - 1, chunk):
            layout = zigzag(min(chunk, S - 1 - start), P)
            positions = [start + torch.from_numpy(layout.positions(r)) for r in range(P)]
            cached = [torch.nonzero(ranks[:start] == r).flatten() for r in range(P)]
            new, old = positions[ring.rank], cached[ring.rank]
            parts = (q[:, :, new], k[:, :, new], v[:, :, new], k[:, :, old], v[:, :, old])
            outs.append((new, prefill(ring, *parts, positions, cached)[0]))
        own = torch.nonzero(ranks == ring.rank).flatten()
        heads = slice(ring.rank * H // P, (ring.rank + 1) * H // P)
        return outs, decode(ring, q[:, heads, -1:], k[:, :, own], v[:, :, own])

    runs = {"virtual ranks": VirtualCluster(P).run(program), "processes": launch(program, P)}
    for name, run in runs.items():
        found = torch.zeros_like(true)
        for outs, _ in run.results:
            for places, out in outs:
                found[:, :, places] = out.double()
        found[:, :, -1:] = torch.cat([last for _, last in run.results], dim=1).double()
        error = ((found - true).abs().max() / true.abs().max()).item()
        print(f"{name}: relative error below 1e-5: {error < 1e-5}")
    keys, queries = bytes_sent(128, 64, P, H, K, D, 4)
    print(f"bytes of the last chunk: {keys:,} if keys and values travel, {queries:,} if queries do")


# %% tags=["solution-only"]
serve()

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/19_serving.ipynb` also runs the hidden ones, on its own inputs.
