# %% [markdown]
# # Exercise 16 · Bug clinic
#
# **You write** a chart for each of eight patients from what you measure. A patient is a ring attention with one fault.
# Then you read its source and mend it.
# **You need** [lesson 16](../notebooks/16_bug_clinic.ipynb). **Minutes** 120.
#
# | stage | function | what the checks look at |
# |---|---|---|
# | 16.chart | `chart` | an ill case, that it is the smallest, what matters, a check that finds it, and the fault |
# | 16.ash … 16.oak | `ash`, `birch`, `cedar`, `elm`, `fir`, `hazel`, `larch`, `oak` | values, bytes, and that it is a small change |
#
# The checks **try what a chart says on the patient**. Only the name of the fault is compared with the right one, and only
# when you are graded. Half of the points are for charts, half for mends. A mend counts if two things hold:
#
# - the chart of its patient holds;
# - it is **the patient's own program**: at most 6 of its lines, and at most half of them, are gone, and at most 6 are new.
#   Comments, docstrings and line breaks do not count. It uses nothing that the patient and its helpers do not know.
#
# `check` runs the visible checks here.
#
# **Not allowed:** ringlab's own rings, blocks and merge, PyTorch's attention, and changing the arguments of a function.

# %%
import math

import torch

from ringlab_course import check, hint
from ringlab_course.clinic.bedside import (
    attend,
    block_backward,
    nothing_seen,
    receive,
    scores_of,
    sees,
    send,
)
from ringlab_course.clinic.patients import FAULTS
from ringlab_course.clinic.suite import CHECKS
from ringlab_course.notebook.visit import commit, examine, open_helpers, open_source, report, ward

torch.set_num_threads(1)

# %% [markdown]
# ## The ward
#
# A forward is called as `(ring, q, k, v, positions, causal)` and returns `(out, lse)` of the rank's rows. A backward is
# called as `(ring, dout, q, k, v, out, lse, positions, causal)` and returns `(dq, dk, dv)`. `positions[r]` are the global
# positions of rank r's tokens.

# %%
ward()

# %% [markdown]
# ## Instruments
#
# - `examine` runs a patient on `ranks` ranks with `tokens` tokens each. `layout` may be `"contiguous"`, `"striped"` or
#   `"zigzag"`, `causal` True or False, `dtype` `"float32"` or `"bfloat16"`. The first of each is the default.
# - `examine(…).well` is True or False: you may let a loop look for the smallest case. It is False if the ranks do not end, if
#   a result is wrong, or if a rank sends more bytes than are needed.
# - `print(examine(…).journal)` lists what every rank sent, in order, and to whom.
# - `report("ash")` runs the conformance suite, and `report("ash", "masks")` one check of it.

# %%
print(examine("ash", ranks=2, tokens=4))
print("\nfaults:", *(f"  {name}: {text}" for name, text in FAULTS.items()), sep="\n")
print("\nchecks:", *CHECKS, sep="\n  ")

# %% [markdown]
# ## 16.chart · A chart for each patient
#
# For the patient of that name, return a dict with
#
# - `case`: a dict of `examine`'s arguments on which it is **ill**. It must be the **smallest**: with the same layout, mask
#   and dtype, every case of fewer ranks and no more tokens, or of fewer tokens and no more ranks, is well;
# - `matters`: a list of those of `"layout"`, `"causal"` and `"dtype"` that matter. One matters if another value of it
#   alone, with the same ranks and tokens, makes the patient well. `[]` if none matters;
# - `check`: a check of `CHECKS` that finds it (sound rings pass them all);
# - `fault`: its name in `FAULTS`;
# - `found`, later, and only if the source surprises you: the name of what you found there. `fault` stays what it was.
#
# In the lesson, yew's chart was
# `{"fault": "deadlock", "check": "forward", "case": {"ranks": 2, "tokens": 1}, "matters": []}`. Write the charts one by
# one, and return `None` for the others.


# %% grade="16.chart"
def chart(patient):
    """Return the chart of the patient of this name."""

    # BEGIN SOLUTION examine, shrink, change one thing at a time, then name it
    def found(fault, check, case, *matters):
        return {"fault": fault, "check": check, "case": case, "matters": list(matters)}

    striped, single = {"ranks": 2, "tokens": 2, "layout": "striped"}, {"ranks": 2, "tokens": 1}
    charts = {
        "ash": found("blind rows", "blind rows", striped, "layout", "causal"),
        "birch": found("lost sum", "forward", {"ranks": 3, "tokens": 1}),
        "cedar": found("masks by rank", "masks", striped, "layout", "causal"),
        "elm": found("one hop too many", "bytes", single),
        "fir": found("keys as values", "forward", {**single, "causal": False}, "causal"),
        "hazel": found("couriers backwards", "dk", {"ranks": 3, "tokens": 1}),
        "larch": found("shared memory", "dq", single, "dtype"),
        "oak": found("first block", "dq", single),
    }
    return charts[patient]
    # END SOLUTION


# %%
check("16.chart")

# %% [markdown]
# Stuck? `hint("16.chart")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## Sources
#
# In a cell of your own, first call `commit("ash", chart("ash"))`. It tries all that the chart says except the fault's name,
# and keeps the chart. Then `open_source("ash")` shows the program, and from then on `commit` refuses another chart. If you
# see another fault than the one you named, leave `fault` as it is and add `"found"`: you lose the points of the diagnosis,
# not those of the mend. Such cells may stay in the notebook.
#
# **This is an honour system.** The grader has only your notebook, and cannot know whether you wrote `fault` before or
# after you read the source. Nobody learns to diagnose from a fault that is already in plain sight.
#
# Copy the source into its cell below and **mend what is wrong, no more**: it stays the same ring, with the same messages.
# `open_helpers()` shows what all patients share; nothing is wrong there.

# %% tags=["solution-only"]
commit("ash", chart("ash"))
open_source("ash")

# %% tags=["solution-only"]
open_helpers("attend", "block_backward")

# %% [markdown]
# ## 16.ash
#
# This patient and all others must be right for shards of any length, also empty ones, any layout and dtype, and scores of
# any size.


# %% grade="16.ash"
def ash(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse)."""
    # BEGIN SOLUTION open the source, copy it here, mend it
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        if visible.any():
            scores = scores_of(q, k, visible)
            top = scores.amax(-1, keepdim=True)
            top = top.masked_fill(top == -math.inf, 0.0)  # rows that see no key here: e^(−∞) is 0
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True)
            block_lse = (top + total.log())[..., 0]
            merged = torch.logaddexp(lse, block_lse)
            safe = merged.masked_fill(merged == -math.inf, 0.0)
            old, new = torch.exp(lse - safe)[..., None], torch.exp(block_lse - safe)[..., None]
            block_out = weights @ v.to(out.dtype) / total.masked_fill(total == 0, 1.0)
            out, lse = out * old + block_out * new, merged
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse
    # END SOLUTION


# %%
check("16.ash")

# %% [markdown]
# Stuck? `hint("16.ash")` in a new cell helps.

# %% [markdown]
# ## 16.birch


# %% grade="16.birch"
def birch(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse)."""
    # BEGIN SOLUTION open the source, copy it here, mend it
    out, top = nothing_seen(q)
    total = torch.zeros_like(top)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        if k.shape[-2]:
            scores = scores_of(q, k, sees(positions, ring.rank, ring.origin(step), causal))
            new_top = torch.maximum(top, scores.amax(-1))
            safe = new_top.masked_fill(new_top == -math.inf, 0.0)
            kept, weights = total * torch.exp(top - safe), torch.exp(scores - safe[..., None])
            total = kept + weights.sum(-1)
            out = out * kept[..., None] + weights @ v.to(out.dtype)
            out = out / total.masked_fill(total == 0, 1.0)[..., None]
            top = new_top
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), top + total.log()
    # END SOLUTION


# %%
check("16.birch")

# %% [markdown]
# Stuck? `hint("16.birch")` in a new cell helps.

# %% [markdown]
# ## 16.cedar


# %% grade="16.cedar"
def cedar(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse)."""
    # BEGIN SOLUTION open the source, copy it here, mend it
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        if visible.any():
            out, lse = attend(q, k, v, visible, out, lse)
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse
    # END SOLUTION


# %%
check("16.cedar")

# %% [markdown]
# Stuck? `hint("16.cedar")` in a new cell helps.

# %% [markdown]
# ## 16.elm


# %% grade="16.elm"
def elm(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse)."""
    # BEGIN SOLUTION open the source, copy it here, mend it
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v, length=len(positions[ring.origin(step + 1)]))
    return out.to(q.dtype), lse
    # END SOLUTION


# %%
check("16.elm")

# %% [markdown]
# Stuck? `hint("16.elm")` in a new cell helps.

# %% [markdown]
# ## 16.fir


# %% grade="16.fir"
def fir(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse)."""
    # BEGIN SOLUTION open the source, copy it here, mend it
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if step == ring.world_size - 1:
            break
        length = len(positions[ring.origin(step + 1)])
        if ring.rank % 2 == 0:
            send(ring, k)
            send(ring, v)
            k, v = receive(ring, k, length), receive(ring, v, length)
        else:
            next_k, next_v = receive(ring, k, length), receive(ring, v, length)
            send(ring, k)
            send(ring, v)
            k, v = next_k, next_v
    return out.to(q.dtype), lse
    # END SOLUTION


# %%
check("16.fir")

# %% [markdown]
# Stuck? `hint("16.fir")` in a new cell helps.

# %% [markdown]
# ## 16.hazel


# %% grade="16.hazel"
def hazel(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv)."""
    # BEGIN SOLUTION open the source, copy it here, mend it
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        length = len(positions[ring.origin(step + 1)])
        if P > 1:
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
        if step < P - 1:
            k, v = ring.shift(k, v, length=length, tag="kv")
    return dq, dk, dv
    # END SOLUTION


# %%
check("16.hazel")

# %% [markdown]
# Stuck? `hint("16.hazel")` in a new cell helps.

# %% [markdown]
# ## 16.larch


# %% grade="16.larch"
def larch(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv)."""
    # BEGIN SOLUTION open the source, copy it here, mend it
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    scratch = torch.empty_like(q)
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        scratch.copy_(part[0])
        dq += scratch.to(lse.dtype)
        dk, dv = dk + part[1], dv + part[2]
        length = len(positions[ring.origin(step + 1)])
        if P > 1:
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
        if step < P - 1:
            k, v = ring.shift(k, v, length=length, tag="kv")
    return dq, dk, dv
    # END SOLUTION


# %%
check("16.larch")

# %% [markdown]
# Stuck? `hint("16.larch")` in a new cell helps.

# %% [markdown]
# ## 16.oak


# %% grade="16.oak"
def oak(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Return this rank's (dq, dk, dv)."""
    # BEGIN SOLUTION open the source, copy it here, mend it
    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for step in range(P):
        length = len(positions[ring.origin(step + 1)])
        work = ring.post(k, v, length=length, tag="kv") if step < P - 1 else None
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        if P > 1:
            dk, dv = ring.shift(dk, dv, length=length, tag="dkv")
        if work is not None:
            k, v = work.wait()
    return dq, dk, dv
    # END SOLUTION


# %%
check("16.oak")

# %% [markdown]
# Stuck? `hint("16.oak")` in a new cell helps.

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/16_bug_clinic.ipynb` also runs the hidden ones, on its
# own inputs.
