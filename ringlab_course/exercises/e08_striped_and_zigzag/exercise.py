# %% [markdown]
# # Exercise 08 · Striped and zig-zag
#
# **You build** the layouts as one family, the runs that a rank stores them in, and two meters, tiles and balance; then you
# share out packed documents, which no member of the family does well by itself.
# **You need** [lesson 08](../notebooks/08_striped_and_zigzag.ipynb). **Minutes** 75.
#
# | stage | function | what is looked at |
# |---|---|---|
# | 08.deal | `deal` | who owns which token: round-robin and folded, any length, ranks that get nothing |
# | 08.runs | `runs` | the fewest runs of one step, in order, no run with a hole |
# | 08.tiles | `tile_counts` | full, masked and skipped tiles of two shards, in any order, without an L × L mask |
# | 08.balance | `imbalance` | the busiest rank of every step, at any tile size |
# | 08.packed | `pack` | every token once, even tokens, even work in every step, two stretches of a document; long and short ones |
#
# All of it is NumPy. `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded.

# %%
import numpy as np

from ringlab import contiguous, dealt, striped, zigzag
from ringlab_course import check, hint

# %% [markdown]
# ## 08.deal · One family
#
# Cut tokens 0 … S − 1 into pieces of `chunk` tokens; the last one may be shorter. Deal the pieces to P ranks, a piece
# each turn. Without `folded` every turn runs 0, 1, …, P − 1. With it, every other turn runs backwards: 0, 1, …, P − 1,
# P − 1, …, 1, 0, 0, 1, …
#
# Return a list of P NumPy arrays, int64: the positions of each rank, ascending. Lengths need not divide; a rank may get
# nothing, and its array is empty then, of int64 as well.

# %% grade="08.deal"
def deal(S, P, chunk, folded=False):
    """Return the positions of every rank, a list of P arrays."""
    # BEGIN SOLUTION find the owner of every token, then the tokens of every owner
    period = 2 * P if folded else P
    turn = np.arange(S) // chunk % period
    owner = np.minimum(turn, period - 1 - turn) if folded else turn
    return [np.flatnonzero(owner == rank) for rank in range(P)]
    # END SOLUTION


# %%
check("08.deal")

# %% [markdown]
# Stuck? `hint("08.deal")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 08.runs · A few runs
#
# `positions` ascend. Return the **fewest** runs of the given `step` that hold them all, as a list of integers
# `(start, step, length)`, in order of their starts. So {0, 7, 8, 15} with step 8 is `[(0, 8, 2), (7, 8, 2)]`, and with
# step 1 it is `[(0, 1, 1), (7, 1, 2), (15, 1, 1)]`. No positions, no runs. A shard may have 131,072 positions: do not compare
# each with every other.

# %% grade="08.runs"
def runs(positions, step):
    """Return the fewest runs (start, step, length) that hold the positions."""
    # BEGIN SOLUTION find where a run begins, and follow it to its end
    owned = set(positions.tolist())
    found = []
    for start in sorted(p for p in owned if p - step not in owned):
        stop = start + step
        while stop in owned:
            stop += step
        found.append((start, step, (stop - start) // step))
    return found
    # END SOLUTION


# %%
check("08.runs")

# %% [markdown]
# Stuck? `hint("08.runs")` in a new cell helps.

# %% [markdown]
# ## 08.tiles · What a kernel computes
#
# `queries` and `keys` are the positions of two shards in local order, which **need not ascend**. A kernel cuts the
# queries into groups of `tile[0]` rows and the keys into groups of `tile[1]`, in local order; the last groups may be
# short. Return how many tiles are
#
# - **full**: every query sees every key of the tile;
# - **masked**: some pairs are visible, some are not;
# - **skipped**: nothing is visible.
#
# A query sees the keys at or before its own position. Never hold a mask of all queries times all keys: a shard may have
# 131,072 tokens, and a mask of 131,072² would take 17 GB.

# %% grade="08.tiles"
def tile_counts(queries, keys, tile):
    """Return the numbers of tiles (full, masked, skipped)."""
    # BEGIN SOLUTION compare the earliest and latest positions of the groups
    if len(queries) == 0 or len(keys) == 0:
        return 0, 0, 0
    rows, columns = np.arange(0, len(queries), tile[0]), np.arange(0, len(keys), tile[1])
    q_low, q_high = np.minimum.reduceat(queries, rows), np.maximum.reduceat(queries, rows)
    k_low, k_high = np.minimum.reduceat(keys, columns), np.maximum.reduceat(keys, columns)
    some = (q_high[:, None] >= k_low).sum()
    full = (q_low[:, None] >= k_high).sum()
    return int(full), int(some - full), int(len(rows) * len(columns) - some)
    # END SOLUTION


# %%
check("08.tiles")

# %% [markdown]
# Stuck? `hint("08.tiles")` in a new cell helps.

# %% [markdown]
# ## 08.balance · The busiest rank of every step
#
# `positions` holds one array per rank, in local order. In step t of the ring, rank r meets the keys of rank
# (r − t) mod P, and nobody begins step t + 1 before the slowest has finished. A kernel computes every tile that is not
# skipped, wholly: `tile[0] · tile[1]` score elements, also where the tile is masked or short.
#
# Return the sum over steps of the busiest rank's score elements, divided by the ideal, S (S + 1) / 2 / P.

# %% grade="08.balance"
def imbalance(positions, tile):
    """Return the sum over steps of the busiest rank's work, over the ideal."""
    # BEGIN SOLUTION the maximum over ranks in each step, summed
    P, S = len(positions), sum(len(mine) for mine in positions)
    waited = 0
    for step in range(P):
        tiles = [tile_counts(positions[r], positions[(r - step) % P], tile) for r in range(P)]
        waited += max(full + masked for full, masked, _ in tiles)
    return waited * tile[0] * tile[1] / (S * (S + 1) / 2 / P)
    # END SOLUTION


# %%
check("08.balance")

# %% [markdown]
# Stuck? `hint("08.balance")` in a new cell helps.

# %% [markdown]
# ## 08.packed · Several documents in one sequence
#
# `lengths` are those of the documents, packed one after the other into one sequence. A query sees the keys at or before
# its own position **in its own document**. Return a list of P arrays of positions in the packed sequence, int64, such that
#
# 1. every position is owned once;
# 2. no rank owns more than two stretches of neighbouring positions of one document;
# 3. no rank has more than 1.01 times the mean number of tokens;
# 4. the visible pairs of the busiest rank of each step of the ring, added up over the steps, are at most 1.01 times the
#    mean of all ranks.
#
# 1 and 2 hold always. 3 and 4 hold where 2P divides every length, and wherever there are at least 4,096 tokens a rank,
# **whatever the documents are**: two long ones, thousands of 20 tokens, long and short in turn, or shorter than 2P tokens.
# The lesson's `two_of_each` needs lengths that divide; here the remainders are yours to place.

# %% grade="08.packed"
def pack(lengths, P):
    """Return the positions of every rank, a list of P arrays."""
    # BEGIN SOLUTION share out every document by itself, and let the ranks take turns at beginning
    shares = [[np.zeros(0, np.int64)] for _ in range(P)]
    begins = np.cumsum([0, *lengths])
    for turn, document in enumerate(np.argsort(lengths, kind="stable")):
        begin, n = begins[document], lengths[document]
        cuts = [begin + i * n // (2 * P) for i in range(2 * P + 1)]
        for rank in range(P):
            for piece in (rank, 2 * P - 1 - rank):
                shares[(rank + turn) % P].append(np.arange(cuts[piece], cuts[piece + 1]))
    return [np.concatenate(parts) for parts in shares]
    # END SOLUTION


# %%
check("08.packed")

# %% [markdown]
# Stuck? `hint("08.packed")` in a new cell helps.

# %% [markdown]
# ## Your meter on the layouts of the lesson
#
# When 08.balance holds, run `league()` in a new cell: 32,768 tokens, 8 ranks, tiles of 128 × 128.

# %%
def league(S=32_768, P=8, tile=(128, 128)):
    """Print the imbalance of the four layouts of the lesson."""
    for layout in (contiguous(S, P), striped(S, P), zigzag(S, P), dealt(S, P, chunk=1, folded=True, name="token fold")):
        print(f"{layout.name:11} {imbalance([layout.positions(rank) for rank in range(P)], tile):.3f}")


# %% tags=["solution-only"]
league()

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/08_striped_and_zigzag.ipynb` runs the hidden ones, on inputs of its own.
