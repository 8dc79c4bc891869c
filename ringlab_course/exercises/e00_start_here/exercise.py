# %% [markdown]
# # Exercise 00 · Run, check, submit
#
# **Minutes** 15. Comes after [lesson 00](../notebooks/00_start_here.ipynb).
#
# Three small functions. The first shows that your machine and the grader run the same software, the second that
# you read the axes as the course writes them, and the third is your first program for a ring.
#
# Fill in a function, run its cell, then run the `check` below it. It may fail as often as you like. When you are
# stuck, put `hint("00.axes")` into a new cell: up to three hints, each one plainer than the last.

# %%
import sys

import torch

from ringlab_course import check

# %% [markdown]
# ## 1. What runs here?
#
# Return a dict with two entries: `python`, the version of the running Python as the pair (major, minor), and
# `torch`, the version of torch as a text. Ask for both; do not copy them down.


# %% grade="00.environment"
def environment():
    """Return {"python": (major, minor), "torch": version} of the software that runs this."""
    # BEGIN SOLUTION return a dict with the versions of Python and torch
    return {"python": tuple(sys.version_info[:2]), "torch": torch.__version__}
    # END SOLUTION


# %%
check("00.environment")

# %% [markdown]
# ## 2. Heads before tokens
#
# A layer has computed the queries of all heads at once, side by side: `x` is a NumPy array (B, S, H·D), in which
# head h owns the features from h·D to (h+1)·D. The course wants (B, H, S, D).
#
# The shape alone proves nothing here: there is a famous wrong way which gives the right one.


# %% grade="00.axes"
def split_heads(x, heads):
    """Return x, (B, S, H·D), as (B, H, S, D), where H = heads."""
    # BEGIN SOLUTION cut the last axis into heads and move that axis before the tokens
    B, S, width = x.shape
    return x.reshape(B, S, heads, width // heads).transpose(0, 2, 1, 3)
    # END SOLUTION


# %%
check("00.axes")

# %% [markdown]
# ## 3. A sum around the ring
#
# Every rank holds one tensor `x`. In the end every rank shall hold the sum of all of them. You have
# `ring.world_size`, the number of ranks, and `ring.shift(t)`, which sends `t` to the next rank and returns
# what the previous one sent. Use P − 1 shifts, not one more, and let it work for a single rank, too.


# %% grade="00.ring"
def ring_sum(ring, x):
    """Return the sum of x over all ranks, on every rank, after world_size - 1 shifts."""
    # BEGIN SOLUTION send on what arrives, and add it up
    total = travelling = x
    for _ in range(ring.world_size - 1):
        travelling = ring.shift(travelling)
        total = total + travelling
    return total
    # END SOLUTION


# %%
check("00.ring")

# %% [markdown]
# ## Submit
#
# Save the notebook. Then, in a terminal in the folder of the course:
#
# ```
# ringlab grade exercises/00_start_here.ipynb
# ```
#
# It says which checks hold, the hidden ones included, and how many points that makes.
# Next: [lesson 01](../notebooks/01_naive_attention.ipynb).

# %% [markdown] tags=["solution-only"]
# ## About this solution
#
# All checks hold, 10 of 10 points. `split_heads` is one reshape and one transpose, and neither of them copies: NumPy only
# changes how it walks through the same memory. `ring_sum` sends (P − 1) times the size of `x` from each rank. With
# large tensors one would cut `x` into P pieces and send less; for this purpose every library has `all_reduce`.
