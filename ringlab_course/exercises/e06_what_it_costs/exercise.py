# %% [markdown]
# # Exercise 06 · What it costs
#
# **You build** four small things: the number of tokens that hide a hop, the makespan of a ring, a ring that hides its
# hops in less memory than the lesson's, and a published table.
#
# **You need** [lesson 06](../notebooks/06_what_it_costs.ipynb). **Minutes** 75.
#
# | stage | function | what the checks look at |
# |---|---|---|
# | 06.threshold | `least_tokens` | FLOPs and bytes, units of data sheets, shared heads, a causal mask |
# | 06.makespan | `makespan` | compute, then shift; post, then compute; unequal ranks, unequal links |
# | 06.overlap | `overlapped_ring` | values, exchanges under way while you compute, their number, bytes, memory |
# | 06.table | `max_speedup` | the FLOPs of a paper's models and of others |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded. Traffic, memory and the
# order of events count once the values are right.
#
# **Allowed** in `overlapped_ring`: ringlab's blocks, `merge`, and PyTorch's attention. **Not allowed:** ringlab's
# rings, planner and simulator, and modifying the arrays and tensors that you are given.

# %%
import math

import numpy as np
import torch

from ringlab import VirtualCluster, contiguous
from ringlab.blocks import get_block
from ringlab.comm.virtual import Costs
from ringlab_course import check, hint
from ringlab.merge import Partial, merge


def attend(q, k, v):
    """Attention of q on one block, as a Partial; query head h reads K/V head h // (H // K)."""
    return get_block("naive", q).forward(q, k, v, causal=False, scale=1 / math.sqrt(q.shape[-1]))


# %% [markdown]
# ## 06.threshold · The tokens per rank that hide a hop
#
# In one step of the ring, a rank with L tokens attends to a block of L keys while a block travels. Return the smallest L
# for which the computation takes at least as long as the hop. Do not round the result.
#
# - `flops_per_s`: the accelerator's rate.
# - `rate`, `unit`, `directions`: the link as its data sheet states it. `unit` is "GB/s" or "Gbit/s", with a giga of 10⁹.
#   `directions` is 1 if the rate holds in each direction, and 2 if it counts both directions together.
# - `element_bytes`: bytes per element of K and V; `group`: query heads per K/V head.
# - `causal`: a causal mask, in a layout under which every rank computes half of the pairs in every step.
#
# Ignore latency.


# %% grade="06.threshold"
def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    """Return the tokens per rank from which a hop hides behind a block's attention."""
    # BEGIN SOLUTION the threshold
    bytes_per_s = rate * 1e9 / directions / (8 if unit == "Gbit/s" else 1)
    flops = 4 / 2 if causal else 4  # per L², head dim and query head
    moved = 2 * element_bytes / group  # per L, head dim and query head
    return moved * flops_per_s / (flops * bytes_per_s)
    # END SOLUTION


# %%
check("06.threshold")

# %% [markdown]
# Stuck? `hint("06.threshold")` in a new cell shows a question. Run it again for a direction, then for a line of
# mathematics.

# %% [markdown]
# ## 06.makespan · When the last rank ends
#
# There are P ranks, P steps and P − 1 hops; P may also be 1 or 2. `compute_s[r, t]` is the time in seconds that rank r
# computes in step t. `hop_s[r]` is the time that a message from rank r to the next rank takes; after the last rank comes
# rank 0. Return the seconds from the common start until the last rank has ended.
#
# - Compute, then shift (`overlapped` False): a rank computes, then posts the exchange and waits for it.
# - Post, then compute (`overlapped` True): a rank posts the exchange when a step begins, computes, and then waits.
# - A message begins when *both* its ends have posted. A rank's exchange is over when its own message has been delivered
#   and the message from the previous rank has arrived.
# - After the last step nothing is exchanged.


# %% grade="06.makespan"
def makespan(compute_s, hop_s, overlapped):
    """Return the seconds until the last of P ranks has ended."""
    # BEGIN SOLUTION the makespan
    P = len(hop_s)
    ready = np.zeros(P)
    for step in range(P - 1):
        done = ready + compute_s[:, step]
        posted = ready if overlapped else done
        sent = np.maximum(posted, np.roll(posted, -1)) + hop_s  # to the next rank
        ready = np.maximum(done, np.maximum(sent, np.roll(sent, 1)))
    return float((ready + compute_s[:, P - 1]).max())
    # END SOLUTION


# %%
check("06.makespan")

# %% [markdown]
# Stuck? `hint("06.makespan")` in a new cell helps.

# %% [markdown]
# ## 06.overlap · Hidden hops in less memory
#
# The lesson's ring that posts first holds two blocks beside its shard: the one in use and the one that is arriving. It
# can do with less. Cut every block into `pieces` pieces along its tokens, and let each piece travel while the rank
# computes with *that* piece. Meanwhile the next block's piece of the same number arrives. Once it is here, the piece
# that you sent is no longer needed. So beside the shard you need one block and one arriving piece; you may hold one
# spare piece more.
#
# `q`, `k`, `v` are this rank's shards, equally long on all ranks. Return `(out, lse)` of this rank's queries over the keys
# of all ranks, in float32 for bfloat16 inputs, too. `attend(q, k, v)` from the first cell returns a `Partial` for `merge`;
# its out and lse are float32 for bfloat16 inputs, too.
#
# - There are exactly `pieces` pieces, from 1 up to the number of tokens. They differ by at most one token in length.
# - Each piece of each block is one `ring.compute(label, attend, q, …)`. Let `label` end with the step's number, as in
#   "attend 2": a clock further below reads it. All pieces of a step may have the same label.
# - In every step but the last, post a piece before you compute with it, and wait for its exchange before you post the next
#   one. K and V of the piece travel in one exchange.
# - Make `pieces` · (P − 1) exchanges, all with the next rank. K and V travel as they came, bfloat16 as bfloat16.
# - At any time a rank holds, beside its shard, at most the block in use, the piece that arrives, and the spare piece, because
#   `post` may copy a piece. In step 0 the block in use is the shard itself. Accumulators do not count.
#
# With two pieces, a and b, a step that is not the last goes: post a, compute with a, wait, post b, compute with b, wait.
#
# The check reads the order of your posts, computations and waits off a virtual clock.


# %% grade="06.overlap"
def overlapped_ring(ring, q, k, v, pieces):
    """Return this rank's (out, lse) over the keys of all ranks."""
    # BEGIN SOLUTION the ring in pieces
    state = Partial.identity(q)
    block = list(zip(k.tensor_split(pieces, -2), v.tensor_split(pieces, -2), strict=True))
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        for number, piece in enumerate(block):
            work = None if last else ring.post(*piece)
            state = merge(state, ring.compute(f"attend {step}", attend, q, *piece))
            if work is not None:
                block[number] = work.wait()
    return state.out, state.lse
    # END SOLUTION


# %%
check("06.overlap")

# %% [markdown]
# Stuck? `hint("06.overlap")` in a new cell helps.

# %% [markdown]
# When the last two stages pass their checks, run `predicted_and_measured()` in a new cell. It runs your ring, in one piece,
# on a virtual clock with slow links and slow ranks, and compares the time with what your `makespan` says.


# %%
class Given(Costs):
    """Virtual seconds from two arrays: compute_s[rank, step] and hop_s[rank]."""

    def __init__(self, compute_s, hop_s):
        self.compute_s, self.hop_s = compute_s, hop_s

    def compute(self, rank, label, args):
        return self.compute_s[rank, int(label.split()[-1])]

    def message(self, source, to, nbytes):
        return self.hop_s[source]


def predicted_and_measured(P=6, seed=0):
    """Return your makespan and the clock's; your labels must end with the step's number."""
    rng, layout = np.random.default_rng(seed), contiguous(2 * P, P)
    compute_s, hop_s = rng.integers(1, 9, (P, P)) / 4, rng.integers(1, 9, P) / 4
    qkv = tuple(torch.ones(1, 1, 2 * P, 4) for _ in range(3))
    run = VirtualCluster(P, costs=Given(compute_s, hop_s)).run(
        lambda ring: overlapped_ring(ring, *layout.shard(qkv, ring.rank), pieces=1)
    )
    return makespan(compute_s, hop_s, True), float(max(event.end for event in run.trace.computes()))


# %% tags=["solution-only"]
print("predicted and measured:", predicted_and_measured())

# %% [markdown]
# ## 06.table · A published table, recomputed
#
# How much faster can a layout make a ring? By the lesson's rule, the slowest rank sets the pace. Under a causal
# mask, contiguous shards give the last rank most to compute. A balanced layout, such as zig-zag, gives all ranks the same.
#
# The Striped Attention paper (arXiv 2311.09431) bounds what a balanced layout can gain over the contiguous one: the time
# of a forward on the slowest rank under the contiguous layout, divided by that under a balanced one. Both are causal. Its
# table 3, for 4 A100:
#
# | tokens | 16384 | 32768 | 65536 | 98304 | 131072 | 196608 | 262144 |
# |---|---|---|---|---|---|---|---|
# | 1B | 1.46 | 1.57 | 1.65 | 1.68 | 1.70 | 1.71 | 1.72 |
# | 3B | 1.38 | 1.51 | 1.61 | 1.65 | 1.67 | 1.69 | 1.71 |
# | 7B | 1.34 | 1.47 | 1.58 | 1.62 | 1.65 | 1.68 | 1.70 |
#
# Return that ratio for a `model`, a dict with `vocabulary`, `d_model`, `d_ff`, `layers`, `ffn_matrices`. Time is
# proportional to FLOPs. Count those of one rank, which has `tokens / ranks` tokens:
#
# - Linear layers: four matrices of d_model × d_model and `ffn_matrices` of d_model × d_ff in every layer, and one matrix of
#   d_model × vocabulary for the whole model. Ignore norms, the softmax and embeddings.
# - Attention: all heads together are d_model wide. Count the score elements that a rank computes. Contiguous: those of the
#   slowest rank, with half a block on the diagonal. Balanced: an equal share of the visible half for every rank. Each
#   element is part of two products, as in section 1 of the lesson.
# - Multiply the FLOPs of attention by `attention_weight`. The paper's weight is 2 on A100, where attention ran at half the
#   rate.


# %% grade="06.table"
def max_speedup(model, ranks, tokens, attention_weight=1.0):
    """Return the contiguous layout's time over the balanced one's."""
    # BEGIN SOLUTION the ratio
    L, d, layers = tokens / ranks, model["d_model"], model["layers"]
    weights = layers * (4 * d * d + model["ffn_matrices"] * d * model["d_ff"])
    linear = 2 * L * (weights + d * model["vocabulary"])
    block = attention_weight * 4 * d * L * L * layers
    return (linear + block * (ranks - 0.5)) / (linear + block * ranks / 2)
    # END SOLUTION


# %%
check("06.table")

# %% [markdown]
# Stuck? `hint("06.table")` in a new cell helps.

# %% [markdown]
# When 06.table passes its checks, run `table_three()` in a new cell, and compare with the paper. The gain grows with the
# context, because attention takes more and more of the time. It can never exceed the gain of attention alone.


# %%
def table_three():
    """Print table 3 as your `max_speedup` gives it."""
    sizes = {"1B": (2048, 5504, 22), "3B": (3200, 8640, 26), "7B": (4096, 11008, 32)}
    for name, (d_model, d_ff, layers) in sizes.items():
        model = {"vocabulary": 32000, "d_model": d_model, "d_ff": d_ff}
        model |= {"layers": layers, "ffn_matrices": 2}
        row = [max_speedup(model, 4, 1024 * n, 2) for n in (16, 32, 64, 96, 128, 192, 256)]
        print(name, " ".join(f"{speedup:.2f}" for speedup in row))


# %% tags=["solution-only"]
table_three()

# %% [markdown]
# `ringlab grade exercises/06_what_it_costs.ipynb` also runs the hidden checks, on inputs of its own.
