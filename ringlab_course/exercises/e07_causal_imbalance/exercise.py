# %% [markdown]
# # Exercise 07 · The causal imbalance
#
# **You build** a causal ring that runs on any layout and computes nothing that is hidden, and a model of who waits in it.
# **You need** [lesson 07](../notebooks/07_causal_imbalance.ipynb). **Minutes** 75.
#
# | stage | function | what is looked at |
# |---|---|---|
# | 07.work | `work_per_step` | exact counts for any runs, without a mask, up to a million tokens |
# | 07.relation | `tiles_between` | skip, full, causal, any shift; any start and length; few tiles |
# | 07.ring | `ring_causal` | values on any layout, P − 1 exchanges, exact bytes, nothing hidden computed |
# | 07.makespan | `who_waits` | makespan and idle time of any table of work |
#
# A *run* is a tuple `(start, step, length)`: the global positions start, start + step, … In a layout all runs have the
# same step, and `runs[r]` is the list of rank r's runs in local order. `check` runs the visible checks here, in seconds.

# %%
import math

import numpy as np
import torch

from ringlab import VirtualCluster, contiguous, dealt, striped, zigzag
from ringlab_course import check, corpus, hint
from ringlab.merge import Partial, merge_into

# %% [markdown]
# Layouts to play with, as runs. Try `runs_of(zigzag(16, 4))`, or `dealt(S, P, chunk=…, folded=…)`.

# %%
def runs_of(layout):
    """The runs of every rank, as tuples."""
    return [[(run.start, run.step, run.length) for run in layout.runs(rank)] for rank in range(layout.P)]


runs_of(striped(16, 4))

# %% [markdown]
# ## 07.work · Who computes how much, and when
#
# A *pair* is a query and a key at or before it. Return an int64 array (P, P): `[rank, step]` is the number of pairs that the
# queries of `rank` make with the block which is here in that step of the ring, the one of rank (rank − step) mod P.
#
# - Build no mask: memory may grow with the number of tokens, not with that of pairs. A formula for a pair of runs looks at no token at
#   all, and a million take no longer than ten. (What is measured is memory, and that a million tokens are counted in the time a check has:
#   sorted positions and `np.searchsorted` pass as well.)
# - Runs may differ in length and be shifted by any number of rows, stand in any order, or be missing: layouts need not be dealt.

# %% grade="07.work"
def work_per_step(runs):
    """Return the visible pairs of every rank in every step."""
    # BEGIN SOLUTION count each pair of runs by a formula, add up, order by step
    def triangle(n):
        return n * (n + 1) // 2 if n > 0 else 0

    def pairs(q, k):
        (q_start, q_step, n_q), (k_start, _, n_k) = q, k
        ahead = (q_start - k_start) // q_step  # row i sees keys j <= i + ahead

        def upto(row):
            return triangle(row) - triangle(row - n_k)  # 1 + 2 + … + row, but never more than n_k

        return upto(n_q + ahead) - upto(ahead)

    P = len(runs)
    table = [[sum(pairs(q, k) for q in runs[rank] for k in runs[(rank - step) % P]) for step in range(P)] for rank in range(P)]
    return np.array(table, dtype=np.int64)
    # END SOLUTION


# %%
check("07.work")

# %% [markdown]
# Stuck? `hint("07.work")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 07.relation · Skip, full, causal, shifted by one
#
# Two runs of the same step, one of queries, one of keys. Return the list of *tiles* in which they meet: tuples
# `(q_start, q_stop, k_start, k_stop, causal)` of local indices within the runs.
#
# - In a tile with `causal=False` every row sees every key. With `causal=True` the tile is **square**, and its row i sees its
#   keys 0 to i.
# - Every visible pair lies in exactly one tile, and no hidden pair in any. Nothing visible: an empty list.
# - Every tile is a launch, so: one full tile where every row sees every key; else one triangle, with one tile for the keys before it, if
#   there are any, and one for the rows after it, if there are any. None is empty. (Where one row or one key makes do with fewer, fewer is fine.)
# - Starts differ by any amount, not only as in the four kinds of the lesson.

# %% grade="07.relation"
def tiles_between(q_run, k_run):
    """Return the tiles (q_start, q_stop, k_start, k_stop, causal) of two runs."""
    # BEGIN SOLUTION skip, full, or a triangle and what lies beside it
    (q_start, q_step, n_q), (k_start, _, n_k) = q_run, k_run
    ahead = (q_start - k_start) // q_step
    if ahead <= -n_q:
        return []
    if ahead >= n_k - 1:
        return [(0, n_q, 0, n_k, False)]
    first, last = max(0, -ahead), min(n_q, n_k - ahead)  # the rows of the triangle
    tiles = [(first, last, first + ahead, last + ahead, True)]
    if ahead > 0:
        tiles.append((first, last, 0, ahead, False))
    if last < n_q:
        tiles.append((last, n_q, 0, n_k, False))
    return tiles
    # END SOLUTION


# %%
check("07.relation")

# %% [markdown]
# Stuck? `hint("07.relation")` in a new cell helps.

# %% [markdown]
# ## 07.ring · The causal ring, on any layout
#
# `q`, `k`, `v` are this rank's shards, `runs` the runs of all ranks. Return `(out, lse)` of this rank's queries over the
# keys at or before them, in float32.
#
# - `attend` is given, and knows no mask but `causal`. `merge_into(state, slice, partial)` merges into rows of a `Partial`.
# - Compute your `tiles_between` and nothing else. The check puts NaN into keys that a run of queries has no tile
#   with: whoever computes a hidden score and gives it weight 0 gets 0 · NaN = NaN. (So work is judged by what it does to values.
#   A result that you compute and throw away is not noticed.) Keys of your own block hold no NaN: you may attend to it by tiles, like to
#   any other, or as one triangle if this rank's positions ascend.
# - Exactly P − 1 exchanges with the next rank, K and V together and with as many heads as they came with, whatever a rank has to see.
#   Shards differ in length: `ring.shift(k, v, length=n)` says that the block to arrive has n tokens.
# - If the values are wrong, the check first looks whether your `tiles_between` is right.

# %% grade="07.ring"
def attend(q, k, v, causal):
    """Given: the Partial of these rows over these keys; with `causal` row i of a square tile sees keys 0 to i."""
    if causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"a causal tile is square, this one has {q.shape[-2]} rows and {k.shape[-2]} keys")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    return Partial(torch.exp(scores - lse[..., None]) @ v, lse)


def ring_causal(ring, q, k, v, runs):
    """Return this rank's (out, lse) over the keys at or before each query."""
    # BEGIN SOLUTION tiles of every pair of runs, merged into their rows; the block goes on in any case
    state, row = Partial.identity(q), 0
    for step in range(ring.world_size):
        here, row = runs[ring.origin(step)], 0
        for q_run in runs[ring.rank]:
            key = 0
            for k_run in here:
                for q0, q1, k0, k1, causal in tiles_between(q_run, k_run):
                    rows, keys = slice(row + q0, row + q1), slice(key + k0, key + k1)
                    merge_into(state, rows, attend(q[..., rows, :], k[..., keys, :], v[..., keys, :], causal))
                key += k_run[2]
            row += q_run[2]
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v, length=sum(length for _, _, length in runs[ring.origin(step + 1)]))
    return state.out, state.lse
    # END SOLUTION


# %%
check("07.ring")

# %% [markdown]
# Stuck? `hint("07.ring")` in a new cell helps.

# %% [markdown]
# ## 07.makespan · Who waits
#
# `seconds` (P, P) says how long `[rank, step]` computes; a hop takes `hop` seconds. All ranks begin at 0. In every step but the
# last a rank posts its exchange, computes, and waits for the exchange. That is over `hop` seconds after the last of
# three ranks has posted: itself, the previous one (it receives from there) and the next one (it sends there). Then the next step
# begins.
#
# Return `(makespan, idle)`: when the last rank is done, and for each rank the seconds until then in which it does not
# compute, as an array (P,).

# %% grade="07.makespan"
def who_waits(seconds, hop):
    """Return (makespan, idle)."""
    # BEGIN SOLUTION step by step, when every rank begins
    P = len(seconds)
    begin = np.zeros(P)
    for step in range(P):
        end = begin + seconds[:, step]
        posted = np.maximum(begin, np.maximum(np.roll(begin, 1), np.roll(begin, -1)))
        begin = np.maximum(end, posted + hop)
    return end.max(), end.max() - seconds.sum(axis=1)
    # END SOLUTION


# %%
check("07.makespan")

# %% [markdown]
# Stuck? `hint("07.makespan")` in a new cell helps.

# %% [markdown]
# ## All four together
#
# When all stages hold, run `layouts_compared()` in a new cell. It deals 8,192 tokens to 8 ranks in four ways, asks your model for the
# makespan, and runs your ring on real text. Which layout would you take? Lesson 08 goes on from there.

# %%
def layouts_compared(S=8192, P=8):
    """Print, per layout: makespan over that of perfectly shared work, the busy part of rank 0, rounds on every rank."""
    qkv = corpus.qkv(S, heads=1, head_dim=16)
    for layout in (contiguous(S, P), striped(S, P), zigzag(S, P), dealt(S, P, chunk=64)):
        runs = runs_of(layout)
        work = work_per_step(runs)
        makespan, idle = who_waits(work.astype(float), 0.0)
        run = VirtualCluster(P).run(lambda ring, own=layout, runs=runs: ring_causal(ring, *own.shard(qkv, ring.rank), runs))
        rounds = {run.trace.rounds(rank) for rank in range(P)}
        ideal = work.sum() / P
        print(f"{layout.name:16} {makespan / ideal:.3f} of ideal, rank 0 busy {1 - idle[0] / makespan:.0%}, rounds {rounds}")


# %% tags=["solution-only"]
layouts_compared()

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/07_causal_imbalance.ipynb` runs the hidden ones, on inputs of its own.
