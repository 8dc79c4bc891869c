# %% [markdown]
# # 00 · Start here
#
# **Afterwards you can** run a notebook of this course, check an exercise and submit it; read the letters that
# name every axis; and say what the eighteen lessons build up to.
#
# **You need first** Python, and some PyTorch: you have trained a network, or could.
#
# **Minutes** 30, of which the computer needs less than one.

# %% [markdown]
# ## What this is about
#
# A transformer compares every token with every other. For a short text that is a small table; for a whole
# library of source code it is more than any one machine can hold. **Ring attention** shares the text out among
# many machines, sets them in a circle, and lets the pieces travel from neighbour to neighbour until every piece
# has met every other one. Nothing is approximated, and no machine ever holds the whole.
#
# You will write that yourself, from plain attention in NumPy to a program that runs on many GPUs. One promise
# holds all the way: **the ring program is written once.** The function that you debug in a notebook, on ranks
# (so the members of the circle are called) that are only simulated, is the same function that the grader runs,
# and the same that real processes run. So nothing here is a toy that you throw away later.
#
# This first lesson teaches no mathematics. It makes sure that your machine works, shows how a lesson goes, and
# gives you the map. Run the cells one by one with Shift+Enter.

# %%
import torch

from ringlab import VirtualCluster, types
from ringlab_course import compare, corpus, predict, progress
from ringlab_course.figures.course_ring import course_ring
from ringlab_course.figures.papers import paper_map

# %% [markdown]
# ## The letters
#
# Most bugs in attention code are not wrong mathematics but an axis in the wrong place. So every axis has one
# letter, everywhere: in the lessons, in error messages, in the source of the package. The legend stands at the
# top of one file, and here it is.

# %%
print(types.__doc__)

# %% [markdown]
# Two of the letters are easily taken for each other. **S** is the length of the whole text; **L** is the part
# that lies on one rank. While there is one rank they are equal, and code that confuses them works. With a
# second rank it breaks. That is why both exist. What heads, queries, keys and values are for, and what lse is, lesson
# 01 explains; today only the order of the axes matters.
#
# Now some tensors with these axes. The text is real, and already on your machine: the source of Python's own
# standard library, byte by byte, so that one byte is one token. A small layer with fixed random weights turns the
# tokens into queries, keys and values.

# %%
S, H, K, D = 8192, 8, 2, 64
print(corpus.text(47))
q, k, v = corpus.qkv(S, heads=H, kv_heads=K, head_dim=D)
for name, tensor in (("q", q), ("k", k), ("v", v)):
    print(name, tuple(tensor.shape), f"{tensor.nbytes / 1e6:.1f} MB")

# %% [markdown]
# Read the shapes with the legend: B, then heads, then tokens, then head dim. Queries have more heads than keys
# and values, so several query heads share one key head: this is *grouped-query attention*, and most models
# in use today have it.
#
# None of these tensors is large. The table of scores between them would be. How large, and which tensor
# is the first to run out of memory, is what lesson 01 asks.

# %%
scores = H * S * S * 4
print(f"all scores in float32: {scores / 1e9:.2f} GB, {scores / q.nbytes:.0f} times the queries")

# %% [markdown]
# ## How a lesson goes: predict, run, see, explain
#
# A result that you merely read is soon forgotten; a result that contradicts what you said aloud is not.
# So before a measurement a lesson asks for your guess. It is kept in a file of your own, nobody marks it, and
# you give it once: when the measurement has been shown, the question is closed (`reopen=True` asks it again).
# Click your guess; where there are no buttons, add it to the call, as in `predict(…, answer="2")`.
# The most useful predictions are the wrong ones.
#
# Here is a first one. Four ranks sit in a circle. Each knows one note. In every step each rank hands to the
# next what it received last, and at the very start its own note.

# %% tags=["nbval-ignore-output"]
predict("00.shifts", "After how many steps has every rank heard all four notes?", choices=["2", "3", "4"])

# %% [markdown]
# The program below is what *one* rank does. It is given `ring`, its view of the circle, and its own note.
# `ring.shift(note)` sends the note to the next rank and returns what came from the previous one.


# %%
def listen(ring, note):
    heard = [int(note)]
    while len(heard) < ring.world_size:
        note = ring.shift(note)
        heard.append(int(note))
    return heard


# %% [markdown]
# `VirtualCluster` runs it on as many ranks as you like, inside this notebook. The ranks take turns in a fixed
# order, so every run is the same; if they ever wait for each other in a circle, you get an error that
# draws it instead of a program that hangs.

# %%
notes = [torch.tensor([10]), torch.tensor([11]), torch.tensor([12]), torch.tensor([13])]
outcome = VirtualCluster(4).run(lambda ring: listen(ring, notes[ring.rank]))
for rank, heard in enumerate(outcome.results):
    print(f"rank {rank} heard", heard)

# %%
compare("00.shifts", str(outcome.trace.rounds(0)))

# %% [markdown]
# Everybody knows their own note before anything moves, so one step less than there are ranks is enough. One
# more would bring each note home to where it began. That is the pattern of the whole course: **P ranks,
# P − 1 shifts.** Replace the notes by blocks of keys and values, and it is ring attention.
#
# Look at the order, too. Rank 0 hears 13 before 12: notes travel towards higher ranks, so what arrives comes
# from further and further *below*. After `step` shifts, rank r holds what began on rank (r − step) mod P. We call
# that rank the **origin**; mixing up this sign is one of the commonest bugs there are.
#
# The cluster has counted what was sent. You will use these counts to *prove* that a program does what it
# should, and the grader uses them too. A note is one integer of 64 bits:

# %%
for exchange in outcome.trace.exchanges(rank=0):
    print(f"rank 0: {exchange.bytes_sent} bytes to rank {exchange.to}, as many from rank {exchange.source}")

# %% [markdown]
# ## The whole course as one ring
#
# Eighteen lessons, in four parts. Each arrow leads from a lesson to one that stands on it. Choose a lesson
# with the slider (or the arrow keys, once it has the focus) to see what it takes to get there. The
# shortest way to your first ring, lesson 05, goes through four lessons. Lessons drawn dotted are planned and not
# there yet.

# %% tags=["nbval-ignore-output"]
course_ring("05")

# %% [markdown]
# ## The papers, as a map
#
# The idea did not fall from the sky. It took a softmax that needs one pass, then attention that never writes
# down the whole table, then tiles that fit a fast memory; only then could the tiles be shared out. At this
# point no paper is lit. Lessons light those that they explain, and the map comes back at their ends.

# %%
paper_map()

# %% [markdown]
# ## Check and submit
#
# Every lesson has an exercise in the folder `exercises/`. It is a notebook in which some functions only say
# what to write. You fill them in and call
#
# | call | what it does |
# |---|---|
# | `check("00.ring")` | runs the visible checks of one function within seconds, and explains what is wrong |
# | `hint("00.ring")` | shows a question; called again, a direction; called again, a line of mathematics |
# | `progress()` | shows how far you are |
#
# A failing check does not merely say no. Where it can, it works out what one gets from each common mistake, and if
# that is what you got, it tells you which mistake it was, on the smallest input that shows it.
#
# To **submit**, save the notebook and run `ringlab grade exercises/00_start_here.ipynb` in a terminal (JupyterLab
# has one: File, New, Terminal). The notebook itself is the submission. The grader takes the functions out of it and calls them in
# a closed-off process, with fresh random inputs and with hidden checks on top of the visible ones; therefore
# `check` says "visible checks passed", and only the grader says "passed".
#
# Your exercise files are yours: nothing in this project writes over one that you have edited. For a clean copy,
# `ringlab exercise fresh 00` writes one and keeps yours beside it. A worked solution of every exercise is in
# `solutions/`. And this is where you stand:

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## Recap
#
# - Tensors are (B, H, L, D). S is the whole text, L one rank's part of it, P the number of ranks.
# - A ring program is what one rank does; `ring.shift` sends to the next and returns from the previous.
# - P ranks need P − 1 shifts, and after `step` of them rank r holds what began on rank (r − step) mod P.
# - Predict before you measure; `check` helps, `ringlab grade` decides.
#
# ## Self-check
#
# Answer without scrolling up, then open.
#
# <details><summary>A tensor of keys is (2, 4, 1024, 128). Which letters are these, and how many tokens are
# there on this rank?</summary>B = 2 sequences, K = 4 key/value heads, L = 1024 tokens of each sequence on this
# rank, D = 128.</details>
#
# <details><summary>Five ranks. Whose block does rank 1 hold after three shifts?</summary>
# (1 − 3) mod 5 = 3: the block of rank 3.</details>
#
# <details><summary>A program shifts P times and its result is still right. What is wrong with it?</summary>
# The last shift brings every block home, where it is already known: time and traffic for nothing.</details>
#
# **Now you:** [exercise 00](../exercises/00_start_here.ipynb) checks your machine, your axes and your first
# ring.
