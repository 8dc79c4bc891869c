# %% [markdown]
# # 00 · Start here
#
# **Afterwards you can** run a notebook of this course, check an exercise and submit it; read the letters that
# name every axis; and say what the lessons lead to.
#
# **You need first** Python and some PyTorch: you have trained a network, or could.
#
# **Minutes** 30, of which the computer needs less than one.

# %% [markdown]
# ## What this is about
#
# A transformer compares every token with every other token. For a short text that makes a small table. For the source of a
# large project the table is bigger than the memory of any machine. **Ring attention** divides the text among
# many machines, arranges them in a circle, and passes the pieces from neighbour to neighbour until every piece
# has met every other piece. It approximates nothing, and no machine ever holds the whole text.
#
# In this course you write ring attention yourself: first plain attention in NumPy, in the end a program that runs on
# many GPUs. **You write the ring program only once.** You debug it in a notebook, where one process simulates every
# member of the circle. The members are called *ranks*. The grader runs the same function, and so do real processes
# on real machines.
#
# This first lesson teaches no mathematics. It checks your machine, shows how a lesson proceeds, and gives you a map
# of the course. Run the cells one by one with Shift+Enter.

# %%
import torch

from ringlab import VirtualCluster, types
from ringlab.errors import DeadlockError
from ringlab_course import compare, corpus, predict
from ringlab_course.catalogue import SHORTEST_WAY, lesson
from ringlab_course.figures.course_ring import course_ring, note_grid
from ringlab_course.figures.papers import paper_map

# %% [markdown]
# ## How a lesson goes: predict, run, see, explain
#
# You remember a result that contradicts your own guess. So before a measurement the lesson asks for it. Click one of
# the buttons; where there are none, add your guess to the call, as in `predict(…, answer=7)`. Your guesses are kept in a
# file of your own, and nobody grades them. You can answer once, and only before the measurement is shown;
# `predict(…, reopen=True)` lets you answer again. The most useful predictions are the wrong ones.
#
# Here is the first one. Four ranks form a circle. Each rank knows one note. In each step every rank passes one
# note to the next rank: first its own, then always the one that it received last.

# %% tags=["nbval-ignore-output"]
predict(
    "00.shifts",
    "After how many steps does every rank know all four notes?",
    choices=["2", "3", "4"],
)

# %% [markdown]
# The program below is what *one* rank does. Its arguments are `ring`, its view of the circle, and its own note.
# `ring.shift(note)` sends the note to the next rank and returns the note that arrives from the previous rank.


# %%
def gather_notes(ring, note):
    known = [int(note)]
    while len(known) < ring.world_size:
        note = ring.shift(note)
        known.append(int(note))
    return known


# %% [markdown]
# `VirtualCluster` runs it on as many ranks as you like, inside this notebook. The ranks take turns in a fixed order, so
# every run is the same. The outcome of a run has a *trace*, a record of what was sent: `trace.rounds(0)` is the number
# of shifts in which rank 0 took part.

# %%
notes = [torch.tensor([10]), torch.tensor([11]), torch.tensor([12]), torch.tensor([13])]
outcome = VirtualCluster(4).run(lambda ring: gather_notes(ring, notes[ring.rank]))
for rank, known in enumerate(outcome.results):
    print(f"rank {rank} knows, in this order,", known)

# %%
compare("00.shifts", str(outcome.trace.rounds(0)))

# %% [markdown]
# Every rank knows its own note before anything moves, so the number of steps is one less than the number of ranks. One
# more step would bring each note back to where it began. The whole course uses this pattern: **P ranks, P − 1 shifts.**
# Replace the notes by blocks of keys and values, and let each rank use a block instead of keeping it: that is ring attention.
#
# The same run as a picture. Follow the black arrows:

# %%
note_grid(outcome.results)

# %% [markdown]
# Notes travel towards higher ranks, and from rank 3 to rank 0. Now read the row of one rank: each new note began one
# rank lower than the one before it, and below rank 0 comes rank P − 1. After `step` shifts, rank r holds what began on
# rank (r − step) mod P. We call that rank the **origin**. A wrong sign in this formula is one of the commonest bugs in
# ring programs.
#
# The cluster counts what is sent, so the grader can check it. A note is one 64-bit integer:

# %%
for exchange in outcome.trace.exchanges(rank=0):
    sent, to, source = exchange.bytes_sent, exchange.to, exchange.source
    print(f"rank 0: {sent} bytes to rank {to}, as many from rank {source}")

# %% [markdown]
# What if one rank makes one shift fewer than the others? On real machines the program usually hangs silently: the
# neighbours wait for a rank that has finished. Here we let rank 0 stop early:


# %%
def stops_early(ring, note):
    for _ in range(2 if ring.rank == 0 else 3):
        note = ring.shift(note)


try:
    VirtualCluster(4).run(lambda ring: stops_early(ring, notes[ring.rank]))
except DeadlockError as error:
    print(error)

# %% [markdown]
# The error names who waits for whom. Exchanges are counted from 0, so exchange 2 is the third shift: rank 3 wants to
# send to rank 0 and rank 1 wants to receive from it, but rank 0 has finished after two.
#
# ## The letters
#
# In attention the notes are tensors with four axes. Most bugs in attention code are not wrong mathematics but an axis
# in the wrong place. So every axis has one letter, and the letter is the same in the lessons, in error messages and in
# the source of the package. (Formulas in the papers' style reuse a few of them, such as K for the matrix of all keys;
# the lessons say where.) Here is the list, from the top of one source file. Lesson 01 explains heads, queries, keys,
# values and lse, lesson 03 tiles.

# %%
print(types.__doc__)

# %% [markdown]
# Two of the letters are easily confused. **S** is the length of the whole text; **L** is the length of the part
# on one rank. With a single rank they are equal, and code that confuses them works. With a second rank it breaks, so
# the course keeps the two apart from the start.
#
# Now we make some tensors with these axes. The text is the source of Python's standard library; one byte is one token,
# and the cell prints the first 47 bytes. A small layer with fixed random weights turns the tokens into queries, keys
# and values.

# %%
S, H, K, D = 8192, 8, 2, 64
print(corpus.text(47))
q, k, v = corpus.qkv(S, heads=H, kv_heads=K, head_dim=D)
for name, tensor in (("q", q), ("k", k), ("v", v)):
    print(name, tuple(tensor.shape), f"{tensor.nbytes / 1e6:.1f} MB")

# %% [markdown]
# Read the shapes with the letters: B, then heads, then tokens, then head dim. All tokens are on one rank here, so L = S.
# There are more query heads than key and value heads, so several query heads share one key head. This is *grouped-query
# attention*, and most current models use it.
#
# None of these tensors is large. The table of scores between queries and keys would be:

# %%
scores = H * S * S * 4
print(f"all scores in float32: {scores / 1e9:.2f} GB, {scores / q.nbytes:.0f} times the queries")

# %% [markdown]
# Twice as many tokens make this table four times as large. Lesson 01 works out at which length it fills a device.
#
# ## Check and submit
#
# Every lesson has an exercise in the folder `exercises/`, a notebook with some unfinished functions. You write them, and
# three calls help you:
#
# | call | what it does |
# |---|---|
# | `check("00.ring")` | runs the visible checks of one function within seconds, and explains what is wrong |
# | `hint("00.ring")` | shows a question; called again, a direction; called again, a line of mathematics |
# | `progress()` | shows how far you are |
#
# When a check fails, it compares your result with what the common mistakes would give. If one matches, it names the
# mistake and shows the smallest input on which it appears.
#
# To **submit**, save the notebook and run `ringlab grade exercises/00_start_here.ipynb` in a terminal (in JupyterLab:
# File, New, Terminal). The grader takes the functions out of the notebook and calls them in a sandboxed process, with new
# random inputs and with some hidden checks in addition to the visible ones. Therefore `check` says only that the visible
# checks pass. `progress` also shows the grades of notebooks in `exercises/`.
#
# The project never overwrites an exercise that you have edited. To start again, `ringlab exercise fresh 00` writes a
# clean copy and keeps yours beside it. The folder `solutions/` has a worked solution of every exercise.
#
# ## The whole course as one ring
#
# Here are the lessons, clockwise in the order in which you read them; in some places the numbers jump. The
# square is the goal: the capstone, an exercise without a lesson, in which you hand in a ring attention of your own. The
# grey lessons after it are further reading: Triton, JAX, and layers without softmax. The last line of every lesson leads to
# the next one.
#
# An arrow leads from a lesson to one that needs it. The dark arrows lead to lesson 09, in which the gradients go around the
# ring. Choose another lesson with the slider to see what it needs, and what needs it.

# %% tags=["nbval-ignore-output"]
course_ring("09")

# %% [markdown]
# Do you have one long day, or a few evenings? The dark arrows are the shortest way to a ring of your own, forward and
# backward:

# %%
way = [lesson(name) for name in SHORTEST_WAY]
for each in way:
    print(f"{each.id}  {each.minutes} minutes  {each.title}")
total = sum(each.minutes for each in way)
hours = (total + 60) / 60
print(f"{total} minutes; with exercise 05, in which you write the forward, {hours:g} hours")

# %% [markdown]
# Lessons 07 and 08, two more hours, share out the work of a causal mask evenly among the ranks.
#
# Ring attention is a late step in a row of ideas. Behind the fold is a map of their papers, for later: each box names the
# lessons that explain it.

# %% tags=["nbval-ignore-output"]
paper_map()

# %% [markdown]
# ## Recap
#
# - Tensors are (B, H, L, D). S is the length of the whole text, L that of one rank's part, P the number of ranks.
# - A ring program is what one rank does. `ring.shift` sends to the next rank and returns what the previous rank sent.
# - P ranks need P − 1 shifts. After `step` of them, rank r holds what began on rank (r − step) mod P.
# - `check` helps you; `ringlab grade` gives the points.
#
# ## Self-check
#
# Answer without scrolling up, then open the answer.
#
# <details><summary>A tensor of keys has the shape (2, 4, 1024, 128). Name the letter of each axis. How many tokens of
# each sequence are on this rank?</summary>B = 2 sequences, K = 4 key/value heads, L = 1024 tokens of each sequence on this
# rank, D = 128.</details>
#
# <details><summary>There are five ranks. Whose block does rank 1 hold after three shifts?</summary>
# (1 − 3) mod 5 = 3: the block of rank 3.</details>
#
# <details><summary>A program shifts P times, and its result is right. What is wrong with it?</summary>
# The last shift brings every block back to the rank that already had it. That costs time and traffic for
# nothing.</details>
#
# **Now you:** [exercise 00](../exercises/00_start_here.ipynb) checks your machine, your axes and your first
# ring.
