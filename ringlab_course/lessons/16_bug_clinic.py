# %% [markdown]
# # 16 · Bug clinic
#
# **Afterwards you can** find out from traces, errors and meters what is wrong with a ring attention, before you read a
# line of it; and say which check would have caught it.
#
# **You need first** [lesson 09](09_backward_ring.ipynb), the backward ring; [lesson 10](10_numerics.ipynb), error curves;
# the masks and layouts of [lesson 07](07_causal_imbalance.ipynb) and [lesson 08](08_striped_and_zigzag.ipynb).
#
# **Minutes** 90 to read and run; the exercise takes another 120.
#
# "I read the code twice, and it looks right." Its authors thought so too, and so did its reviewers and everybody who
# installed it. Faults of these kinds were reported of published packages and frameworks whose tests were green;
# [field reports](../docs/field-reports.md) lists 62 threads. Here we read the source last. First comes the complaint,
# then the examination, then a chart. Only then do we open the patient.

# %%
from dataclasses import replace
from functools import partial
from textwrap import fill

import numpy as np
import torch

from ringlab import contiguous
from ringlab.conformance.kinds.layers import first_differences
from ringlab.conformance.kinds.step_cases import Case
from ringlab.conformance.mutants import STEPS
from ringlab_course import compare, predict
from ringlab_course.clinic import field, suite
from ringlab_course.clinic.edits import program_of
from ringlab_course.clinic.patients import BACKWARD, FAULTS, PATIENTS, SOUND
from ringlab_course.notebook.visit import commit, examine, open_helpers, open_source
from ringlab_course.notebook.visit import report, seen, ward
from ringlab_course.figures import courier_view
from ringlab_course.figures import kill_matrix
from ringlab.viz.style import BLUE, RED, new_figure, show, styled

torch.set_num_threads(1)

# %% [markdown]
# ## 1 · Three complaints
#
# Each patient is a ring program with **one** fault. Some are forwards, which return out and lse; some are backwards, which
# return dq, dk and dv. Eight of them are left to the exercise. We examine these three together:

# %%
ward("yew", "willow", "rowan")

# %% [markdown]
# These are the faults that a patient may have, here or elsewhere. Keep the list at hand. A diagnosis is the line that
# explains **all** that you saw, and nothing that you did not.

# %%
for name, text in FAULTS.items():
    print(f"{name:22} {text}")

# %% [markdown]
# ## 2 · The instruments
#
# `examine` runs a patient on virtual ranks, with a number of tokens on each. It reports four things:
#
# - whether the ranks **end**;
# - the **error** of every result against the float64 oracle, by rank, and the tokens where it is too large;
# - the number of **messages**;
# - their **bytes**, and how many are needed.
#
# An error within its measured bound (lesson 10) is shown as "rounding". Here is yew, on one rank and on two:

# %%
print(examine("yew", ranks=1, tokens=4))
print(examine("yew", ranks=2, tokens=4))

# %% [markdown]
# The complaint is confirmed, and the report names who waits for whom: every rank *sends*, and none has begun to receive.
# Is the size the cause? Some transports buffer small messages, so that a program hangs only above some size. **Shrink**
# before you think: fewer tokens, another mask, another dtype.

# %%
for change in ({}, {"causal": False}, {"dtype": "bfloat16"}, {"layout": "striped"}):
    stopped = examine("yew", ranks=2, tokens=1, **change).stopped
    circle = [line.strip() for line in stopped.splitlines() if "cycle" in line]
    print(f"2 ranks, 1 token each, {change or 'as usual'}:", circle[0] if circle else "ends")

# %% [markdown]
# Two ranks with one token each hang, without a mask and in bfloat16 too. (One token a rank is the same in all layouts, so the
# last line could not differ.) That is a whole chart: the fault, the smallest ill case, a check of the test suite that finds it
# (`forward` compares out with the truth; section 7 has them all), and the settings that matter (none). Write it down so
# that a machine can try it:

# %%
yew = {"fault": "deadlock", "check": "forward", "case": {"ranks": 2, "tokens": 1}, "matters": []}
commit("yew", yew)
open_source("yew")

# %% [markdown]
# `commit` tries all that the chart says except the fault's name, and keeps the chart. Only then does `open_source` show the
# source, and from then on the chart is final. The helpers that the patients share are sound, and open to all:

# %%
open_helpers("send", "receive")

# %% [markdown]
# This `send` returns when the other side has received, as gloo's does. Every rank sends first, so none receives. Lesson 11
# and its exercise have the cures: post both ends at once, or let every second rank receive first.
#
# ## 3 · Willow: digits
#
# "Everything passes at 1e-2." Then ask *how* wrong it is, not whether.

# %%
print(examine("willow", ranks=1, tokens=4))
print(examine("willow", ranks=4, tokens=4))

# %% [markdown]
# Only dq is wrong, and already on one rank. So the cause is nothing that travels, and nothing that is merged. The error is
# larger on four ranks, but these also have four times as many tokens. So two questions are left: with *equally many* tokens,
# does the error grow with the number of ranks? And does it depend on the dtype of the inputs?

# %% tags=["nbval-ignore-output"]
predict(
    "16.level",
    "32 tokens in all, on 1, 2, 4 and 8 ranks: what does willow's error of dq in float32 do?",
    choices=["grows with every rank", "stays where it is", "falls"],
)

# %%
RANKS = (1, 2, 4, 8)


def curve(name, result, dtype):
    """The error of one result on 1, 2, 4 and 8 ranks, 32 tokens in all."""
    found = [examine(name, ranks=P, tokens=32 // P, dtype=dtype) for P in RANKS]
    return [each.errors[result].error for each in found]


curves = {
    (name, result, dtype): curve(name, result, dtype)
    for name, result in (("willow", "dq"), ("rowan", "dv"))
    for dtype in ("float32", "bfloat16")
}
level = curves["willow", "dq", "float32"]
for dtype in ("float32", "bfloat16"):
    errors = curves["willow", "dq", dtype]
    print(f"willow, {dtype:8}: from {min(errors):.1e} to {max(errors):.1e}")
print(f"the most that one rounding to bfloat16 changes a number: {2**-8:.1e} of it")
compare("16.level", "stays where it is" if max(level) < 4 * min(level) else "grows with every rank")

# %%
with styled():
    figure = new_figure((6.4, 3.4))
    axes = figure.subplots()
    for (name, result, dtype), marker in zip(curves, "osD^", strict=True):
        errors, line = curves[name, result, dtype], "-" if dtype == "float32" else "--"
        look = {"marker": marker, "color": BLUE if name == "willow" else RED}
        label = f"{name}: {result}, {dtype}"
        axes.plot(RANKS, [max(e, 1e-8) for e in errors], line, label=label, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="ranks P", ylabel="relative error", xticks=RANKS, ylim=(1e-8, 10))
    axes.set_xticklabels(RANKS)
    axes.set_title("Willow's error is a level, rowan's a cliff after one rank")
    axes.legend(loc="lower right", fontsize=8.5)
show(
    figure,
    "Relative error on 1, 2, 4 and 8 ranks. Willow's dq stays between one and four "
    "thousandths in float32 and bfloat16. "
    "Rowan's dv is at rounding on one rank, and near one from two ranks on, in both dtypes.",
)

# %% [markdown]
# These are two kinds of curve.
#
# - A **level** near 10⁻³, whatever P is (here 1.3 · 10⁻³ in float32, 3.7 · 10⁻³ in bfloat16): something is rounded to
#   bfloat16, once. How much that changes depends on the numbers. With bfloat16 inputs every result is rounded so, a sound dq by the
#   same 3.7 · 10⁻³, and willow counts as *well*.
# - A **cliff** between one rank and two: a fault of the algorithm, which shows once there is a second block.
#
# Lesson 10 had a third kind, errors that *climb* with P: a sum that is rounded at every step.
#
# The **smallest** case that is ill says most. With one token, the only key has weight 1 whatever q is, so dq is 0, and 0
# survives rounding:

# %%
print(examine("willow", ranks=1, tokens=1))
print(examine("willow", ranks=1, tokens=2, dtype="bfloat16"))
case = {"ranks": 1, "tokens": 2}
willow = {"fault": "bf16 result", "check": "dq", "case": case, "matters": ["dtype"]}
commit("willow", willow)
open_source("willow")

# %% [markdown]
# The fault is in the last line. Kernels on GPUs often write bfloat16, and then nobody notices. Anybody who trains or debugs
# in float32 has lost 16 bits of dQ.
#
# ## 4 · Rowan: follow what travels

# %%
for P in (1, 2, 3):
    print(examine("rowan", ranks=P, tokens=2))

# %% [markdown]
# dq and dk are right; dv is wrong from two ranks on. The `journal` of an examination lists what was sent, and to whom:

# %%
print(examine("rowan", ranks=3, tokens=2).journal)

# %% [markdown]
# K and V make two hops, their gradients three, all of them to the next rank, with the right number of bytes. dk and dv
# travel in the same messages.

# %% tags=["nbval-ignore-output"]
predict(
    "16.rowan",
    "dq and dk are right, dv is wrong; dk and dv share their messages. Which fault explains that?",
    choices=["couriers backwards", "no last hop", "sent for received", "mean over ranks"],
)

# %% [markdown]
# - The direction and the last hop belong to the *message*, and dk was in it. That excludes two.
# - A mean could hit dv alone, but its error would be 1 − 1/P: 0.50 on two ranks and 0.67 on three. The errors above are others.
# - *Sent for received* can hit dv alone. That is left, and, from the list of section 1, *shared memory*: a sum that is overwritten
#   loses terms.
#
# To tell these two apart, use the instrument of lesson 09: probes that show, for each courier, which ranks added to it, and to
# which block each term belongs. In the pictures a box is the sum that a rank holds. Colours: which ranks added to it. Numbers: of
# whose block. The probes run without a mask, so every rank has a term for every block.

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
compare("16.rowan", "sent for received" if of_one_rank else "another fault")

# %%
TITLES = {
    "sound": "A sound ring: each dv holds all ranks' terms, of one block",
    "rowan": "Rowan: each dv holds one rank's terms, of all blocks",
}
for name, title in TITLES.items():
    show(courier_view.figure(journeys[name], title), courier_view.describe(journeys[name]))

# %% [markdown]
# In the sound ring a box comes to hold *all colours and one number*: the terms of all ranks, for one block. Rowan's boxes have one
# colour and all numbers: the sum never leaves its rank. No term is missing, so nothing was overwritten. The arrows show what was
# *sent*. Each rank sends its sum, and then goes on with its own instead of the one that arrived.

# %%
case = {"ranks": 2, "tokens": 1}
rowan = {"fault": "sent for received", "check": "dv", "case": case, "matters": []}
commit("rowan", rowan)
open_source("rowan")

# %% [markdown]
# `passed` returns what arrived *and* what was sent, and the caller takes the wrong one of them for dv. The CPU backward of
# ring-attention-pytorch goes further: it takes the whole pair, (received, sent), for the pair (dK, dV), as
# `docs/peers.md` shows. Its own test allowed an absolute error of 1e-2. Mend a patient by the **smallest** change, here one line, and
# follow it again:

# %%
old, new = "dk, _, _, dv = passed", "dk, dv, _, _ = passed"  # both sums from what arrived
mended = program_of(PATIENTS["rowan"].source.replace(old, new), "rowan")
again = courier_view.follow(partial(mended, positions=positions, causal=False), layout)
home = [sorted({int(owner) for owner in s.nonzero()[1]}) for s in again[-1].sums]
print("blocks in the dv that each rank returns:", home)

# %% [markdown]
# ## 5 · A chart is an experiment
#
# The three charts have the same parts.
#
# - **The smallest case.** With fewer ranks or fewer tokens, and nothing else changed, it is *well*. You can follow a small case by
#   hand, and the line between ill and well is most of the diagnosis. If a patient is well on two ranks and ill on three, look for
#   something that two ranks cannot tell apart.
# - **What matters.** From there change *one* thing: layout, mask or dtype. If the patient gets well, the fault involves
#   that thing. If it stays ill, it does not, provided the setting changes anything in so small a case.
# - **A check.** Not every check sees every fault. If none sees it, the fault goes into production.


# %%
def matters(name, case):
    """The settings of the case that make the patient well if changed alone."""
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
# Many ring attentions are tested like this: two ranks, contiguous shards, no mask. Here a result passes if its *relative* error is
# below 1e-2.

# %% tags=["nbval-ignore-output"]
predict(
    "16.pass",
    "How many of all eleven patients pass, with a relative error below 1e-2?",
    unit="patients",
)


# %%
def passes(name, allowed=1e-2, count=False, **case):
    """Whether a patient passes the usual test, or one that differs from it."""
    found = examine(name, **{"ranks": 2, "tokens": 4, "causal": False, **case})
    small = all(each.error < allowed for each in found.errors.values())
    return not found.stopped and small and not (count and found.sent > found.needed)


known = ("yew", "willow", "rowan")
passing = list(filter(passes, PATIENTS))
print("of yew, willow and rowan:", ", ".join(name for name in known if name in passing))
compare("16.pass", len(passing))

# %% [markdown]
# **Five of eleven.** (Rowan passed its owner's test because that one was absolute.) What is missing in this test? Mend one thing at a
# time, and count how many of the five it finds:

# %%
gaps = {
    "a causal mask": {"causal": True},
    "a causal mask and a zig-zag": {"causal": True, "layout": "zigzag"},
    "a third rank": {"ranks": 3},
    "three more digits": {"allowed": 1e-5},
    "a look at the bytes": {"count": True},
}
for gap, change in gaps.items():
    print(f"{gap:28}", sum(not passes(name, **change) for name in passing))

# %% [markdown]
# A mask alone finds nobody: with contiguous shards a block is seen whole, as a triangle, or not at all, and that is the
# easy case. Each other gap lets somebody through.
#
# ## 7 · The kill matrix
#
# Now run ringlab's own checks of a ring attention on every patient. The patients of the exercise are numbered here, in an order
# that tells nothing, so that their rows do not give them away.

# %%
order = np.random.default_rng(16).permutation([name for name in PATIENTS if name not in known])
numbered = [replace(PATIENTS[name], name=f"patient {n}") for n, name in enumerate(order, 1)]
matrix = suite.kill_matrix([*(PATIENTS[name] for name in known), *numbered])
print(len(matrix.patients), "patients,", len(matrix.checks), "checks")

# %% [markdown]
# The checks come in four groups. Five look at one result each, without a mask. Four try masks and lengths, among them queries
# that see no key of a block (`blind rows`) and lengths that P does not divide (`ragged`). Three look for lost digits. Two count
# messages and bytes.
#
# Move through the table with the arrow keys: one slider is for the patient, one for the check. The text below says what that
# check asked and what it saw.

# %% tags=["nbval-ignore-output"]
kill_matrix.play(matrix)

# %%
show(kill_matrix.figure(matrix, groups=kill_matrix.GROUPS), kill_matrix.describe(matrix))

# %% tags=["nbval-ignore-output"]
predict(
    "16.two",
    "What is the smallest number of checks that together find every patient?",
    unit="checks",
)


# %%
def covers(checks):
    """Whether these checks together find every patient."""
    return all(set(checks) & set(matrix.found_by(name)) for name in matrix.patients)


pairs = [(a, b) for a in matrix.checks for b in matrix.checks if a < b and covers((a, b))]
print("one is enough:", [a for a in matrix.checks if covers((a,))])
print("pairs that are enough:", pairs)
compare("16.two", 1 if any(covers((a,)) for a in matrix.checks) else 2 if pairs else 3)

# %% [markdown]
# **The columns** show what a check is worth. `masks`, which tries masks by position in several layouts, finds all
# patients but one; so does `ragged`. Both look at all values in a hard case.
#
# Both miss the same patient: its values are right, and it sends more than it should. Even `rounds` passes it. That check allows
# 2(P − 1) messages, one for K and one for V in each hop; with both in one message, P − 1 are enough. Tests of values alone are never
# enough: *one check must count bytes*.
#
# **The rows** help to tell patients apart, but not completely. Some patients have the very same row:

# %%
rows = {}
for name in matrix.patients:
    rows.setdefault(tuple(matrix.found_by(name)), []).append(name)
shared = [(names, found) for found, names in rows.items() if len(names) > 1]
for names, found in shared:
    print(" and ".join(names), "fall to the same checks:", ", ".join(found))

# %% [markdown]
# To tell such patients apart, look at *what the checks saw*: NaN or wrong numbers, on all ranks or on every second one. A
# filled cell is not a diagnosis. So read the evidence. The brackets name the first run that went wrong, a good one to
# start shrinking from:

# %%
rowans = report("rowan", "dq", "dk", "dv", "bytes")

# %% [markdown]
# ## 8 · Four patients from the field
#
# The next four are for you to diagnose. Each has a published fault; programs and complaints are ours. A patient returns the mean
# loss of a row of tokens, dealt as a zig-zag. The row may hold several documents, and a token sees only its own
# ([lesson 18](18_packed_batches.ipynb)).

# %%
ward(*field.FIELD)

# %% [markdown]
# We examine them on a row of 16 tokens, as one document and as four. `4.240 for 5.186` means that the loss is 4.240 where the
# oracle's is 5.186. Their faults are the four answers of the question below, one for each.

# %%
ROWS = {"one document": (), "documents of 5, 1, 7, 3": (5, 1, 7, 3)}
for name, each in field.FIELD.items():
    print(name)
    for row, documents in ROWS.items():
        cases = [Case(P, S=16, B=1, documents=documents) for P in (1, 2, 4)]
        found = [field.examine(each.program, case) for case in cases]
        said = "   ".join(f"P={one.case.P} {one.symptom:15}" for one in found)
        print(f"    {row:24} {said.rstrip()}")

# %% tags=["nbval-ignore-output"]
faults = sorted(each.fault for each in field.FIELD.values())
predict(
    "16.beech",
    "On two ranks, beech is ill with one document and well with four. Which fault does that?",
    choices=faults,
)

# %%
compare("16.beech", field.FIELD["beech"].fault)

# %% [markdown]
# **The merge.** On two ranks the zig-zag gives tokens 0 to 3 and 12 to 15 to rank 0, and the rest to rank 1. With the four
# documents, only tokens 4 and 12 see keys of both ranks. Each of the two is the last of its document, so it predicts nothing.
# Nothing that is merged counts, and of the four faults only a wrong merge can hide then.
#
# Maple and spruce are ill with both rows, so look at what a check *saw*. `every label` keeps one label at a time. Its rows have
# 48 tokens, so on two ranks the zig-zag gives tokens 0 to 11 and 36 to 47 to rank 0.

# %%
two = [field.FIELD[name] for name in ("maple", "spruce")]
saw = field.kill_matrix(two, checks=("every label",)).findings
for name, findings in saw.items():
    print(f"{name:8} {seen(findings['every label'].evidence)}")

# %% tags=["nbval-ignore-output"]
predict(
    "16.spruce",
    "If only label 12 counts, spruce returns NaN. What is wrong with spruce?",
    choices=faults,
)

# %%
compare("16.spruce", field.FIELD["spruce"].fault)
print("\n\n".join(each.chart for each in field.FIELD.values()))

# %% [markdown]
# **The labels.** Token 12 is the label of token 11, the last of rank 0's first chunk. Rank 0 cuts first, so its token 11 gets
# label 36, and label 12 is lost. A mean over no labels is NaN. Maple loses no label, and is wrong with and without
# documents: its keys are left. Alder is ill only with documents: their bounds.
#
# ## 9 · In which order to ask
#
# | ask | think of |
# |---|---|
# | Does it end? If not | who waits for whom; draw the circle |
# | Is it well on **one** rank? If not | the block itself, or what is done to the result: scale, rounding |
# | Well on **two**, ill on three? | a direction: with two ranks, next and previous are the same |
# | NaN? | −∞ − (−∞), 0/0, overflow: which rows, and what do they see? |
# | **Which** results? | lse right, out wrong: the merge. dq right, dk or dv wrong: couriers. Only dq: what stays at home |
# | On **which ranks**? | all, every second one, the last: which ranks run other code? |
# | Wrong on the first rank, right on the last? | a causal mask: which blocks did these ranks see, and in which steps? |
# | Does the **layout** matter? | positions, masks |
# | Do **documents** matter? | their bounds, and lengths that P does not divide |
# | Does the **dtype** matter? | rounding; conversions; memory that is shared, or is not |
# | **How** wrong? | 10⁻³: one rounding to bfloat16. A simple ratio, such as P or 2: a factor. About 1: unrelated numbers |
# | All values right? | count: messages, bytes, memory, work |
# | Is it a whole **model**? | ask each module in turn: `ringlab diff` names the first that differs from one process (`docs/first-layer.md`) |
#
# Each answer shortens the list. Thirteen such questions are quicker than reading a thousand lines twice.
#
# The last question needs no thought. Here is a small language model whose loss is wrong on two ranks. `first_differences` runs it on one
# process and on two ranks, compares the output of every module, token by token, and prints the first that differs:

# %%
wrong = STEPS["positions_of_the_shard"].module().step
print(fill(first_differences(wrong, ranks=2).differences[0].text, 100))

# %% [markdown]
# The module that differs is not the fault, but the fault lies just before it. On rank 1 the positions begin at 0 again, so its rotary
# embedding turns q and k by the wrong angles. In a terminal, `ringlab diff` does the same
# ([which layer differs first?](../docs/first-layer.md)).
#
# ## Recap
#
# - First the complaint, then measurements, then a name, then the source. If you read first, you see what the author meant.
# - Look for the line between ill and well: shrink the case, then change one thing at a time.
# - A level near 10⁻³ is rounding, a large level a factor, a cliff the algorithm, a slope a sum that is rounded again and again.
# - You can follow what travels: let it carry who added what.
# - No single check finds everything. Masks in several layouts find most; one check must count bytes as well.
# - A failing check is a symptom. What it saw leads to the cause.
#
# ## Self-check
#
# <details><summary>1. dk and dv are half of what they should be on two ranks and a quarter on four; dq is right. What is
# it?</summary>A mean over ranks: the ratio is P.</details>
#
# <details><summary>2. D is 4. Already on one rank dq and dk are half of what they should be; dv is right. What is
# it?</summary>The scale is applied twice: 1/√D is one half, and dv does not contain the scale.</details>
#
# <details><summary>3. dq is right. The dk and dv that each rank returns are exactly those of a neighbour's block. What is
# missing?</summary>The last hop, which brings them home.</details>
#
# <details><summary>4. Why is the smallest ill case worth more than a large one that is just as ill?</summary>Every
# smaller case is well, so it shows the line between well and ill; and you can follow it by hand.</details>
#
# Now the ward is yours: [exercise 16](../exercises/16_bug_clinic.ipynb), eight patients, eight charts, eight mended rings.
