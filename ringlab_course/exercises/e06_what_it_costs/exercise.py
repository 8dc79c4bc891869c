# %% [markdown]
# # Exercise 06 · What it costs
#
# **You build** four small things: the number of tokens that hide a hop, the makespan of a ring, a ring that beats it, and a
# published table. **You need** [lesson 06](../notebooks/06_what_it_costs.ipynb). **Minutes** 60.
#
# | stage | function | what is looked at |
# |---|---|---|
# | 06.threshold | `least_tokens` | FLOPs and bytes counted right, units of data sheets, shared heads, a causal mask |
# | 06.makespan | `makespan` | both ways of buffering, unequal ranks, unequal links |
# | 06.overlap | `overlapped_ring` | values, the exchange under way while you compute, rounds, bytes, memory |
# | 06.table | `max_speedup` | 21 published figures, other models |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded.

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
# In one step of the ring a rank with c tokens attends to a block of c keys, while the next block travels. Return the c from
# which the computation takes at least as long as the hop; a number as it comes out, not rounded.
#
# - `flops_per_s`: what the accelerator computes.
# - `rate`, `unit`, `directions`: the link as its data sheet states it. `unit` is "GB/s" or "Gbit/s", with a giga of 10⁹.
#   `directions` is 1 if the rate holds in each direction, 2 if it is that of both together.
# - `element_bytes`: bytes per element of K and V; `group`: query heads per K/V head.
# - `causal`: a causal mask, in a layout under which every rank computes half of the pairs in every step.
#
# Latency is left out.


# %% grade="06.threshold"
def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    """Return the tokens per rank from which a hop hides behind a block's attention."""
    # BEGIN SOLUTION the c at which a step and a hop take equally long
    bytes_per_s = rate * 1e9 / directions / (8 if unit == "Gbit/s" else 1)
    flops = 4 / 2 if causal else 4  # per c², head dim and query head
    moved = 2 * element_bytes / group  # per c, head dim and query head
    return moved * flops_per_s / (flops * bytes_per_s)
    # END SOLUTION


# %%
check("06.threshold")

# %% [markdown]
# Stuck? `hint("06.threshold")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 06.makespan · When the last rank ends
#
# P ranks, P steps, P − 1 hops. `compute_s[r, t]` are the seconds that rank r computes in step t, `hop_s[r]` the seconds
# that a message from rank r to the next one takes (the last rank's next is rank 0). Return the seconds from the common
# start until the last rank has ended.
#
# - With one buffer (`overlapped` False) a rank computes, then posts the exchange and waits for it.
# - Double buffered (`overlapped` True) it posts the exchange when a step begins, computes, and then waits.
# - A message begins when *both* its ends have posted. An exchange is over for a rank when what it sent has left and what
#   it is due has arrived.
# - After the last step nothing is exchanged.


# %% grade="06.makespan"
def makespan(compute_s, hop_s, overlapped):
    """Return the seconds until the last of P ranks has ended."""
    # BEGIN SOLUTION step by step: the time at which each rank is ready for the next one
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
# ## 06.overlap · Beat it
#
# Now write the ring that earns the smaller number. `q`, `k`, `v` are this rank's shards, equally long on all ranks.
# Return `(out, lse)` of this rank's queries over the keys of all ranks. `attend(q, k, v)` stands in the first cell, and gives a
# `Partial` to `merge`.
#
# - Each block is one `ring.compute(label, attend, q, k, v)`.
# - In every step but the last the exchange is under way while the rank computes, and K and V travel in it together.
# - P − 1 exchanges, all with the next rank; K and V as they came, bfloat16 as bfloat16. Memory: your shard, and one block arriving.
#
# The check goes by the order of your posts, computations and waits, which a virtual clock shows.


# %% grade="06.overlap"
def overlapped_ring(ring, q, k, v):
    """Return this rank's (out, lse) over the keys of all ranks; every hop behind a computation."""
    # BEGIN SOLUTION P steps, P − 1 exchanges, no hop exposed
    state = Partial.identity(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v)
        state = merge(state, ring.compute(f"attend {step}", attend, q, k, v))
        if work is not None:
            k, v = work.wait()
    return state.out, state.lse
    # END SOLUTION


# %%
check("06.overlap")

# %% [markdown]
# Stuck? `hint("06.overlap")` in a new cell helps.

# %% [markdown]
# When the last two stages hold, run `predicted_and_measured()` in a new cell: your ring on a virtual clock with slow links
# and slow ranks, and what your `makespan` says about it.


# %%
class Given(Costs):
    """Virtual seconds out of two arrays: compute_s[rank, step] and hop_s[rank]."""

    def __init__(self, compute_s, hop_s):
        self.compute_s, self.hop_s = compute_s, hop_s

    def compute(self, rank, label, args):
        return self.compute_s[rank, int(label.split()[-1])]

    def message(self, source, to, nbytes):
        return self.hop_s[source]


def predicted_and_measured(P=6, seed=0):
    """Return the makespan that you predict and the one on the clock; labels must end in the step's number."""
    rng, layout = np.random.default_rng(seed), contiguous(2 * P, P)
    compute_s, hop_s = rng.integers(1, 9, (P, P)) / 4, rng.integers(1, 9, P) / 4
    qkv = tuple(torch.ones(1, 1, 2 * P, 4) for _ in range(3))
    run = VirtualCluster(P, costs=Given(compute_s, hop_s)).run(
        lambda ring: overlapped_ring(ring, *layout.shard(qkv, ring.rank))
    )
    return makespan(compute_s, hop_s, True), float(max(event.end for event in run.trace.computes()))


# %% tags=["solution-only"]
print("predicted and measured:", predicted_and_measured())

# %% [markdown]
# ## 06.table · A published table, recomputed
#
# The Striped Attention paper (arXiv 2311.09431) bounds what a balanced layout can gain over the contiguous one: the time
# of a forward on the slowest rank, contiguous, over the same, balanced. Both are causal. Its table 3, for 4 A100:
#
# | tokens | 16384 | 32768 | 65536 | 98304 | 131072 | 196608 | 262144 |
# |---|---|---|---|---|---|---|---|
# | 1B | 1.46 | 1.57 | 1.65 | 1.68 | 1.70 | 1.71 | 1.72 |
# | 3B | 1.38 | 1.51 | 1.61 | 1.65 | 1.67 | 1.69 | 1.71 |
# | 7B | 1.34 | 1.47 | 1.58 | 1.62 | 1.65 | 1.68 | 1.70 |
#
# Return that ratio for a `model`, a dict with `vocabulary`, `d_model`, `d_ff`, `layers`, `ffn_matrices`. Time is FLOPs,
# counted on one rank, which has `tokens / ranks` tokens:
#
# - linear layers: four d_model × d_model matrices and `ffn_matrices` of d_model × d_ff in every layer, and once a matrix of
#   d_model × vocabulary. Norms, the softmax and embeddings are left out.
# - attention, all heads together d_model wide: in units of score elements that a rank computes. Contiguous: count the
#   slowest rank's; on the diagonal count half a block. Balanced: every rank has an equal share of the visible half.
# - the attention's FLOPs count `attention_weight` times (the paper's take 2 on A100, where they ran at half the rate).


# %% grade="06.table"
def max_speedup(model, ranks, tokens, attention_weight=1.0):
    """Return the contiguous layout's time over the balanced one's."""
    # BEGIN SOLUTION the slowest rank's time under each layout
    c, d, layers = tokens / ranks, model["d_model"], model["layers"]
    weights = layers * (4 * d * d + model["ffn_matrices"] * d * model["d_ff"]) + d * model["vocabulary"]
    linear = 2 * c * weights
    block = attention_weight * 4 * d * c * c * layers
    return (linear + block * (ranks - 0.5)) / (linear + block * ranks / 2)
    # END SOLUTION


# %%
check("06.table")

# %% [markdown]
# Stuck? `hint("06.table")` in a new cell helps.

# %% tags=["solution-only"]
model_1b = {"vocabulary": 32000, "d_model": 2048, "d_ff": 5504, "layers": 22, "ffn_matrices": 2}
print("1B:", [round(max_speedup(model_1b, 4, 1024 * n, 2), 2) for n in (16, 32, 64, 96, 128, 192, 256)])

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/06_what_it_costs.ipynb` runs the hidden ones, on inputs of its own.
