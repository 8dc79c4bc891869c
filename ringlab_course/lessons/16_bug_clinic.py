# %% [markdown]
# # 16 · Bug clinic
#
# **Afterwards you can** find out what is wrong with a ring attention from traces, errors and meters, before you read a line of it; and say which check
# would have caught it.
#
# **You need first** [lesson 09](09_backward_ring.ipynb), the backward ring; [lesson 10](10_numerics.ipynb), error curves; from [lesson
# 07](07_causal_imbalance.ipynb) and [lesson 08](08_striped_and_zigzag.ipynb) the masks and layouts.
#
# **Minutes** 90 to read and run; the exercise takes another 120.
#
# "I read the code twice, and it looks right." So it did to its authors, to those who reviewed it, and to everybody who installed it: most of what ails
# the patients of this clinic was found in published packages, frameworks and write-ups, the rest is a line away from it, and the tests were green.
# Reading is the last thing that we do here. First comes the complaint, then the examination, then a chart. Only then we open the patient.

# %%
from functools import partial

import torch

from ringlab import contiguous
from ringlab_course import compare, predict
from ringlab_course.clinic import suite
from ringlab_course.clinic.bedside import block_backward, sees
from ringlab_course.clinic.patients import BACKWARD, FAULTS, PATIENTS, SOUND
from ringlab_course.notebook.visit import commit, examine, open_helpers, open_source, report, ward
from ringlab_course.figures import courier_view
from ringlab_course.figures import kill_matrix
from ringlab.viz.style import new_figure, show, styled

torch.set_num_threads(1)

# %% [markdown]
# ## 1 · Three complaints
#
# Each patient is a ring program with **one** fault. Some are forwards, which return out and lse; some are backwards, which return dq, dk and dv. The
# eight of the exercise have other complaints. These three we examine together:

# %%
ward("yew", "willow", "rowan")

# %% [markdown]
# Here is what *may* be wrong, in this ward or elsewhere. Keep the list at hand. A diagnosis is a line of it that explains **all** that you have seen,
# and would cause nothing that you have not.

# %%
for name, text in FAULTS.items():
    print(f"{name:22} {text}")

# %% [markdown]
# ## 2 · The instruments
#
# `examine` runs a patient on virtual ranks, with so many tokens on each, and reads four things at once: whether the ranks **end**; the **error** of every
# result against the float64 oracle, on which rank's rows and at which tokens; the **messages**; and their **bytes**, beside what is needed. Errors within their
# derived bound (lesson 10) are shown as "rounding". On yew, on one rank and on two:

# %%
print(examine("yew", ranks=1, tokens=4))
print(examine("yew", ranks=2, tokens=4))

# %% [markdown]
# The complaint is confirmed, and the wait is drawn: every rank *sends*, and none has got as far as to receive. Is it the size? Some transports buffer
# small messages, and then a program hangs from some size on. **Shrink** before you think: fewer tokens, another mask, another dtype.

# %%
for change in ({}, {"causal": False}, {"dtype": "bfloat16"}, {"layout": "striped"}):
    stopped = examine("yew", ranks=2, tokens=1, **change).stopped
    circle = [line.strip() for line in stopped.splitlines() if "cycle" in line]
    print(f"2 ranks, 1 token each, {change or 'as usual'}:", circle[0] if circle else "ends")

# %% [markdown]
# Two ranks, one token each, and nothing matters but that there are two. That is a whole chart. Write it down so that a machine can try it:

# %%
yew = {"fault": "deadlock", "check": "forward", "case": {"ranks": 2, "tokens": 1}, "matters": []}
commit("yew", yew)
open_source("yew")

# %% [markdown]
# A machine has tried all that the chart says, but for the name, and kept it; only then it shows the source, and from then on the chart is final. What
# the patients share is sound, and open to all; for instance

# %%
open_helpers("send", "receive")

# %% [markdown]
# `send` here returns when the other side has received, as gloo's does. Everybody sends first, so nobody receives. Lesson 11 has the cures: post both
# ends at once, or let every second rank receive first.
#
# ## 3 · Willow: digits
#
# "Everything passes at 1e-2." Then look at *how* wrong, not whether.

# %%
print(examine("willow", ranks=1, tokens=4))
print(examine("willow", ranks=4, tokens=4))

# %% [markdown]
# dq alone, and on one rank already. So it is nothing that travels, and nothing that is merged. Two questions are left: does the error grow with the
# number of ranks, and does it depend on the dtype of the inputs?

# %% tags=["nbval-ignore-output"]
predict(
    "16.level",
    "willow's dq error in float32, on 1, 2, 4 and 8 ranks?",
    choices=["grows with every rank", "stays where it is", "falls"],
)

# %%
RANKS = (1, 2, 4, 8)
curves = {
    (name, dtype): [examine(name, ranks=P, tokens=32 // P, dtype=dtype).errors["dq"] for P in RANKS]
    for name in ("willow", "oak")
    for dtype in ("float32", "bfloat16")
}
flat = max(e.error for e in curves["willow", "float32"]) / min(e.error for e in curves["willow", "float32"])
print(f"willow, float32: largest over smallest error: {flat:.1f}; one rounding to bfloat16: {2**-9:.1e}")
compare("16.level", "stays where it is" if flat < 4 else "grows with every rank")

# %%
with styled():
    figure = new_figure((6.4, 3.2))
    axes = figure.subplots()
    for (name, dtype), marker in zip(curves, "osD^", strict=True):
        line, errors = ("-" if dtype == "float32" else "--"), [e.error for e in curves[name, dtype]]
        axes.plot(RANKS, [max(e, 1e-8) for e in errors], line, marker=marker, label=f"{name}, {dtype}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="ranks P", ylabel="relative error of dQ", xticks=RANKS, ylim=(1e-8, 10))
    axes.set_xticklabels(RANKS)
    axes.set_title("A level, and a cliff")
    axes.legend(loc="lower right", fontsize=8.5)
show(
    figure,
    "Relative error of dQ against 1, 2, 4 and 8 ranks. Willow stays near one thousandth in float32 and in bfloat16 alike. Oak, a patient of "
    "the exercise, is at rounding on one rank and near one from two ranks on, in both dtypes.",
)

# %% [markdown]
# Two kinds of curve, and it pays to know both. A **level** of some 10⁻³, whatever P is, whatever the dtype: something is rounded to 8 bits, once. In
# bfloat16 that is what everybody has, oak on one rank too, and so the patient is *well* there. A **cliff** between one rank and two: a fault of the algorithm, which needs a second
# block to show. (Of a third kind, errors that *climb* with P, lesson 10 was full: a sum that is rounded at every stop.)

# %%
print(examine("willow", ranks=1, tokens=2, dtype="bfloat16"))
willow = {"fault": "bf16 result", "check": "dq", "case": {"ranks": 1, "tokens": 2}, "matters": ["dtype"]}
commit("willow", willow)
open_source("willow")

# %% [markdown]
# The last line. On a GPU whose kernels write bfloat16 nobody notices; whoever trains in float32, or debugs in it, has lost 16 bits of dQ.
#
# ## 4 · Rowan: follow what travels

# %%
for P in (1, 2, 3):
    print(examine("rowan", ranks=P, tokens=2))

# %% [markdown]
# dq and dk are right, dv is wrong, from two ranks on: a cliff. dk and dv travel together, so neither direction nor the number of hops can be it: both would
# ruin dk too. What was sent, and to whom, stands in the `journal` of an examination:

# %%
print(examine("rowan", ranks=3, tokens=2).journal)

# %% [markdown]
# K and V make two hops, their gradients three, all of them to the next rank, and the bytes are right to the byte. So the messages are sent; are they
# *used*? Lesson 09 had an instrument for this: probes by which each courier says who has added what of whose block.

# %% tags=["nbval-ignore-output"]
predict(
    "16.stays",
    "Every rank's dv sum: in the end, whose terms will be in it?",
    choices=["all ranks', of one block", "one rank's, of all blocks", "nobody's"],
)

# %%
layout = contiguous(6, 3)
positions = [torch.from_numpy(layout.positions(rank)) for rank in range(3)]
programs = {"sound": SOUND[BACKWARD].program, "rowan": PATIENTS["rowan"].program}
journeys = {
    name: courier_view.follow(partial(program, positions=positions, causal=False), layout)
    for name, program in programs.items()
}
last = journeys["rowan"][-1].sums[0]
of_one_rank = int((last.sum(axis=1) > 0).sum()) == 1
compare("16.stays", "one rank's, of all blocks" if of_one_rank else "all ranks', of one block")

# %%
title = "Rowan: every sum holds one rank's terms, of all blocks"
show(courier_view.figure(journeys["rowan"], title), courier_view.describe(journeys["rowan"]))

# %% [markdown]
# In lesson 09 a box filled with *all colours and one number*. Here each box has one colour and all numbers: the sum never leaves its rank. (Dashed, as
# there: terms of several blocks in one sum.) The arrows show what was *sent*. Each rank sends its own sum, and goes on with its own.

# %%
rowan = {"fault": "sent for received", "check": "dv", "case": {"ranks": 2, "tokens": 1}, "matters": []}
commit("rowan", rowan)
open_source("rowan")

# %% [markdown]
# `passed` returns what arrived *and* what was sent, and the caller has taken the wrong one of them for dv. A published package's CPU backward goes
# further: it takes the whole pair, (received, sent), for the pair (dK, dV). Its own test allowed an absolute error of 1e-2. Mend a patient by the
# **smallest** change, here one line, and follow it again:


# %%
def mended(ring, dout, q, k, v, out, lse, positions, causal=True):
    """Rowan, with both sums taken from what arrived."""

    def passed(*tensors, length, tag):
        """Return what arrived, and behind it what was sent."""
        return *ring.post(*tensors, length=length, tag=tag).wait(), *tensors

    P, delta = ring.world_size, (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for step in range(P):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        part = block_backward(dout, q, k, v, lse, delta, visible)
        dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
        length = len(positions[ring.origin(step + 1)])
        if P > 1:
            dk, dv, _, _ = passed(dk, dv, length=length, tag="dkv")
        if step < P - 1:
            k, v, _, _ = passed(k, v, length=length, tag="kv")
    return dq, dk, dv


again = courier_view.follow(partial(mended, positions=positions, causal=False), layout)
home = [sorted({int(owner) for owner in s.nonzero()[1]}) for s in again[-1].sums]
print("blocks in the dv that each rank returns:", home)

# %% [markdown]
# ## 5 · A chart is an experiment
#
# Look at what the three charts have in common.
#
# - **The smallest case.** With the same layout, mask and dtype, every smaller one is *well*. Small cases can be followed by hand; and where the line between ill
#   and well runs is most of the diagnosis. Well on two ranks, ill on three? Something is the same on two ranks that is not on three.
# - **What matters.** From there change *one* thing: layout, mask, dtype. Does the patient get well? Then the fault touches that thing. Everything else it
#   does not touch, and half of the list above is out.
# - **A check.** Not every check sees every fault. If none does, your next patient is in production already.


# %%
def matters(name, case):
    """What of the case, changed alone, makes the patient well."""
    others = {
        "layout": ("contiguous", "striped", "zigzag"),
        "causal": (True, False),
        "dtype": ("float32", "bfloat16"),
    }
    return [
        what
        for what, values in others.items()
        if any(examine(name, **{**case, what: value}).well for value in values)
    ]


for name, chart in (("yew", yew), ("willow", willow), ("rowan", rowan)):
    print(f"{name:7} {chart['case']}  matters: {matters(name, chart['case'])}")

# %% [markdown]
# ## 6 · The usual test
#
# This is how a ring attention is tested where nobody has been ill yet: two ranks, contiguous shards, no mask, `allclose` with 1e-2.

# %% tags=["nbval-ignore-output"]
predict("16.usual", "Of all 11 patients, how many pass that test?", unit="patients")


# %%
def usual(name):
    """Whether a patient passes the usual test."""
    found = examine(name, ranks=2, tokens=4, causal=False)
    return not found.stopped and all(each.error < 1e-2 for each in found.errors.values())


passes = [name for name in PATIENTS if usual(name)]
print("pass:", ", ".join(passes))
compare("16.usual", len(passes))

# %% [markdown]
# A mask, another layout, a third rank, three digits more, a look at the bytes: each of these is missing in that test, and for each there is a patient who
# walks through the gap.
#
# ## 7 · The kill matrix
#
# Now the conformance suite: every patient against each of its checks, in the suite's quick tier. First guess:

# %% tags=["nbval-ignore-output"]
predict(
    "16.elm",
    "elm: all values are right, and more is sent than was said. How many of the checks find it?",
    unit="checks",
)

# %% tags=["nbval-ignore-output"]
predict("16.two", "What is the smallest number of checks that together find every patient?", unit="checks")

# %%
matrix = suite.kill_matrix(PATIENTS.values())
print(len(matrix.patients), "patients,", len(matrix.checks), "checks")
compare("16.elm", len(matrix.found_by("elm")))

# %% [markdown]
# Some of the checks' names: *blind rows* are queries that see no key of a block; *ragged* means lengths that do not divide; *large logits* are scores of some
# hundreds, *sloped* ones rise or fall from block to block; *error growth* puts the errors on many ranks beside those on one.
#
# Move through it with the arrow keys: one slider for the patient, one for the check. Below the table stands what that check asked and what it saw.

# %% tags=["nbval-ignore-output"]
kill_matrix.play(matrix)

# %%
show(kill_matrix.figure(matrix), kill_matrix.describe(matrix))


# %%
def covers(checks):
    """Whether these checks together find every patient."""
    return all(set(checks) & set(matrix.found_by(name)) for name in matrix.patients)


pairs = [(a, b) for a in matrix.checks for b in matrix.checks if a < b and covers((a, b))]
print("one is enough:", [a for a in matrix.checks if covers((a,))], " pairs that are enough:", pairs)
compare("16.two", 1 if any(covers((a,)) for a in matrix.checks) else 2 if pairs else 3)

# %% [markdown]
# Read it in both directions.
#
# **By columns** it says what a check is worth. Masks by position in several layouts find every patient but one, and so do lengths that do not divide. Both
# look at all values in a hard case; and both are blind to the same patient. No test of values will ever do alone: *somebody has to count*.
#
# **By rows** it is a differential diagnosis, and an incomplete one. Some patients have the very same row:

# %%
rows = {}
for name in matrix.patients:
    rows.setdefault(tuple(matrix.found_by(name)), []).append(name)
for found, names in rows.items():
    if len(names) > 1:
        print(" and ".join(names), "fall to the same checks:", ", ".join(found))

# %% [markdown]
# What tells such patients apart is not *which* checks fail but *what they saw*: NaN or wrong numbers, on all ranks or on every second one. A filled
# cell is no diagnosis. So read the evidence. In brackets stands the first run that went wrong, a good one to begin shrinking from:

# %%
rowans = report("rowan", "dq", "dk", "dv", "bytes")

# %% [markdown]
# ## 8 · In which order to ask
#
# | ask | if so, think of |
# |---|---|
# | Does it end? | who waits for whom; draw the circle |
# | Is it well on **one** rank? If not | the block itself, or what is done to the result: scale, rounding |
# | Well on **two**, ill on three? | a direction, a neighbour that is both next and previous |
# | NaN? | −∞ − (−∞), 0/0, overflow: which rows, and what do they see? |
# | **Which** results? | lse right and out wrong: the merge. dq right and dk, dv wrong: couriers. dq alone: what stays at home |
# | On **which ranks**? | all, every second one, the last: who does something else there? |
# | Does the **layout** matter? | positions, masks |
# | Does the **dtype** matter? | rounding; conversions; memory that is shared, or is not |
# | **How** wrong? | 10⁻³: one rounding to bfloat16. A simple ratio, as P or 2: a factor. About 1: another number altogether |
# | All values right? | count: messages, bytes, memory, work |
#
# Each answer halves the list. Seven or eight lines on paper are quicker than reading a thousand twice.
#
# ## Recap
#
# - First the complaint, then measurements, then a name, then the source. Who reads first, sees what the author meant.
# - A fault is where ill turns to well: shrink the case, then change one thing at a time.
# - Levels are rounding, cliffs are algorithms, slopes are sums that are rounded again and again.
# - What travels can be followed: let it carry who added what.
# - No single check finds everything. Masks in several layouts find most; somebody has to count bytes as well.
# - A failing check is a symptom. What the check saw, not that it failed, leads to a cause.
#
# ## Self-check
#
# 1. dk and dv are half of what they should be on two ranks and a quarter on four, dq is right. What is it? *(A mean over ranks: a ratio of P.)*
# 2. D is 4. On one rank already dq and dk are half of what they should be, and dv is right. What is it? *(Scaled twice: 1/√D is one half, and dv does not meet
#    the scale.)*
# 3. dq is right. The dk and dv that each rank returns are, to the last digit, those of the block of a neighbour. What is missing? *(The last hop, which brings
#    them home.)*
# 4. Why is the smallest ill case worth more than a large one that is just as ill? *(Everything smaller is well: it shows the line, and can be followed by hand.)*
#
# Now the ward is yours: [exercise 16](../exercises/16_bug_clinic.ipynb), eight patients, eight charts, eight mended rings.
