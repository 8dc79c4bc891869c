# %% [markdown]
# # Exercise 00 · Run, check, submit
#
# **Minutes** 15. Comes after [lesson 00](../notebooks/00_start_here.ipynb).
#
# You write three small functions. The first shows that your machine and the grader run the same software. The second shows
# that you read the axes as the course writes them. The third is your first program for a ring.
#
# Write a function, run its cell, then run the `check` below it. It may fail as often as you like. When you are
# stuck, put `hint("00.axes")` into a new cell. There are up to three hints, and each one says more than the one before.
# If a cell does not end, choose Kernel, Interrupt Kernel in the menu: your loop probably waits for something that
# never becomes true.
#
# **Not allowed:** modifying the arrays and tensors that your functions are given. All of Python, NumPy and torch is
# yours to use.

# %%
import sys

import torch

from ringlab_course import check, hint

# %% [markdown]
# ## 1. What runs here?
#
# Return a dict with two entries: `python` is the version of the running Python as the pair (major, minor), and
# `torch` is the version of torch as a string, with or without a suffix such as +cpu. Let the program find out both.
# torch's own version object is a kind of string, so you may return it as it is.


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
# A result of the right shape can still be wrong here, and one wrong way is famous.


# %% grade="00.axes"
def split_heads(x, heads):
    """Return x, (B, S, H·D), as (B, H, S, D), where H = heads."""
    # BEGIN SOLUTION the same numbers as (B, H, S, D)
    B, S, width = x.shape
    return x.reshape(B, S, heads, width // heads).transpose(0, 2, 1, 3)
    # END SOLUTION


# %%
check("00.axes")

# %% [markdown]
# ## 3. A sum around the ring
#
# Every rank has one tensor `x`. In the end every rank must have the sum of all these tensors. You have
# `ring.world_size`, the number of ranks, and `ring.shift(t)`, which sends `t` to the next rank and returns
# what the previous rank sent. Use exactly P − 1 shifts. The function must also work for a single rank. Add in any order:
# the sums of two ranks may differ by rounding.


# %% grade="00.ring"
def ring_sum(ring, x):
    """Return the sum of x over all ranks, on every rank, after world_size - 1 shifts."""
    # BEGIN SOLUTION the sum of x over all ranks
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
# It lists which checks passed, including the hidden ones, and the points that you earned.
# Next: [lesson 01](../notebooks/01_naive_attention.ipynb).

# %% [markdown] tags=["solution-only"]
# ## About this solution
#
# All checks pass: 10 of 10 points. `split_heads` is one reshape and one transpose. Neither of them copies; NumPy only
# steps through the same memory in another order. In `ring_sum`, each rank sends (P − 1) times the size of `x`. For
# large tensors you would cut `x` into P pieces and send less. Every library has `all_reduce` for this purpose.
