# %% [markdown]
# # 18 · Packed and variable-length batches
#
# **Afterwards you can** pack documents into one row, share the row over ranks, and test whether a program does this correctly. The
# loss alone does not tell you.
#
# **You need first** [lesson 08](08_striped_and_zigzag.ipynb), layouts, and [lesson 14](14_training.ipynb), labels and the loss of a
# sharded sequence.
#
# **Minutes** 60 to read and run; the exercise takes another 60.
#
# Documents differ in length, and a tensor is a rectangle. A batch with one document per line must fill up the short ones with
# *padding*: tokens that mean nothing, but cost as much as any other. So training **packs** documents: it writes them one after the
# other into one long row. On a ring, all ranks share this row.
#
# This lesson uses one row throughout. Its four documents are Python keywords (`_` is a soft one), and every letter is a token.
# Four ranks hold four tokens each. A token's **place** is its index in the row.

# %%
import copy
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from ringlab import VirtualCluster, striped, zigzag
from ringlab.nn import IGNORE, Context
from ringlab_course import compare, predict
from ringlab_course.notebook import spelling
from ringlab.viz.style import show

# %%
row = spelling.Row(["while", "_", "finally", "def"], P=4)
places = np.arange(16)
show(*row.strip({"place": places}, title="Four documents in one row, on four ranks"))
longest = max(len(word) for word in row.words)
print(f"as a rectangle: {len(row.words)} lines of {longest}, {4 * longest - 16} tokens of padding")

# %% [markdown]
# A small, half-trained decoder spells Python's keywords. It has only seen them one at a time. Six programs compute its loss on this
# row: the mean of −log p over the letters that the decoder has to predict. These are twelve: every letter but the first of each
# word. All six programs use the same weights, the same tokens and the same four ranks, and none raises an error.

# %%
programs = row.six_programs()
for name, loss in programs.items():
    print(f"program {name}: loss {loss:.3f}")

# %% [markdown]
# One program is right. Each of the other five has one mistake, and bugs close to most of these mistakes have been
# [reported](../docs/field-reports.md) in public libraries. The log of a training run shows one such number, and nothing to compare
# it with. Which of the six would you trust? Nothing here decides it yet, so guess.

# %% tags=["nbval-ignore-output"]
predict("18.right", "Which program is right?", choices=[*programs])

# %% [markdown]
# The answer comes in section 8. Until then we make the five mistakes on this row, one at a time. Each gives exactly one of the six
# losses, and this tells us whose mistake it was.
#
# ## 1 · Three ways to write a bound
#
# In the row, nothing shows where a document ends. There are three common ways to write it down:
#
# - **cu_seqlens**, cumulative lengths: 0, then for each document the place after its last token. Kernels for packed rows take it,
#   as int32.
# - **Position ids**: a token's **position** is its index in its document, that is, its place minus the place of the document's
#   first token. The code that builds batches, the *collator*, often makes these.
# - **Document ids**, also called segment ids: for each token, the number of its document.

# %%
ids, positions = row.packing.document_ids, row.packing.position_ids
lines = {"position ids": positions, "document ids": ids}
show(*row.strip(lines, title="The same bounds in three ways", bounds=True))

# %% [markdown]
# If no document is empty, each of the three gives the other two.
#
# In the picture, every gap is the border of a rank, and every change of colour the border of a document. The two kinds of borders
# have nothing to do with each other: `while` lies on two ranks, `finally` on three, and rank 1 holds tokens of three documents.
#
# **However the row is cut, every letter must be predicted with the same loss as in its document alone. And in the mean, every such
# letter must have the same weight.** (Section 7 has another choice of weights.)
#
# ## 2 · The mask
#
# A query sees the keys of its own document, up to itself. So the right mask has two conditions: the key is in the same document,
# and its place is not later. A program that passes only `causal=True` to its kernel forgets the first one.

# %%
def sees(document):
    """Which query sees which key: same number in `document`, and the key is not later."""
    return (document[:, None] == document) & (places[:, None] >= places)


right = sees(ids)
without_documents = sees(np.zeros(16))
masks = {"With documents": right, "Without documents": without_documents}
show(*row.pairs({"With documents: four triangles": right,
                 "Without documents: one triangle": without_documents}))

# %% [markdown]
# With documents the mask is four triangles, and nothing between them. (Heavy lines are the borders of ranks, dotted lines
# those of documents.) Without documents it is one large triangle, and every document sees all documents before it.
# The decoder then knows *more* when it predicts a letter.

# %% tags=["nbval-ignore-output"]
predict(
    "18.mask",
    "The decoder has learned words alone. Without documents in the mask, each word but the first "
    "also sees the words before it. What does its loss on this row become?",
    choices=["lower", "the same, to a hundredth", "higher"],
)

# %% [markdown]
# `row.loss()` runs the decoder on the four ranks, without a mistake (section 8 checks this), and returns its loss. With `sees=mask`
# it uses our mask instead of the right one.

# %%
opened = {}  # the mistake of each program that we have identified


def identify(mistake, loss):
    """Print which of the six programs reports this loss, and write down its mistake."""
    for name, reported in programs.items():
        if abs(reported - loss) < 1e-12:
            opened[name] = mistake
            print(f"{mistake}: loss {loss:.3f}, that is program {name}")

# %%
loss_right, loss_mask = row.loss(), row.loss(sees=without_documents)
identify("mask without documents", loss_mask)
change = round(loss_mask - loss_right, 2)
compare("18.mask", {-1: "lower", 0: "the same, to a hundredth", 1: "higher"}[np.sign(change)])

# %% [markdown]
# It is higher: the decoder has never seen a word that follows another, and on average what it sees now misleads it.
#
# A wrong mask can be found without a second program. **Change a token, and see which outputs move.** Here the *f* of
# `finally` becomes an *x*. (`row.logits` returns the decoder's outputs.)

# %%
def moved(mask, place):
    """Which tokens' outputs are no longer the same if the token at `place` becomes an x: (16,)."""
    changed = spelling.Row(row.words, P=4)
    changed.tokens[place] = ord("x")
    difference = row.logits(sees=mask) - changed.logits(sees=mask)
    return (difference.abs().amax(dim=-1) > 1e-9).numpy()


moves = {name: moved(mask, 6) for name, mask in masks.items()}
lines = {name: ["●" if each else "" for each in which] for name, which in moves.items()}
wrong = {name: which & (ids != ids[6]) for name, which in moves.items()}
show(*row.strip(lines, wrong, title="Which outputs move if the f of finally changes"))

# %% [markdown]
# A dot is an output that moves. A token must move its own output and those after it **in its document**, and no other. (More
# layers carry the change no further: if I see a token, I also see every token that it sees.) Without
# documents, the *f* also moves the outputs of `def`. Had we changed a letter of `def`, the last word, we would have seen nothing
# wrong. So change **each token in turn**:

# %%
def found(mask):
    """Which output moves (row) with which token (column): (16, 16)."""
    return np.stack([moved(mask, place) for place in range(16)], axis=1)


for name, mask in masks.items():
    print(f"{name}: {(found(mask) != right).sum()} pairs are wrong")

# %% [markdown]
# ## 3 · The bounds of a shard
#
# Our mask needs the document and the place of each token. But a kernel may want cu_seqlens of the rank's own four tokens, counted
# from 0. Ours run to 16. In a fork of Megatron-LM, a layer computed a rank's own bounds [like
# this](https://github.com/ISEEKYAN/Megatron-LM/pull/111). `cp_size` is the number of ranks:
#
# ```python
# local_cu_seqlens = cu_seqlens // cp_size
# ```
#
# The idea is that each rank has a quarter of the row, so it has a quarter of every document. All ranks read the same bounds:

# %%
divided = row.packing.cu_seqlens // 4
print("cu_seqlens     ", row.packing.cu_seqlens.tolist())
print("divided by four", divided.tolist())
of_a_rank = np.repeat(np.arange(4), np.diff(divided))
print("documents of a rank's four tokens, by divided bounds:", *of_a_rank)

# %% [markdown]
# So every rank takes its first token for document 0, the second and the third for document 2, and the last for document 3.
# Document 1 has vanished.
#
# That layer was one of linear attention. Our ring has none, so we put the wrong numbers into its mask. As before, a query sees each
# earlier key with the same document number, on any rank.

# %% tags=["nbval-ignore-output"]
predict(
    "18.divided",
    "Place 8 holds the n of finally. It is the first token of rank 2. Which keys does it see?",
    choices=["the f, the i and itself", "itself alone", "the l, the i and itself",
             "the w, the e and itself"],
)

# %%
by_bounds = sees(np.tile(of_a_rank, 4))  # the same numbers on all four ranks
masks = {"With the row's bounds: each word alone": right,
         "With divided bounds: words are mixed": by_bounds}
show(*row.pairs(masks, framed=8))

# %%
seen = np.flatnonzero(by_bounds[8])
print("the n at place 8 sees places", *seen)
compare("18.divided", ", ".join(f"the {row.letters[key]}" for key in seen[:-1]) + " and itself")

# %% [markdown]
# The *n*, in the frame, sees itself and the first tokens of ranks 0 and 1, because the first token of every rank is taken for
# document 0. A wrong mask may also take keys away: the *n* no longer sees the *f* and the *i*.

# %%
lost, extra = right & ~by_bounds, by_bounds & ~right
print(f"{lost.sum()} of {right.sum()} pairs are lost, and {extra.sum()} are seen by mistake")
identify("divided bounds", row.loss(sees=by_bounds))

# %% [markdown]
# The cure: do not divide. **Keep the bounds of the whole row, and each token's place in it.** Then a rank looks up its tokens'
# documents, in any layout. `layout.positions(rank)` returns the places of its tokens, and NumPy's `searchsorted` with `side="right"`
# counts the bounds that are at most a place. The bound 0 is always among them, so we subtract 1.

# %%
owned = [row.layout.positions(rank) for rank in range(4)]
for rank in range(4):
    documents = np.searchsorted(row.packing.cu_seqlens, owned[rank], side="right") - 1
    print(f"rank {rank}: places", *owned[rank], "  documents", *documents)

# %% [markdown]
# An empty document repeats a bound, and no place falls into it.
#
# Right bounds of the four tokens alone would not be enough. On rank 2 they are 0 and 4, and a kernel that knows only these takes
# *nall* for a whole document.
#
# When is the division right? Only if every document is spread over the ranks in equal parts. For example, of documents with 8 and
# 12 tokens, striped over four ranks, every rank has 2 and 3.
#
# ## 4 · Labels
#
# The three mistakes that are left are in the three lines of [lesson 14](14_training.ipynb): labels, positions and the mean. With
# documents, labels and positions need a new line each. The line of the mean stays, but now ranks hold different numbers of labels.
#
# The label of a token is the next token **of its document**. The last token of a document has no label. It gets −100 instead,
# which the loss ignores. So the labels are the row, shifted by one, with −100 at the end of each document:

# %%
def shift(tokens, document):
    """For each token the next one, or −100 if that is not in the same document."""
    same = document[1:] == document[:-1]
    return np.append(np.where(same, tokens[1:], IGNORE), IGNORE)


labels = shift(row.tokens, ids)
print("tokens:", *row.letters)
print("labels:", *(chr(each) if each != IGNORE else "·" for each in labels), "  (a dot is −100)")

# %% [markdown]
# One of our programs knows the documents, but **cuts first**: every rank shifts only its own tokens. `row.on_each_rank(f)`
# calls `f` with the places of each rank's tokens, and joins the results in the order of the row.
#
# The next picture has an arrow from each token to its label. For the arrows we shift places instead of letters.

# %%
whole = shift(places, ids)
cut_first = row.on_each_rank(lambda own: shift(own, ids[own]))
show(*row.arrows({"Shifted in the whole row, then cut: right": whole,
                  "Cut first, then shifted on each rank": cut_first}))

# %% [markdown]
# If the row is cut first, the last token of a rank has no next token there: it lies on the next rank. A label is lost wherever
# the border of a rank falls inside a word, here three times. How hard were these three? `row.token_losses()` returns −log p of
# each token's label.

# %%
cut_labels = row.on_each_rank(lambda own: shift(row.tokens[own], ids[own]))
identify("labels cut first", row.loss(labels=cut_labels))
lost = row.token_losses()[(labels != IGNORE) & (cut_labels == IGNORE)]
print("losses of the lost labels:", *lost.round(2))
print(f"their mean {lost.mean():.2f}, the mean of all {loss_right:.2f}")

# %% [markdown]
# Nine labels remain of twelve. Two of the three lost ones are hard, so this program reports the **lowest loss of all six**. A
# low loss is no sign that a program is right.
#
# Contiguous shards have few borders. Now stripe the same row, as one does to balance the work of a causal mask: place t goes to
# rank t mod 4. (In the picture, the small numbers are places.)

# %% tags=["nbval-ignore-output"]
predict(
    "18.labels",
    "The same row, striped over the four ranks. Each rank cuts first, then shifts within "
    "documents. How many of the 12 labels are still right?",
    unit="labels",
)

# %%
dealt = striped(16, 4)
cut_striped = row.on_each_rank(lambda own: shift(own, ids[own]), dealt)
title = "Striped, cut first, then shifted: no label is right"
show(*row.arrows({title: cut_striped}, dealt))
compare("18.labels", int(((cut_striped == whole) & (whole != IGNORE)).sum()))

# %% [markdown]
# None is right. Two neighbours in the row are never on the same rank, so every token stands at a border.
#
# The cure: **shift in the whole row, within documents, and let the labels travel with their tokens.** The same holds for loss
# weights and for everything else that belongs to a token.
#
# In verl, a library for reinforcement learning, some fused kernels [rolled each rank's
# shard](https://github.com/verl-project/verl/pull/6268). A roll wraps around. So the last token of each shard got the shard's own
# first token as its label. Program B gives it none. The right label is the first token of the next shard, if that is in the same
# document.
#
# ## 5 · Positions
#
# Plain rotary embedding turns each query and each key by an angle proportional to a number that the token carries. Which number?
# Three are at hand: the position in the document, the place in the row, and the token's index in its rank's shard. The right one is
# the position: then the decoder treats a word in the row exactly like the word alone.

# %% tags=["nbval-ignore-output"]
predict(
    "18.positions",
    "The mask is right, but rotary embedding gets each token's place in the row. The d of def is "
    "turned by 13 steps instead of 0. How does the loss change?",
    choices=["not at all, but for rounding", "a little", "as much as with a wrong mask"],
)

# %%
change = abs(row.loss(positions=places) - loss_right)
print("with places, the loss differs by less than 1e-9:", change < 1e-9)
compare("18.positions", "not at all, but for rounding" if change < 1e-9 else "a little")

# %% [markdown]
# Not at all. A product of two turned vectors depends only on the *difference* of their numbers. Within a document, position and
# place differ by a constant, and in the difference between a query and a key this constant drops out.
#
# So only the step from each token to the next one of its word matters, because every difference in a word is a sum of such steps.
# The step has to be 1. The next picture shades each number where the step from the letter before it in the word is not 1.

# %%
index = row.on_each_rank(lambda own: np.arange(len(own)))


def breaks(numbers):
    """Which tokens' numbers are not 1 more than the number before, in the same word."""
    return np.append(False, (ids[1:] == ids[:-1]) & (np.diff(numbers) != 1))


lines = {"position in the word": positions, "place in the row": places, "index in the shard": index}
wrong = {name: breaks(numbers) for name, numbers in lines.items()}
show(*row.strip(lines, wrong, title="Only the index in the shard breaks off inside a word"))

# %% [markdown]
# The index breaks off at the same three borders where labels were lost: borders of ranks inside a word. There, the step from one
# letter to the next is −3 instead of 1, and the picture shades the 0 after it. One of the six programs uses it:

# %%
identify("index as position", row.loss(positions=index))

# %% [markdown]
# Places do harm where the number itself counts, not only differences: with learned positions, and with rotary embeddings whose
# frequencies [depend on the largest position](../docs/huggingface.md#what-is-refused).
#
# ## 6 · The mean
#
# Mask, labels and positions are right now. The ranks only have to agree on *one* number, the mean over all labels.

# %% tags=["nbval-ignore-output"]
predict(
    "18.mean",
    "Each rank takes the mean of its own labels' losses, and the program reports the mean of the "
    "four means. All ranks hold four tokens. Is this the mean over all labels?",
    choices=["yes", "no"],
)

# %%
has_label = labels != IGNORE
of_ranks = row.on_each_rank(lambda own: has_label[own] / has_label[own].sum()) / 4
print("labels of each rank:", *(has_label[own].sum() for own in owned))
loss_of_means = row.loss(weights=of_ranks)
identify("mean of the ranks' means", loss_of_means)
compare("18.mean", "yes" if abs(loss_of_means - loss_right) < 1e-12 else "no")

# %% [markdown]
# No. Equally many tokens are not equally many labels, because the last token of a word has none. Ranks 1 and 3 have only two
# labels, and each of these weighs as much as two labels of rank 0 or 2:

# %%
means = {"The mean over all labels: right": has_label / has_label.sum(),
         "The mean of ranks' means: weights change where ranks end": of_ranks}
show(*row.bars(means))

# %% [markdown]
# **A weight must never change because a rank ends.** So count the labels over all ranks, once, before anybody divides. In verl the
# count [left out the other ranks of the row](https://github.com/verl-project/verl/issues/5983): each rank divided by its own count.
# Then the ranks' results were *added*, not averaged, so the loss was about P times too large.
#
# ## 7 · A choice: an equal share for each document
#
# No weight may change because a rank ends. A weight *may* change where a document ends: in some losses of reinforcement learning a long
# answer is to have no more say than a short one. Such a loss takes the mean of each document, then the mean of these. So each rank
# has to know how many labels a document has. But `finally` lies on three ranks, and each counts only its own part (*y*, on rank 3, has no label):

# %%
counts = [np.bincount(ids[own][has_label[own]], minlength=4) for own in owned]
for rank in range(4):
    print(f"labels of each document on rank {rank}:", *counts[rank])
print("sum over all ranks:               ", *sum(counts))

# %% [markdown]
# One all-reduce of these four numbers is enough. After it every rank knows the weight of all its tokens. The document `_` has no
# label. So it has no mean, and the outer mean is over three documents.

# %%
in_document = np.maximum(sum(counts), 1)[ids]  # at least 1, so that nobody divides by 0
of_documents = has_label / in_document / np.count_nonzero(sum(counts))
means = {"Each label has a twelfth: long documents have more": has_label / has_label.sum(),
         "Each document with a label has a third: weights change where documents end": of_documents}
show(*row.bars(means, shares=True))
losses = row.token_losses()
three = np.mean([losses[has_label & (ids == document)].mean() for document in (0, 2, 3)])
print(f"loss {row.loss(weights=of_documents):.3f}, mean of the three words' means {three:.3f}")

# %% [markdown]
# So this number is right, and yet it is lower than those of all six programs: `finally`, with its hard letters, now counts no more
# than `def`.
#
# ## 8 · The six programs, opened
#
# Each of the five mistakes was made by one program, and D is left over. That proves nothing: D is right only if one of the six is, and
# so far you have only our word. The reference is **every document alone, in one process, without a row and without a ring**, since
# then there is no border that could be forgotten.

# %%
decoder = spelling.decoder()


def each_alone(words, model):
    """The mean loss of all labels, where the model sees one word at a time."""
    losses = []
    for word in words:
        tokens = torch.tensor([*word.encode()])
        logits = model(tokens[None])[0, :-1]
        losses.append(F.cross_entropy(logits, tokens[1:], reduction="none"))
    return torch.cat(losses).mean()


alone = each_alone(row.words, decoder).item()
equal = np.allclose([programs["D"], loss_right], alone, rtol=0, atol=1e-12)
print(f"each word alone: {alone:.3f}, equal to program D and to row.loss(): {equal}")

# %% [markdown]
# D is right. So these are the six:

# %%
for name, loss in programs.items():
    print(f"program {name}: loss {loss:.3f}, {opened.get(name, 'no mistake')}")
(left,) = set(programs) - set(opened)
compare("18.right", left)

# %% [markdown]
# If you chose B because its loss is the lowest, you chose the program that lost three labels, two of them hard.
#
# Where does each wrong number come from? Line D gives, under each letter, the loss of predicting the letter after it; a dot means
# that there is none. The other lines give the change. Empty is no change.

# %%
shown = {"A: only weights": {"weights": of_ranks}, "B: labels cut first": {"labels": cut_labels},
         "C: no documents": {"sees": without_documents}, "E: divided bounds": {"sees": by_bounds},
         "F: index": {"positions": index}}
lines = {name: row.shown_changes(**given) for name, given in shown.items()}
changed = {name: np.array(each) != "" for name, each in lines.items()}
lower = {name: np.char.startswith(each, "−") for name, each in lines.items()}
losses = [f"{loss:.2f}" if loss else "·" for loss in row.token_losses()]
title = "A changes no loss, B drops three, C and E change most, F four"
show(*row.strip({"D: no mistake": losses} | lines, changed, lower, title=title))

# %% [markdown]
# - **A** changes no letter's loss, only the weights.
# - **B** loses the label of the last letter before a rank's border, where this border falls inside a word.
# - **C and E**, the wrong masks, change the losses of most letters. C spares `while`, because nothing stands before it.
# - **F** restarts the numbers at every rank's border. If the border falls inside a word, the letters after it are turned wrongly.
#   The damage shows at *n a l l* alone, because *e* and *y* have no label. The rises add up to 0.78, and the fall is 0.50. They nearly
#   cancel, so the mean stays close to that of D.
#
# ## 9 · A row that exposes all five
#
# Would a test have found the five? Here is a natural one: four documents of four tokens, one on each rank, compared with each
# document alone.

# %% tags=["nbval-ignore-output"]
predict(
    "18.tests",
    "The documents else, from, pass and with, one on each of the four ranks. How many of the five "
    "wrong programs give the right loss on this row, and so pass the test?",
    unit="programs",
)

# %%
rows = {"one document": ["while_finallydef"], "one on each rank": ["else", "from", "pass", "with"],
        "this lesson's row": row.words}
passes = {}
for test, words in rows.items():
    made, expected = spelling.Row(words, P=4).six_programs(), each_alone(words, decoder).item()
    passes[test] = [name for name in "ABCEF" if abs(made[name] - expected) < 1e-12]
    print(f"{test:17} wrong programs that pass:", *passes[test] or ["none"])
compare("18.tests", len(passes["one on each rank"]))

# %% [markdown]
# Three pass. If each rank holds one document, the borders of ranks *are* the borders of documents, and B and F may mix them up
# without harm. A passes because every rank has three labels. With a single document there is no border to forget, so the two wrong
# masks pass. This lesson's row lets none pass:
#
# - A document goes on past the end of a rank (B), and at least two of its tokens lie on the next one (F: the first of them still has
#   a label).
# - A document after the first has at least two tokens (C).
# - A document has unequal parts on the ranks (E).
# - Ranks hold different numbers of labels (A).
#
# A single document is a natural test, too. `batch_ring`, one of the ring algorithms that axolotl offers, ignored documents. With
# several in a row its first loss was [1.83 times](https://github.com/axolotl-ai-cloud/axolotl/issues/3608) that of one GPU. With a
# single document its loss is [bitwise right](https://github.com/axolotl-ai-cloud/axolotl/pull/3867), and nothing shows.
#
# **Take a row like this lesson's for your own test**, and compare loss *and* gradient with each document alone. A program may have
# the right loss and still combine the ranks' gradients wrongly, as in [lesson 14](14_training.ipynb).
#
# ## 10 · ringlab takes the test
#
# In this program, `row.packing.mask()` is the right mask of section 2, and a `Context` gives the decoder its ring, layout, mask and
# positions. Comments say which lines avoid which mistakes.

# %%
def step(ring, layout):
    """This rank's share of the loss, and the gradients of all weights."""
    model = copy.deepcopy(decoder)
    tokens = torch.from_numpy(row.tokens)[None]
    # B and F: `shard` makes labels and positions in the whole row, then cuts. Labels are given
    # unshifted; `shard` shifts them within documents.
    part = row.packing.shard(layout, ring.rank, input_ids=tokens, labels=tokens)
    positions = part["position_ids"][0]
    # C and E: the mask has the bounds of the whole row.
    context = Context(ring, layout, mask=row.packing.mask(), position_ids=positions)
    # A: all ranks' labels are counted before a rank divides.
    count = ring.all_reduce((part["labels"] != IGNORE).sum())
    logits = model(part["input_ids"], context)[0]
    loss = F.cross_entropy(logits, part["labels"][0], ignore_index=IGNORE, reduction="sum") / count
    loss.backward()
    return loss.item(), [ring.all_reduce(weight.grad) for weight in model.parameters()]

# %% [markdown]
# The test compares its loss and all gradients with those of `each_alone`, in the lesson's layout and two others:

# %%
reference = copy.deepcopy(decoder)
each_alone(row.words, reference).backward()
expected = [weight.grad for weight in reference.parameters()]
for layout in (row.layout, striped(16, 4), zigzag(16, 4)):
    shares, gradients = zip(*VirtualCluster(4).run(step, layout).results, strict=True)
    same = abs(sum(shares) - alone) < 1e-12
    close = all(map(partial(torch.allclose, rtol=1e-9, atol=1e-12), gradients[0], expected))
    print(f"{layout.name:10} as each word alone: loss {same}, all gradients {close}")

# %% [markdown]
# The six programs are explained, and ringlab has passed. One short section is left, which prepares the ring of the exercise.
#
# ## 11 · Parts of the mask that nobody needs
#
# On the ring, keys come by in blocks, and each block holds the keys of one rank. For each block, a rank needs only a part of the
# mask: the rows of its own queries, and the columns of these keys. The heavy lines in the pictures of the masks cut out these
# parts.

# %%
for name, mask in {"With documents": right, "Without documents": without_documents}.items():
    needed = [[r for r in range(4) if mask[np.ix_(own, owned[r])].any()] for own in owned]
    print(f"{name}, {sum(map(len, needed))} of 16 parts of the mask are needed. By rank:", *needed)

# %% [markdown]
# With documents, rank 2 needs nothing of rank 0's block and may skip the computation. Must it pass the block on? Here nobody after it needs
# the block either. In a zig-zag layout of the same row somebody does:

# %%
dealt = zigzag(16, 4)
owned_zigzag = [dealt.positions(rank) for rank in range(4)]
needed = [[r for r in range(4) if right[np.ix_(own, owned_zigzag[r])].any()]
          for own in owned_zigzag]
print("zig-zag, needed by rank:", *needed)

# %% [markdown]
# Rank 1 needs rank 2's block. It comes by way of ranks 3 and 0, and neither needs it. So a rank passes every block on.
#
# ## Recap
#
# - The borders of ranks are not those of documents. Make labels and positions in the whole row, within documents, and cut them
#   afterwards. Keep the bounds whole.
# - cu_seqlens, position ids and document ids say the same thing (if no document is empty), of the *whole row*. Divided by P,
#   cu_seqlens is right only if every document is spread over the ranks in equal parts.
# - Plain rotary embedding knows differences only: places in the row do no harm, indices in a shard do.
# - Count labels over all ranks before anybody divides. Whether each label or each document has the same weight is a choice.
# - A loss does not show whether it is right, and a low one may have lost hard labels. Compare with each document alone, on a
#   row like this lesson's. To find a wrong mask, change each token in turn and see which outputs move.
#
# ## Self-check
#
# <details><summary>1. A library's test stripes four documents of 512 tokens over four ranks and passes. Which bug of this lesson can it not
# see?</summary>Divided bounds: every rank has equally many tokens of each document. (The mean of the ranks' means it can see: all
# four last tokens lie on rank 3, which has fewer labels.)</details>
#
# <details><summary>2. Why did cutting first lose three labels with contiguous shards, and spoil all twelve with striped ones?</summary>A
# label is lost or replaced wherever the next token of the word is on another rank. In a striped shard it always is.</details>
#
# <details><summary>3. Position ids count through the whole row. When does it matter?</summary>Not for plain rotary embedding. It does
# for learned positions, and for rotary embeddings whose frequencies depend on the largest position.</details>
#
# Now [exercise 18](../exercises/18_packed_batches.ipynb): bounds, shards, the ring, and the weights of the loss.
