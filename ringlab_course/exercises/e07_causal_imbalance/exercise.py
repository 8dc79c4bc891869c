# %% [markdown]
# # Exercise 07 · The causal imbalance
#
# **You build** a causal ring that runs on any layout and computes nothing hidden, and a model of who waits in it.
# **You need** [lesson 07](../notebooks/07_causal_imbalance.ipynb). **Minutes** 75.
#
# | stage | function | what is checked |
# |---|---|---|
# | 07.work | `work_per_step` | exact counts for any runs, without a mask, up to a million tokens |
# | 07.relation | `tiles_between` | skip, full, causal, any shift; any start and length; few tiles |
# | 07.ring | `ring_causal` | values on any layout, P − 1 exchanges, exact bytes, nothing hidden computed |
# | 07.makespan | `who_waits` | makespan and idle time of any table of work |
#
# A *run* is a tuple `(start, step, length)`: the global positions start, start + step, … In a layout all runs have the
# same step, and `runs[r]` is the list of rank r's runs in local order. `check` runs the visible checks in seconds.
#
# **Allowed:** ringlab's `merge`. **Not allowed:** ringlab's plan, blocks and rings, PyTorch's attention, and changing
# the arguments of a function.

# %%
import math

import numpy as np
import torch

from ringlab import VirtualCluster, contiguous, dealt, striped, zigzag
from ringlab_course import check, corpus, hint
from ringlab.merge import Partial, merge_into

# %% [markdown]
# Layouts to play with, as runs. Try `runs_of(zigzag(16, 4))`, or `dealt(S, P, chunk=…, folded=…)`. The last deals
# pieces of `chunk` tokens in turns, with `folded` every other turn backwards. A *token fold* has `chunk=1, folded=True`.

# %%
def runs_of(layout):
    """The runs of every rank, as tuples."""
    ranks = [layout.runs(rank) for rank in range(layout.P)]
    return [[(run.start, run.step, run.length) for run in runs] for runs in ranks]


runs_of(striped(16, 4))

# %% [markdown]
# ## 07.work · Who computes how much, and when
#
# A *pair* is a query and a key at or before it. Return an int64 array (P, P). Its entry `[rank, step]` is the number of
# pairs of the queries of `rank` and the keys that are there in this step of the ring, those of rank (rank − step) mod P.
#
# - Build no mask: memory may grow with the number of tokens, but not with the number of pairs. A million tokens have to be
#   counted, too. A loop over rows will do; a formula for each pair of runs is faster.
# - Layouts need not be dealt: runs differ in length, are shifted by any number of rows, and come in any order. A rank may
#   own no run at all.
# - Positions need not begin at 0: the tokens may be a part of a longer sequence.

# %% grade="07.work"
def work_per_step(runs):
    """Return the visible pairs of every rank in every step."""
    # BEGIN SOLUTION count the visible pairs of every rank in every step
    def triangle(n):
        return n * (n + 1) // 2 if n > 0 else 0

    def pairs(q, k):
        (q_start, q_step, n_q), (k_start, _, n_k) = q, k
        ahead = (q_start - k_start) // q_step  # row i sees keys j <= i + ahead

        def upto(row):
            return triangle(row) - triangle(row - n_k)  # 1 + 2 + … + row, but never more than n_k

        return upto(n_q + ahead) - upto(ahead)

    P = len(runs)
    table = np.zeros((P, P), dtype=np.int64)
    for rank, step in np.ndindex(P, P):
        table[rank, step] = sum(pairs(q, k) for q in runs[rank] for k in runs[(rank - step) % P])
    return table
    # END SOLUTION


# %%
check("07.work")

# %% [markdown]
# Stuck? `hint("07.work")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 07.relation · Skip, full, causal, shifted by one
#
# You get a run of queries and a run of keys with the same step. Return the list of *tiles* in which they meet: tuples
# `(q_start, q_stop, k_start, k_stop, causal)` of local indices within the runs.
#
# - In a tile with `causal=False` every row sees every key. A tile with `causal=True` is **square**, and its row i sees its
#   keys 0 to i.
# - Every visible pair is in exactly one tile, and no hidden pair is in any. If nothing is visible, the list is empty.
# - Starts differ by any amount, and lengths too: there are more cases than the four kinds of the lesson.
# - Every tile is a launch: return no empty tile, and no more than needed. That is exactly one if every row sees every key.
#   Otherwise it is at most three, and fewer where the visible pairs allow it.

# %% grade="07.relation"
def tiles_between(q_run, k_run):
    """Return the tiles (q_start, q_stop, k_start, k_stop, causal) of two runs."""
    # BEGIN SOLUTION list the tiles that cover the visible pairs of these two runs
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
# `q`, `k`, `v` are this rank's shards in float32, `runs` are the runs of all ranks. Return `(out, lse)` of this rank's queries
# over the keys at or before them, in float32. A rank that owns no tokens returns them with 0 rows.
#
# - `attend` is given; its only mask is `causal`. `merge_into(state, slice, partial)` merges into rows of a `Partial`.
#   Both, and all of `ringlab.merge`, may be used here.
# - Compute the tiles of your `tiles_between` and nothing else. The check tests this run by run: for each run of queries it
#   puts NaN into all keys of other ranks for which that run has no tile, and looks at the rows of that run. If you compute a
#   hidden score and give it weight 0, you get 0 · NaN = NaN.
#   You may attend to your own block by tiles. If this rank's positions ascend, one triangle will do, too.
# - Make exactly P − 1 exchanges with the next rank, even if a rank sees nothing of a block. Send K and V together, with as
#   many heads as they came with: there may be fewer K/V heads than query heads.
# - Shards differ in length: `ring.shift(k, v, length=n)` says that the arriving block has n tokens.
# - If values are wrong, the check first tests your `tiles_between`.

# %% grade="07.ring"
def attend(q, k, v, causal):
    """Given: the Partial of a tile. With `causal` it is square, and row i sees keys 0 to i."""
    if causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"a causal tile is square, not {q.shape[-2]} rows × {k.shape[-2]} keys")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    return Partial(torch.exp(scores - lse[..., None]) @ v, lse)


def ring_causal(ring, q, k, v, runs):
    """Return this rank's (out, lse) over the keys at or before each query."""
    # BEGIN SOLUTION attend to every block by tiles, and pass it on
    state = Partial.identity(q)
    for step in range(ring.world_size):
        here, row = runs[ring.origin(step)], 0
        for q_run in runs[ring.rank]:
            key = 0
            for k_run in here:
                for q0, q1, k0, k1, causal in tiles_between(q_run, k_run):
                    rows, keys = slice(row + q0, row + q1), slice(key + k0, key + k1)
                    part = attend(q[..., rows, :], k[..., keys, :], v[..., keys, :], causal)
                    merge_into(state, rows, part)
                key += k_run[2]
            row += q_run[2]
        if step < ring.world_size - 1:
            due = sum(length for _, _, length in runs[ring.origin(step + 1)])
            k, v = ring.shift(k, v, length=due)
    return state.out, state.lse
    # END SOLUTION


# %%
check("07.ring")

# %% [markdown]
# Stuck? `hint("07.ring")` in a new cell helps.

# %% [markdown]
# ## 07.makespan · Who waits
#
# This is the clock of exercise 06's 06.makespan, post before compute, with one time for all hops. The idle time is new.
# `seconds[rank, step]` is the time that a rank computes in a step, and a hop takes `hop` seconds. All ranks begin at 0.
# In every step but the last a rank posts its exchange, computes, and waits until the exchange is over. An exchange
# involves three ranks: the rank itself, the previous one, from which it receives, and the next one, to which it sends.
# It is over `hop` seconds after the last of the three has posted. Then this rank begins its next step.
#
# Return `(makespan, idle)`: the time at which the last rank is done, and an array (P,) with the seconds until then in which
# each rank does not compute.

# %% grade="07.makespan"
def who_waits(seconds, hop):
    """Return (makespan, idle)."""
    # BEGIN SOLUTION find out when the ranks are done, and how long each is idle
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
# When all stages hold, run `layouts_compared()` in a new cell. It deals 2,048 tokens to 8 ranks in four ways, asks your
# model for the makespan, and runs your ring on real text. Which layout would you choose? Lesson 08 starts from there.

# %%
def layouts_compared(S=2048, P=8):
    """Print each layout's makespan over that of an even split, and how busy rank 0 is."""
    qkv = corpus.qkv(S, heads=1, head_dim=16)
    for layout in (contiguous(S, P), striped(S, P), zigzag(S, P), dealt(S, P, chunk=32)):
        runs = runs_of(layout)
        work = work_per_step(runs)
        makespan, idle = who_waits(work.astype(float), 0.0)

        def program(ring, layout=layout, runs=runs):
            return ring_causal(ring, *layout.shard(qkv, ring.rank), runs)

        trace = VirtualCluster(P).run(program).trace
        busy, ideal = 1 - idle[0] / makespan, work.sum() / P
        rounds = {trace.rounds(rank) for rank in range(P)}
        print(f"{layout.name:16} {makespan / ideal:.3f} of ideal,", end=" ")
        print(f"rank 0 busy {busy:.0%}, rounds {rounds}")


# %% tags=["solution-only"]
layouts_compared()

# %% [markdown]
# There are hidden checks too: `ringlab grade exercises/07_causal_imbalance.ipynb` runs all of them, on inputs of its own.
