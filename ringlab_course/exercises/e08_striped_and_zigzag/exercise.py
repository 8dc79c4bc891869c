# %% [markdown]
# # Exercise 08 · Striped and zig-zag
#
# **You build** the layouts as one family, the runs in which a rank stores its tokens, and two meters, for tiles and for
# balance. Then you share out packed documents, which no member of the family does well.
# **You need** [lesson 08](../notebooks/08_striped_and_zigzag.ipynb). **Minutes** 75.
#
# | stage | function | what is checked |
# |---|---|---|
# | 08.deal | `deal` | the owner of each token: round-robin and folded, any length, ranks without a token |
# | 08.runs | `runs` | the fewest runs of one step, in order, none with a hole |
# | 08.tiles | `tile_counts` | full, masked and skipped tiles of two shards, in any order, without an L × L mask |
# | 08.balance | `imbalance` | the busiest rank of every step, at any tile size |
# | 08.packed | `pack` | each token once, even tokens, even work in every step, two stretches of each document |
#
# NumPy is all you need. ringlab's own layouts are imported for experiments; your functions must not call them. `check` runs
# the visible checks in seconds. Some checks stay hidden until you are graded.
#
# **Not allowed:** ringlab's functions that make layouts, such as `zigzag`, its plan, and changing the arguments of a
# function.

# %%
import numpy as np

from ringlab import contiguous, dealt, striped, zigzag
from ringlab_course import check, hint

# %% [markdown]
# ## 08.deal · One family
#
# Cut tokens 0 … S − 1 into pieces of `chunk` tokens; the last one may be shorter. Deal the pieces to P ranks in turns, one
# piece to each rank. Without `folded` every turn runs 0, 1, …, P − 1. With `folded` every other turn runs backwards:
# 0, 1, …, P − 1, P − 1, …, 1, 0, 0, 1, …
#
# Return a list of P NumPy arrays of integers: the positions of each rank, ascending. Any length is allowed. A rank that gets
# nothing has an empty array, also of integers.

# %% grade="08.deal"
def deal(S, P, chunk, folded=False):
    """Return the positions of every rank, a list of P arrays."""
    # BEGIN SOLUTION deal the tokens to the ranks
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
# `positions` ascend. Return the **fewest** runs of the given `step` that hold them all: a list of integers
# `(start, step, length)`, in order of their starts. For example, {0, 7, 8, 15} with step 8 is `[(0, 8, 2), (7, 8, 2)]`, and
# with step 1 it is `[(0, 1, 1), (7, 1, 2), (15, 1, 1)]`. Without positions the list is empty. A shard may have 131,072
# positions: do not compare each with every other.

# %% grade="08.runs"
def runs(positions, step):
    """Return the fewest runs (start, step, length) that hold the positions."""
    # BEGIN SOLUTION describe the positions by runs
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
# `queries` and `keys` are the positions of two shards in local order, and they **need not ascend**. A kernel cuts the
# queries into groups of `tile[0]` rows and the keys into groups of `tile[1]`, in local order. The last groups may be short.
# Return how many tiles are
#
# - **full**: every query sees every key of the tile;
# - **masked**: some pairs are visible, some are not;
# - **skipped**: nothing is visible.
#
# A query sees the keys at or before its own position. An empty shard has no tiles: 0, 0, 0. Never hold a mask of all queries
# times all keys: for two shards of 131,072 tokens it would take 17 GB. A table with an entry for each *tile* is fine: on long
# shards, tiles are 64 × 64.

# %% grade="08.tiles"
def tile_counts(queries, keys, tile):
    """Return the numbers of tiles (full, masked, skipped)."""
    # BEGIN SOLUTION count the tiles of each kind
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
# `positions` holds one array per rank, in local order. In step t of the ring, rank r meets the keys of rank (r − t) mod P. A
# kernel computes every tile that is not skipped, and always in full: `tile[0] · tile[1]` score elements, also where the tile
# is masked or short.
#
# Return the lesson's measure of cost: the score elements of the busiest rank of each step, added up over the steps, divided
# by the ideal, S (S + 1) / 2 / P, where S is the number of all positions. (A ring in which all ranks wait for the slowest in
# every step takes that long.)

# %% grade="08.balance"
def imbalance(positions, tile):
    """Return the sum over steps of the busiest rank's work, over the ideal."""
    # BEGIN SOLUTION compare the cost with the ideal
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
# Documents of these `lengths` are packed one after the other into one sequence. A query sees the keys at or before its own
# position **in its own document**. Return a list of P arrays of integers, positions in the packed sequence, such that
#
# 1. every position is owned once;
# 2. no rank owns more than two runs of consecutive positions of any document;
# 3. no rank has more than 1.01 times the mean number of tokens;
# 4. take the visible pairs of the busiest rank at each step of the ring: their sum over all steps is at most 1.01 times
#    the average work of a rank;
# 5. the same lengths always give the same answer, because every rank calls `pack` by itself.
#
# Conditions 1, 2 and 5 must hold always. Conditions 3 and 4 must hold where 2P divides every length, and also where there are
# at least 4,096 tokens a rank, **for any documents**: two long ones, thousands of 20 tokens, long and short ones by turns, or
# documents shorter than 2P tokens. The lesson's `two_of_each` works only for lengths that 2P divides. Here you decide which
# ranks get the tokens that are left over.

# %% grade="08.packed"
def pack(lengths, P):
    """Return the positions of every rank, a list of P arrays."""
    # BEGIN SOLUTION share out the documents, so that all five conditions hold
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
# When 08.balance holds, run `league()` in a new cell. It measures four layouts of 32,768 tokens on 8 ranks, with tiles of
# 128 × 128.

# %%
def league(S=32_768, P=8, tile=(128, 128)):
    """Print the imbalance of the four layouts of the lesson."""
    fold = dealt(S, P, chunk=1, folded=True, name="token fold")
    for layout in (contiguous(S, P), striped(S, P), zigzag(S, P), fold):
        positions = [layout.positions(rank) for rank in range(P)]
        print(f"{layout.name:11} {imbalance(positions, tile):.3f}")


# %% tags=["solution-only"]
league()

# %% [markdown]
# There are hidden checks too: `ringlab grade exercises/08_striped_and_zigzag.ipynb` runs all of them, on inputs of its own.
