# %% [markdown]
# # Exercise 15 · Choosing: ring, all-gather, Ulysses, hybrid, decode
#
# **You build** a function for the bytes of every schedule, a report that ranks the schedules for a layer and a machine, and
# the decode step, which needs none of them.
# **You need** [lesson 15](../notebooks/15_choosing.ipynb). **Minutes** 60.
#
# | stage | function | what the checks look at |
# |---|---|---|
# | 15.traffic | `bytes_sent` | bytes, grouped heads, more ranks than K/V heads, None where a schedule cannot run |
# | 15.choose | `choose` | bytes, exposed seconds, order and reasons, memory, latency |
# | 15.decode | `decode_step` | values on every rank, ranks without a token, large scores, bytes that do not grow |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded.
#
# **Not allowed:** ringlab's planner, formulas of traffic, cache and merge, PyTorch's attention, and changing the
# arguments of a function: do not write into them.

# %%
import math

import torch

from ringlab import Ring, ShardedCache, VirtualCluster, launch, zigzag
from ringlab_course import check, corpus, hint

# %% [markdown]
# ## 15.traffic · Bytes, by schedule
#
# A layer is a dict: `B`, `H`, `K`, `D`, `itemsize` (bytes of an element). There are at least 2 ranks, and P divides S: each
# rank has S/P tokens. The ranks stand in P/U rows of U. Inside a row they share the heads. Each rank forms a ring with the
# ranks that hold its heads in the other rows. `ulysses` is U: 1 for `"ring"` and `"allgather"`, P for `"ulysses"`. For
# `"hybrid"` U may be any number, 1 and P included.
#
# Return the bytes that a rank sends in one forward, a whole number. Return **None** where the schedule cannot run:
#
# - U must divide P;
# - U must divide H;
# - U must divide K or be a multiple of K. In the second case several ranks need the same K/V head, and each of them gets
#   the whole of it.


# %% grade="15.traffic"
def bytes_sent(layer, S, P, schedule, ulysses):
    """Return the bytes that a rank sends in one forward, or None."""
    # BEGIN SOLUTION count what a rank sends; None where it cannot run
    H, K, U = layer["H"], layer["K"], ulysses
    if P % U or H % U or (K % U and U % K):
        return None
    head = layer["B"] * layer["D"] * layer["itemsize"] * (S // P)  # one head of a rank's tokens
    if schedule == "allgather":
        return (P - 1) * 2 * K * head
    heads = max(1, K // U)
    return (U - 1) * (2 * H // U + 2 * heads) * head + (P // U - 1) * 2 * heads * U * head
    # END SOLUTION


# %%
check("15.traffic")

# %% [markdown]
# Stuck? `hint("15.traffic")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 15.choose · A decision report
#
# `machine` is a dict: `flops_per_s` of a rank, `bytes_per_s` of its link in one direction, `latency_s` of a message,
# `memory_bytes` for this layer's attention. The mask is causal and the layout balanced: half of the pairs of each block
# are visible. L is S/P. As above, P is at least 2 and divides S.
#
# **Exposed seconds.**
#
# - An all-gather waits for K, then for V: its bytes over `bytes_per_s`, and two latencies.
# - The two all-to-alls of a row, one before and one after the computation, cost their bytes over `bytes_per_s`, and two
#   latencies. They hide behind nothing.
# - Then there are P/U − 1 hops, each with one latency. During each, a rank computes a block: U·L queries, as many keys,
#   H/U heads, 2·B·(H/U)·D·(U·L)² FLOPs. The time by which the hop is longer than the block is exposed.
#
# **Held bytes.**
#
# - q, k, v and out of the rank's own tokens.
# - If U > 1, also q, k, v and out of its heads, for all tokens of its row.
# - If there are hops, also K and V of one visiting block, without the one in flight: its heads, U·L tokens.
# - In the all-gather, also K and V of all other ranks.
#
# Return a list with one dict for each option: ring and all-gather (U = 1), Ulysses (U = P), and a hybrid for each U
# that divides P, with 1 < U < P. Each dict has the keys `schedule`, `ulysses`, `bytes`, `exposed_s` and `reason`, and
# no others. An option is *usable* if the ranks can share the heads and what it holds is at most `memory_bytes`. The
# reason is one of four words:
#
# - `"hidden"`: usable, and nothing is exposed;
# - `"exposed"`: usable, and something is exposed;
# - `"memory"`: it holds more than `memory_bytes`. Give `bytes` and `exposed_s` all the same;
# - `"heads"`: so many ranks cannot share the heads, whatever the memory. `bytes` and `exposed_s` are None.
#
# Usable options come first, sorted by exposed seconds, the least first. No two of them expose the same. The order of the
# others does not matter.


# %% grade="15.choose"
def choose(layer, S, P, machine):
    """Return a report of all options, the best first."""
    # BEGIN SOLUTION weigh every option, then sort
    options = [("ring", 1), ("allgather", 1), ("ulysses", P)]
    options += [("hybrid", U) for U in range(2, P) if P % U == 0]
    report = []
    for schedule, U in options:
        row = {"schedule": schedule, "ulysses": U, "bytes": bytes_sent(layer, S, P, schedule, U)}
        if row["bytes"] is None:
            report.append(row | {"exposed_s": None, "reason": "heads"})
            continue
        seconds, held = weigh(layer, S // P, P, schedule, U, row["bytes"], machine)
        reason = "hidden" if seconds == 0 else "exposed"
        if held > machine["memory_bytes"]:
            reason = "memory"
        report.append(row | {"exposed_s": seconds, "reason": reason})
    unusable = ("memory", "heads")
    return sorted(report, key=lambda row: (row["reason"] in unusable, row["exposed_s"] or 0.0))


def weigh(layer, L, P, schedule, U, sent, machine):
    """The exposed seconds and the held bytes of one option."""
    B, latency = machine["bytes_per_s"], machine["latency_s"]
    head = layer["B"] * layer["D"] * layer["itemsize"] * L
    H, K = layer["H"], layer["K"]
    own = 2 * (H + K) * head
    if schedule == "allgather":
        return sent / B + 2 * latency, own + (P - 1) * 2 * K * head
    heads, hops = max(1, K // U), P // U - 1
    visitor = 2 * heads * U * head
    hop = visitor / B + latency
    block = 2 * layer["B"] * (H // U) * layer["D"] * (U * L) ** 2 / machine["flops_per_s"]
    seconds, held = hops * max(0.0, hop - block), own + (visitor if hops else 0)
    if U > 1:
        seconds += (sent - hops * visitor) / B + 2 * latency
        held += 2 * (H // U + heads) * U * head
    return seconds, held
    # END SOLUTION


# %%
check("15.choose")

# %% [markdown]
# Stuck? `hint("15.choose")` in a new cell helps.

# %% [markdown]
# ## 15.decode · A decode step
#
# `q` (B, H, 1, D) is the query of the newest token, the same on every rank. `k` and `v` (B, K, L, D) are this rank's part
# of the cache, which holds all tokens so far, also the newest. L differs from rank to rank, and may be 0,
# but at least one rank has a token. Return `out`
# (B, H, 1, D), the same on every rank, in the dtype of q.
#
# - Query head h reads K/V head h // (H // K), and scores have the factor 1/√D.
# - Compute in float32 at least. Scores may be several hundred, with either sign.
# - The bytes that you send must not grow with the sequence.
# - There are two ways to merge. `ring.all_gather(x)` gives every rank a list of all parts, as `decode` in the lesson does. Or
#   `ring.all_reduce(x)` adds up over the ranks, and `ring.all_reduce(x, op="max")` takes the maximum. Both are allowed.
# - All ranks must call these equally often: a rank without tokens, too. An empty part has lse = −∞.


# %% grade="15.decode"
def decode_step(ring, q, k, v):
    """Return attention of the new token over the caches of all ranks."""
    # BEGIN SOLUTION attend to this rank's keys, then merge over ranks
    dtype = torch.promote_types(q.dtype, torch.float32)
    B, H, _, D = q.shape
    K, L = k.shape[1], k.shape[2]
    rows = q.to(dtype).view(B, K, H // K, D)  # query heads that share a K/V head, side by side
    scores = rows @ k.to(dtype).mT / math.sqrt(D)
    own = scores.amax(-1, keepdim=True) if L else scores.new_full((B, K, H // K, 1), -math.inf)
    top = ring.all_reduce(own, op="max")
    weights = (scores - top).exp()
    sums = torch.cat([weights @ v.to(dtype), weights.sum(-1, keepdim=True)], dim=-1)
    sums = ring.all_reduce(sums)
    return (sums[..., :-1] / sums[..., -1:]).view(B, H, 1, D).to(q.dtype)
    # END SOLUTION


# %%
check("15.decode")

# %% [markdown]
# Stuck? `hint("15.decode")` in a new cell helps.

# %% [markdown]
# ## On real text
#
# When all stages pass, run `on_real_text()` in a new cell. It fills a cache with the corpus on 4 virtual ranks and on 2
# processes, decodes a few tokens, and compares them with one process.


# %%
def generate(ring: Ring, prompt, new):
    """The outputs of `new` tokens after the prompt, and the number of tokens on each rank."""
    q, k, v = corpus.qkv(prompt + new, heads=8, kv_heads=2, head_dim=16)
    layout = zigzag(prompt, ring.world_size)
    shards = (layout.shard(x[:, :, :prompt], ring.rank) for x in (k, v))
    cache = ShardedCache.of_shards(ring, layout, *shards)
    outs = []
    for at in range(prompt, prompt + new):
        cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
        outs.append(decode_step(ring, q[:, :, at : at + 1], cache.k, cache.v))
    return torch.cat(outs, dim=2), cache.lengths


def on_real_text(prompt=512, new=6):
    """Print whether many ranks decode as one."""
    (alone, _) = VirtualCluster(1).run(generate, prompt, new).results[0]
    runs = {
        "4 virtual ranks": VirtualCluster(4).run(generate, prompt, new),
        "2 processes": launch(generate, 2, prompt, new),
    }
    for name, run in runs.items():
        worst = max(float((out - alone).abs().max() / alone.abs().max()) for out, _ in run.results)
        lengths = run.results[0][1]
        print(f"{name}: tokens on each rank {lengths}, as one process to 1e-5: {worst < 1e-5}")


# %% tags=["solution-only"]
on_real_text()

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/15_choosing.ipynb` also runs the hidden ones, on its
# own inputs.
