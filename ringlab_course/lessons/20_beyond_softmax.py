# %% [markdown]
# # 20 · Rings beyond softmax
#
# **Afterwards you can** say what a rank must hear from the ranks before it; let all ranks work at once, although each needs a state from
# the rank before; and write linear attention with decay chunk by chunk, and the delta rule token by token.
#
# **You need first** [lesson 09](09_backward_ring.ipynb), what travels in a backward, and [lesson 14](14_training.ipynb), layers around
# attention.
#
# **Minutes** 75 to read and run; the exercise takes another 75.
#
# Qwen3-Next has 48 layers. Twelve of them have softmax attention, and their keys and values go around a ring, as in lesson 05. The other
# 36 have *linear attention*. Such a layer keeps no keys and values. It keeps one small matrix for each head, the **state**, and each rank
# hands its state to the next rank. Below is one layer of each kind, for a sequence of 1,048,576 tokens on 8 ranks.

# %%
import torch

from ringlab import VirtualCluster, contiguous
from ringlab.comm.virtual.cluster import Costs
from ringlab.cost.hardware import hardware
from ringlab.cost.models import model
from ringlab.cost.scan_traffic import (
    LinearAttention,
    attend_flops,
    passage_flops,
    rounds,
    scan_traffic,
)
from ringlab.scan import plain
from ringlab.scan.attention import linear_attention
from ringlab.scan.graph import SCANS
from ringlab.viz.style import show
from ringlab_course import compare, corpus, predict
from ringlab_course.figures import scan_view

# %%
P, length = 8, 2**20
linear, softmax = model("qwen3-next-80b-a3b").kinds
block = softmax.attention().block_bytes_per_token * length // P
layer = LinearAttention(H=linear.H, D=linear.D, Dv=linear.value_dim)
sizes = P, block, layer.state_bytes
show(scan_view.beside(*sizes), scan_view.describe_beside(*sizes))

# %% [markdown]
# A state is 128 times smaller than a block, and it makes one hop, not seven. But there is a catch. On the left all ranks work at the same
# time. On the right rank 7 waits for the state of rank 6, and rank 6 waits for that of rank 5. **Eight GPUs stand in a queue. Is that any faster
# than one GPU?**
#
# ## 1 · A table in place of a cache
#
# First we need to know what the state is. (Section 12 asks whether one matrix can stand for a million keys and values.)
#
# Here **S is the state**. The number of tokens, S in other lessons, is N.
#
# Softmax attention weighs a value by $e^{q \cdot k}$, over the sum of all such weights. Drop the exponential and the division: the weight
# is $q \cdot k$ itself. Then brackets can move:
#
# $$\sum_{j \le i} (q_i \cdot k_j)\, v_j^\top = q_i^\top \Big( \sum_{j \le i} k_j v_j^\top \Big).$$
#
# On the left, query i visits all keys and values before it. The bracket on the right is one matrix, the state S. No query is in it: it depends
# only on the tokens so far. So each token *adds* its $k v^\top$ to the state, and then its query reads from the state.
#
# Here is an example that is small enough for paper, and it stays with us. Eight tokens write values under keys. We write "a ← (7, 5)" for a
# token that writes the value (7, 5) under the key a. The key a is the vector (1, 0), and the key b is (0, 1). So S is simply a table: its
# first row holds what was written under a, and its second row what was written under b. Each token's query is the key a, so each token asks
# what the table says for a.

# %%
keys, Token = {"a": (1.0, 0.0), "b": (0.0, 1.0), "c": (0.6, 0.8)}, scan_view.Token
# c and keeps are for section 2
eight = [Token("a", (7, 5)), Token("b", (4, 1)), Token("a", (3, 2)), Token("c", (10, 12)),
         Token("b", (5, 0), keeps=0.5), Token("b", (2, 1)), Token("a", (1, 6)), Token("b", (9, 3))]
K = torch.tensor([keys[token.name] for token in eight])
V = torch.tensor([token.value for token in eight]).float()
Q = K[:1].expand(8, 2)  # every token asks for a

left = (Q @ K.mT).tril() @ V  # 8 × 8 weights
S, right = torch.zeros(2, 2), []
for q, k, v in zip(Q, K, V, strict=True):  # one state
    S = S + torch.outer(k, v)
    right.append(S.mT @ q)
print("the two sides agree:", torch.allclose(left, torch.stack(right)))
print("token 2 has written a ← (3, 2), asks for a, and hears", tuple(right[2].tolist()))

# %% [markdown]
# The right side never looked back at an earlier token. The state stays as large as a single $k v^\top$, however many tokens it has read.
#
# But token 2 does not hear (3, 2). It hears (7, 5) + (3, 2), because token 0 also wrote under a. The plain sum overwrites nothing,
# so it makes a poor memory.
#
# ## 2 · Forget, correct, write, read
#
# In models such as Qwen3-Next a token therefore does four things to the state, in this order:
#
# 1. it **forgets**: the state is multiplied by a *decay* $\alpha_t \le 1$;
# 2. it **corrects**: it reads what the state says for its key, and takes $\beta_t \le 1$ of that answer out again,
#    under the same key;
# 3. it **writes** its value, times $\beta_t$, under its key;
# 4. its query **reads**.
#
# All keys have length 1. In our example every β is 1. So token 2 subtracts (7, 5) from row a, writes (3, 2), and then it hears (3, 2).
#
# Steps 2 and 3 together are the *delta rule*: the token writes only the difference between its value and what the state already says. All
# four are the [gated delta rule](https://arxiv.org/abs/2412.06464).

# %%
def token(state, q, k, v, alpha, beta):
    """The state after one token, and the token's output."""
    state = alpha * state
    said = state.mT @ k  # what the state says for this key
    state = state + beta * torch.outer(k, v - said)
    return state, state.mT @ q

# %% [markdown]
# Now the eight tokens lie on four ranks, two on each. Token 4 first forgets half of the state. No other token forgets anything. Token 3
# writes under a third key, c = (0.6, 0.8), which lies between a and b. Below is the state after each rank, once for the plain sum, which
# ignores the forgetting, and once for the four steps.

# %%
def through(state, rank):
    """The state after this rank's two tokens."""
    for t in (2 * rank, 2 * rank + 1):
        state, _ = token(state, Q[t], K[t], V[t], eight[t].keeps, 1.0)
    return state


handed_on = [through(torch.zeros(2, 2), 0)]
for rank in (1, 2, 3):
    handed_on.append(through(handed_on[-1], rank))
summed = [K[:n].mT @ V[:n] for n in (2, 4, 6, 8)]
rows = {"plain sum": [S.tolist() for S in summed], "four steps": [S.tolist() for S in handed_on]}
note = 3, "c has changed both rows"
show(scan_view.states(eight, 4, rows, note), scan_view.describe_states(eight, 4, rows, note))

# %% [markdown]
# Look at the lower row. On rank 1, a ← (3, 2) replaces the old row a, so the table holds (3, 2) and (4, 1). Then comes c ← (10, 12):
#
# - For c the table says 0.6 · (3, 2) + 0.8 · (4, 1) = (5, 2).
# - The difference to (10, 12) is (5, 10), and this is written.
# - Since c lies between a and b, 0.6 of it is added to row a, and 0.8 of it to row b. They become (6, 8) and (8, 9).
#
# Now a query c reads exactly (10, 12). But a query a no longer reads (3, 2). The key c is at right angles to neither a nor b, so a write
# under c disturbs both rows.
#
# ## 3 · The queue of ranks
#
# Back to the eight ranks of the first picture. Each has one stretch of the sequence: rank 0 the first, rank 7 the last. The first token of a
# stretch needs the state after all tokens before it. The plain way to get it is a *relay*: rank 0 goes through its stretch and sends its
# state to rank 1; rank 1 does the same, and so on.
#
# We try it on 256 tokens, with two heads of 16 numbers. Queries, keys and values are those of real text; decays and β are random.
# `plain.recurrence` is our function `token` in a loop, for all heads at once. It gives us the outputs of one process, `whole`. Each rank of
# the relay calls it with its own tokens and the state that it received. From here on the code takes g = log α, since decays
# multiply and logarithms add.

# %%
N, D = 256, 16
draw = torch.Generator().manual_seed(20)
q, k, v = (x.double() for x in corpus.qkv(N, heads=2, head_dim=D))
g, beta = torch.rand(2, 1, 2, N, generator=draw, dtype=torch.float64)
g = -0.2 * g  # log α, never above 0
text = q, k / k.norm(dim=-1, keepdim=True), v, g, beta
nothing = torch.zeros(1, 2, D, D, dtype=torch.float64)
whole, last = plain.recurrence(*text, nothing, 1.0)  # 1.0: nothing scales q · k


def relay(ring, layout):
    """This rank's outputs: receive the state, go through this rank's stretch, send the state on."""
    own, state = [layout.shard(x, ring.rank, dim=2) for x in text], nothing.clone()
    if ring.rank > 0:
        (state,) = ring.comm.exchange(receive=(state,), source=ring.rank - 1).wait()
    out, state = ring.compute("outputs", plain.recurrence, *own, state, 1.0)
    if ring.rank < ring.world_size - 1:
        ring.comm.exchange(send=(state,), to=ring.rank + 1).wait()
    return out

# %% [markdown]
# When are the eight ranks done? Compare them with one GPU that goes through all eight stretches.

# %% tags=["nbval-ignore-output"]
predict(
    "20.relay",
    "Eight ranks in a relay, or one GPU with all eight stretches: which is done first?",
    ["the eight ranks", "both at the same time", "the one GPU"],
)

# %% [markdown]
# The virtual clock is that of lesson 05: going through a stretch takes 1 s, and a message takes ½ s. So one GPU alone takes 8 s.

# %%
even = contiguous(N, P)
handed = VirtualCluster(P).run(relay, even)
print("the outputs of one process:", torch.allclose(even.unshard(handed.results, dim=2), whole))
charts = {"Relay": handed.trace}
show(scan_view.timeline(charts, alone=8.0), scan_view.describe_timeline(charts))
done = max(event.end for event in handed.trace.computes())
first = "the eight ranks" if done < 8 else "the one GPU" if done > 8 else "both at the same time"
compare("20.relay", first)

# %% [markdown]
# An arrow is a state on its way. The outputs are right, and eight ranks are **slower than one**. At most one rank works at any time, and
# the seven messages come on top. The ranks share the memory and the work, but they work one after the other. So a small message alone is no
# gain.
#
# <details><summary>Could rank 0 not begin the next layer meanwhile, or rank 1 after the first head?</summary>We count one layer alone. Of
# several linear layers in a row, rank 0 could begin the next one meanwhile. But a softmax layer, in Qwen3-Next every fourth one, brings all
# ranks together again. And a GPU computes all heads at once. If it took one head after the other, most of the GPU would have nothing to
# do.</details>
#
# Why does a rank wait? It has all its tokens. It lacks only the state before them. Could it do something useful *for any state*, before it
# knows which one will come?
#
# ## 4 · What a stretch does to any state
#
# The first three steps of a token change the state. After the decay the state is αS. For the key k it says $\alpha S^\top k$. The
# correction subtracts a share β of that at k: $-\beta\, k\, (\alpha S^\top k)^\top$. The write adds $\beta\, k v^\top$. In one formula:
#
# $$S \mapsto \alpha\,(I - \beta\, k k^\top)\, S + \beta\, k v^\top .$$
#
# It is a matrix times S, plus a matrix. A second token does the same to the result, so after it we have once more a matrix times S, plus a
# matrix. However long a stretch is, it makes
#
# $$S \mapsto A\, S + B$$
#
# of *any* state S. The pair (A, B) is the **transition** of the stretch; that of rank r is $T_r = (A_r, B_r)$. (ringlab's code calls
# it a *passage*.) A says what the stretch leaves of the old state, and B what is left of its own writes. Both depend on the stretch's own
# tokens alone. So **every rank can compute its transition before it has heard anything.**
#
# ## 5 · How a rank finds A and B
#
# A rank tries its tokens on two states. From zeros, S = 0, the result is B. From the unit matrix, S = I, it is A + B, and the rank subtracts
# B. Both runs can go side by side in one pass. Here are the four ranks of our example.

# %%
pairs = []
for rank in range(4):
    B = through(torch.zeros(2, 2), rank)
    A = through(torch.eye(2), rank) - B
    pairs.append((A, B))
drawn = [(A.tolist(), B.tolist()) for A, B in pairs]
show(scan_view.transitions(eight, drawn), scan_view.describe_transitions(eight, drawn))

# %% [markdown]
# A has a column for each row of the old state:
#
# - Ranks 0 and 3 overwrite both rows, so their A is zero.
# - Rank 1 overwrites row a, so the column "old a" is zero. Then c reads 0.8 of the old row b, and subtracts it under the key (0.6, 0.8).
#   From row b this takes 0.8 · 0.8 = 0.64 of the old row b, so 0.36 is left. From row a it takes 0.6 · 0.8 = 0.48 of the
#   old row b, so −0.48 stands there.
# - Rank 2 leaves half of row a, and overwrites row b.
#
# Check rank 1. The state of rank 0, with rows (7, 5) and (4, 1), enters it. Row a of $A_1 S + B_1$ is −0.48 · (4, 1) + (7.92, 8.48) =
# (6, 8), and row b is 0.36 · (4, 1) + (6.56, 8.64) = (8, 9), as in section 2.
#
# Each B is what is left of one rank's own writes. So could rank r just add the B of all ranks before it, to get the state that enters?

# %% tags=["nbval-ignore-output"]
predict(
    "20.adding",
    "Add up all earlier B. On which of the four ranks is this the state that enters?",
    ["on none", "on rank 0", "on ranks 0 and 1", "on all"],
)

# %%
zeros = torch.zeros(2, 2)
enters = [zeros, *handed_on[:3]]  # what the relay brings
right = [torch.allclose(sum((B for _, B in pairs[:rank]), zeros), enters[rank], atol=1e-5)
         for rank in range(4)]
print("the sum is right on ranks", [rank for rank in range(4) if right[rank]])
compare("20.adding", {0: "on none", 1: "on rank 0", 2: "on ranks 0 and 1", 4: "on all"}[sum(right)])

# %% [markdown]
# It is right on ranks 0 and 1 only, so a test with two ranks would find nothing. On rank 2 the sum still holds a ← (7, 5) of rank 0, which
# rank 1 has overwritten. The sum leaves out A: rank 1 keeps only $A_1 B_0$ of what rank 0 wrote. So A must travel as well.
# That is affordable: it is D × D, however many tokens there are. How do ranks put these pairs together?
#
# ## 6 · Brackets move again
#
# Two stretches, (A, B) and then (A′, B′), have a transition as well: together they make $A' (A S + B) + B'$. Write ∘ for "after":
#
# $$(A', B') \circ (A, B) = (A' A,\; A' B + B').$$
#
# The later stretch stands on the left, as in a product of matrices. Now take three ranks. From zeros, ranks 0 to 2 together make the state
# that enters rank 3.

# %% tags=["nbval-ignore-output"]
predict(
    "20.order",
    "Which of these give, as their B, the state that enters rank 3?  "
    "T₂ ∘ (T₁ ∘ T₀),  (T₂ ∘ T₁) ∘ T₀,  T₁ ∘ (T₂ ∘ T₀)",
    ["the first", "the first and the second", "all three"],
)

# %%
def after(later, earlier):
    """The transition of two stretches, `earlier` and then `later`."""
    (A_later, B_later), (A, B) = later, earlier
    return A_later @ A, A_later @ B + B_later


T_0, T_1, T_2, _ = pairs
ways = {"T₂ ∘ (T₁ ∘ T₀)": after(T_2, after(T_1, T_0)),
        "(T₂ ∘ T₁) ∘ T₀": after(after(T_2, T_1), T_0),
        "T₁ ∘ (T₂ ∘ T₀)": after(T_1, after(T_2, T_0))}
right = [torch.allclose(B, enters[3], atol=1e-5) for _, B in ways.values()]
for name, is_right in zip(ways, right, strict=True):
    print(f"{name}   is the state that enters rank 3: {is_right}")
compare("20.order", ["", "the first", "the first and the second", "all three"][sum(right)])

# %% [markdown]
# The order matters: transitions do **not commute**. The third line lets rank 2 come before rank 1. But the brackets do not matter:
# transitions are **associative**. The first two lines are the same journey, through ranks 0, 1 and 2. They differ only in which two were
# put together first.
#
# The second line is the way out of the queue. T₂ ∘ T₁ needs no state, and nothing from rank 0.
#
# ## 7 · Doubling
#
# Every rank wants the composition of all transitions before it. An operation that gives it to every rank is called a **scan**. *Doubling*
# does it in few rounds. In round 1 every rank sends what it knows to the next rank, if there is one. In round 2 it sends to the rank two
# places further on, and in round 3 to the rank four places further on. So with each round a rank knows of up to twice as many ranks.
#
# In the picture every rank has a strip with eight places, one for each rank. A place is coloured when the rank knows of that rank's tokens.

# %%
held = scan_view.known(SCANS["doubling"](P), P)
show(scan_view.doubling(held, 5), scan_view.describe_doubling(held, 5))

# %% [markdown]
# Follow the thick arrows to rank 5. In round 1 it hears of rank 4. In round 2 it hears from rank 3, which by then knows of ranks 2 and 3.
# In round 3 it hears from rank 1, which knows of ranks 0 and 1. Three rounds are enough for eight ranks, and ⌈log₂ P⌉ for P ranks.
#
# A rank wants to know of the ranks *before* it, but later ranks must hear of its own tokens, too. So it keeps two compositions:
#
# - *before* leaves its own tokens out. This is what it wants in the end. At first it is (I, 0), the transition that changes nothing.
# - *all* includes its own tokens. This is what it sends. At first it is the rank's own transition.
#
# A message m comes from earlier tokens, and the earlier stretch stands on the right. So *before* becomes before ∘ m, and *all* becomes
# all ∘ m. Here are both on rank 5, and above them what arrives, round by round.

# %%
show(scan_view.kept(held, 5), scan_view.describe_kept(held, 5))

# %% [markdown]
# At the end, the B of *before* is the state that enters: the sequence begins with zeros, and A · 0 + B = B.
#
# Back to the eight tokens. Four ranks need two rounds. Here is the B of *before* after each, and below it the state that the relay brings
# to each rank.

# %%
relayed = [state.tolist() for state in enters]
show(scan_view.entering(eight, drawn, relayed), scan_view.describe_entering(eight, drawn, relayed))

# %% [markdown]
# The states are the very same. But no rank had to wait for a state before it began its work.
#
# Check row a of rank 3. After round 1 its *before* is $T_2$. In round 2 rank 1 sends it $T_1 \circ T_0$, and the B of that has (6, 8) in
# row a. $A_2$ halves it, and $B_2$ adds nothing: 0.5 · (6, 8) + (0, 0) = (3, 4).
#
# ringlab's `linear_attention` does all of this: transitions, scan, outputs. When are the eight ranks done? On the clock of section 3 either
# pass takes 1 s, and putting pairs together takes none. (Section 8 has the real numbers.)

# %%
class Clock(Costs):
    """A pass through a stretch takes a second, a message half a second, and composing no time."""

    def compute(self, rank, label, args):
        return 0.0 if label == "compose passages" else 1.0


def on_ranks(ring, layout):
    """This rank's outputs, by a scan."""
    *qkv, g, beta = (layout.shard(x, ring.rank, dim=2) for x in text)
    how = {"scan": "doubling", "scale": 1.0, "validate": False}  # True would add messages
    return linear_attention(*qkv, ring=ring, layout=layout, decay=g, beta=beta, **how)


scanned = VirtualCluster(P, costs=Clock()).run(on_ranks, even)
print("the outputs of one process:", torch.allclose(even.unshard(scanned.results, dim=2), whole))
charts = {"Relay": handed.trace, "Doubling": scanned.trace}
show(scan_view.timeline(charts, alone=8.0), scan_view.describe_timeline(charts))

# %% [markdown]
# **3.5 seconds instead of 11.5**, and instead of 8 on one GPU. First the ranks compute their transitions, all at the same time. Then three
# short rounds of messages bring every rank the state that enters it. Then all ranks compute their outputs.
#
# <details><summary>Why does rank 7 compute no transition, and could ranks 0 to 3 not begin their outputs earlier?</summary>Nobody comes
# after the last rank, so nobody needs its transition. Ranks 0 to 3 could begin earlier, but the last rank would be done no sooner.</details>
#
# There is a price: a rank goes through its stretch a second time, for A and B. But with 64 ranks the queue would take 64 passes in a row,
# and doubling still two, with six rounds.
#
# **This is a good place to stop.** You can do all stages of [the exercise](../exercises/20_beyond_softmax.ipynb) but 20.chunk. If you
# return in a fresh kernel, run all cells up to here first.
#
# ## 8 · Does the waiting matter?
#
# One question is left. Between the two passes the ranks wait for messages, and in our schedule nothing hides this time. In our picture it is
# 1.5 of 3.5 seconds. In a softmax ring most messages hide behind the attention. So is the scan too slow in a real layer?
#
# We take Qwen3-Next with the 1,048,576 tokens of the first picture on 8 GPUs, and only a slow link between them: InfiniBand. A rank's work
# includes the layer's matrices and experts. We leave out the messages that experts need, and the last three tokens of the rank before,
# which a short convolution in front of q, k and v needs.

# %% tags=["nbval-ignore-output"]
predict(
    "20.share",
    "What share of the layer's forward do the ranks spend on the messages of the scan?",
    ["about 1 %", "about 10 %", "about half"],
)

# %%
gpu, sent = hardware("h100"), scan_traffic(layer, P, "doubling")
busiest = sent.total_bytes
between = gpu.between  # a latency for each round, and the bytes
scan = rounds(P, "doubling") * between.latency_s + busiest / between.bytes_per_s
print(f"B has {layer.state_bytes / 2**20:.0f} MiB, and A {layer.transition_bytes / 2**20:.0f} MiB")
each_round = " + ".join(f"{x / 2**20:.0f}" for x in sent.by_step_bytes)
print(f"the busiest of 8 ranks sends {each_round} = {busiest / 2**20:.0f} MiB in three rounds")
print(f"the scan takes {scan * 1e3:.2f} ms")

# %% [markdown]
# The [busiest rank](../ringlab/cost/scan_traffic.py) sends A and B in two rounds, and B alone in the third. Why no A?
# After two rounds rank 3, for example, knows ranks 0 to 3. Only zeros come before rank 0, so from then on its B suffices. These 10 MiB are
# still about 180 times less than the 7 × 256 MiB of the softmax ring. Now we set the scan beside the work of the layer.

# %%
peak, bars = gpu.peak("bfloat16"), {}
for each in (131_072, 32_768, 8_192):
    matrices = 2 * each * linear.active_parameters / (peak * gpu.reached.linear)
    speed = peak * gpu.reached.attention_forward
    bars[f"{each:,} tokens on each"] = {
        "matrices and experts": matrices,
        "pass for outputs": attend_flops(layer, each) / speed,
        "pass for A and B": passage_flops(layer, each) / speed,
        "scan": scan,
    }
show(scan_view.shares(bars), scan_view.describe_shares(bars))
asked = bars["131,072 tokens on each"]
share = scan / sum(asked.values())
compare("20.share", "about 1 %" if share < 0.03 else "about 10 %" if share < 0.3 else "about half")

# %% [markdown]
# It is about 1 %: a quarter of a millisecond, next to 25 ms of work for each of these GPUs. (With the pass for A and B, which only the
# scan needs, it is 5 %.) The scan's time does not depend on the number of tokens. So its share
# grows where a rank has few tokens: with 8,192 on each rank it is 14 %.
#
# <details><summary>These times are computed, not measured: from which speeds?</summary>They are in ringlab's table of an H100. The peak is 989 TFLOP/s in 16 bits, from NVIDIA's white paper. The matrices run at
# 80 % of it, the lower end of what [arXiv 2307.08691](https://arxiv.org/abs/2307.08691) says of matrix products. That the linear attention
# runs at 65.5 % is an **assumption**: FlashAttention-3 reaches it in the forward, with head dim 128 and no mask ([arXiv 2407.08608](https://arxiv.org/abs/2407.08608)). The link's 50 GB/s are
# from its data sheet, and its 14 µs before the first byte of each round from NCCL's tuning model. Both passes are counted in chunks of 64 tokens
# (section 10).</details>
#
# Matrices and experts need no state, so a queue does not slow them. We therefore compare twice, the linear attention alone and then the
# whole layer: with the queue of section 3, on one GPU, and with the scan.

# %%
matrices, outputs, extra, _ = asked.values()
alone = P * outputs
queue = alone + (P - 1) * (between.latency_s + layer.state_bytes / between.bytes_per_s)
table = {"linear attention": (queue, alone, extra + scan + outputs),
         "the whole layer": (matrices + queue, P * matrices + alone, sum(asked.values()))}
print(f"{'':17}{'queue':>8}{'one GPU':>10}{'scan':>8}   (ms)")
for name, times in table.items():
    print(f"{name:17}{times[0] * 1e3:8.1f}{times[1] * 1e3:10.1f}{times[2] * 1e3:8.1f}")
print(f"the pass for outputs takes {outputs * 1e3:.2f} ms, that for A and B {extra * 1e3:.2f} ms,")
print(f"and the scan {scan * 1e3:.2f} ms")

# %% [markdown]
# The puzzle is solved. For the linear attention of a single layer, a queue of eight GPUs is slower than one GPU, at real size as on our
# clock. The whole layer is faster on eight GPUs even with the queue, but then linear attention would be a quarter of its time. Transitions
# need no state, and can be put together in any brackets. So with a scan eight GPUs work at once. They pay with a second pass, which here
# takes more time than the scan.
#
# ## 9 · Four kinds of A
#
# Of the 10 MiB that the busiest rank sends, 4 are for A. Not every model needs them, because not every model corrects, and not every model
# forgets:
#
# - In plain linear attention A is the unit matrix. In RetNet each head has one fixed decay. In both, every rank knows A already, so only B
#   travels.
# - In Mamba-2 each token has a decay of its own, one for each head. A is the product of the decays: one number.
# - In GLA each entry of the keys has its own decay, so each row of the state decays by itself. A is a diagonal.
# - With the delta rule each token multiplies by $I - \beta k k^\top$. The product over a stretch is a full matrix.

# %%
kinds = {
    "nothing": ["Linear attention", "RetNet"],  # arXiv 2006.16236, 2307.08621
    "a number": ["Mamba-2"],  # arXiv 2405.21060
    "a diagonal": ["GLA"],  # arXiv 2312.06635
    "a matrix": ["DeltaNet", "Qwen3-Next"],  # arXiv 2406.06484, 2412.06464
}
show(scan_view.kinds(kinds), scan_view.describe_kinds(kinds))
numbers = LinearAttention(H=layer.H, D=layer.D, Dv=layer.Dv, delta=False)  # A: a number per head
print(f"with one number for A: {scan_traffic(numbers, P, 'doubling').total_bytes / 2**20:.0f} MiB")

# %% [markdown]
# Qwen3-Next has the largest kind. With heads of the same size Mamba-2 would send 6 MiB in place of 10. The queue and the scan are the same
# for all four kinds.
#
# ## 10 · Chunks: the queue of tokens
#
# Inside a rank there is a second queue. A rank has thousands of tokens, and the loop of section 2 takes one after the other. So cut the stretch
# into *chunks* of, say, 64 tokens, and hand a state from chunk to chunk. Between chunks a queue remains, 64 times shorter. Inside a chunk all
# tokens are computed at once, as with softmax.
#
# Here is a chunk of four tokens that forget and write, but do not correct. Read a row from left to right: when this
# token reads, how much is left of the state that entered, and of each write?

# %%
alphas = (0.5, 0.9, 0.8, 0.5)
show(scan_view.survival(alphas), scan_view.describe_survival(alphas))

# %% [markdown]
# The state that enters has met the decays of all tokens up to the one that reads: the column **e**. A write has met only the decays after
# it: the triangle **E**. To get a row of E, multiply the row above by the token's own α, and append a 1. The state that leaves keeps all that
# the last token can still read: the last number of e, here $e_3$, and the last row of E, which we call **f** (bottom row).
#
# Let our first four tokens forget like this, and let a state enter that has a 1 in every place. Token 1 asks for a. Of
# the state 0.45 is left, and 0.9 of a ← (7, 5). Its own write lies under b, so a query a hears nothing of it. Token 1 hears
# 0.45 · (1, 1) + 0.9 · (7, 5) = (6.75, 4.95).
#
# For a whole chunk of C tokens this is one line of matrices. A second line is the state that leaves:
#
# $$O = (E \odot QK^\top)\,V + e \odot (Q\,S),$$
#
# $$S' = e_{C-1}\, S + (f \odot K)^\top V .$$
#
# Here ⊙ multiplies number by number, and e ⊙ and f ⊙ multiply row i by $e_i$ or $f_i$. So a chunk is a few products of matrices. The second
# line is A S + B once more, and A is one number, as in Mamba-2.

# %%
e = torch.tensor([0.5, 0.45, 0.36, 0.18])  # e and E as in the picture
E = torch.tensor([[1, 0, 0, 0], [0.9, 1, 0, 0], [0.72, 0.8, 1, 0], [0.36, 0.4, 0.5, 1]])
S, q4, k4, v4 = torch.ones(2, 2), Q[:4], K[:4], V[:4]
outputs = (E * (q4 @ k4.mT)) @ v4 + e[:, None] * (q4 @ S)
leaves = e[-1] * S + (E[-1][:, None] * k4).mT @ v4
loop = []
for alpha, query, key, value in zip(alphas, q4, k4, v4, strict=True):  # token by token
    S = alpha * S + torch.outer(key, value)
    loop.append(S.mT @ query)
print("token 1 hears", tuple(round(x, 4) for x in outputs[1].tolist()))
print("the four outputs and the state of the loop:",
      torch.allclose(outputs, torch.stack(loop)) and torch.allclose(leaves, S))

# %% [markdown]
# With the delta rule a token writes the difference to what the state says, and this depends on the earlier writes in the chunk. One
# triangular system of equations per chunk finds all these differences ([arXiv 2406.06484](https://arxiv.org/abs/2406.06484)). Put β times
# these differences in place of V, and both lines hold. But the differences contain S, so the second line is no longer one number times S: A
# is a full matrix.
#
# ringlab's `plain.by_chunks` has the delta rule. ([Its source](../ringlab/scan/plain.py) is for after the exercise.) We compare it with the
# loop over 256 tokens. Why do we take chunks of 64 tokens, and not one chunk of all?

# %%
print("chunk   steps in a row   numbers of E for each token   as the loop")
for chunk in (1, 16, 64, 256):
    by_chunk, end = plain.by_chunks(*text, nothing, 1.0, chunk)
    same = torch.allclose(by_chunk, whole) and torch.allclose(end, last)
    print(f"{chunk:5}{N // chunk:17}{chunk:30}{same!s:>14}")

# %% [markdown]
# Short chunks leave a long queue. In a long chunk each token has a long row of E: one chunk of all tokens is the work of softmax again.
# Chunks of 64 keep both small.
#
# ## 11 · Backward
#
# For training a layer needs gradients, and gradients come from later tokens. So in the backward the ranks hand them on **from the last
# rank to the first**. A stretch receives dS, the gradient of the state that leaves it. It passes on the gradient of the state that entered,
# and this has two parts:
#
# $$A^\top dS + G .$$
#
# The first part comes back from later ranks, through A, which the rank knows from the forward. Only G is new. It comes from the stretch's
# own outputs. Outputs are linear in S, apart from a term without S. So their gradient does not depend on S: a rank finds G before any state
# has come. Rank 1 of our example shows it, with random gradients:

# %%
draw = torch.Generator().manual_seed(20)
S, dstate, douts = torch.randn(3, 2, 2, generator=draw)  # dstate: dS; douts: of two outputs


def passed_on(S, dstate):
    """The gradient of the state S that enters rank 1, by autograd."""
    state = entered = S.clone().requires_grad_()
    loss = 0.0
    for t, do in zip((2, 3), douts, strict=True):
        state, out = token(state, Q[t], K[t], V[t], 1.0, 1.0)
        loss = loss + out @ do
    return torch.autograd.grad(loss + (state * dstate).sum(), entered)[0]


(A, _), G = pairs[1], passed_on(zeros, zeros)  # G: found without S, and without dS
print("the gradient that rank 1 passes on is AᵀdS + G:",
      torch.allclose(passed_on(S, dstate), A.mT @ dstate + G, atol=1e-5))

# %% [markdown]
# So $(A^\top, G)$ is a transition again, and the backward is the same scan in the reverse order.
#
# What happens if the reverse scan is missing? Each of four ranks gets the right entering state, and takes dS for zero.

# %% tags=["nbval-ignore-output"]
predict(
    "20.reverse",
    "The forward is right, and every rank takes dS for zero. On which of the four ranks are the "
    "gradients of v right?",
    ["on none", "on the first", "on the last", "on all"],
)

# %%
dout = torch.randn(v.shape, generator=draw, dtype=torch.float64)


def gradients(tokens, state, dout, dstate):
    """The gradients of q, k, v, g, β and of the entering state, and the state that leaves."""
    leaves = [x.clone().requires_grad_() for x in (*tokens, state)]
    out, leaving = plain.recurrence(*leaves, 1.0)
    return torch.autograd.grad((out, leaving), leaves, (dout, dstate)), leaving.detach()


def backward(dstates):
    """On which ranks gradients are right, and what each rank passes on, if dS is dstates[rank]."""
    state, passes = nothing, []
    right = {name: [] for name in ("q", "k", "v", "g", "β")}
    for rank in range(4):
        own = slice(rank * N // 4, (rank + 1) * N // 4)
        mine = [x[:, :, own] for x in text]
        found, state = gradients(mine, state, dout[:, :, own], dstates[rank])
        for name, x, true in zip(right, found[:5], expected[:5], strict=True):
            if torch.allclose(x, true[:, :, own]):
                right[name].append(rank)
        passes.append(found[5])
    return right, passes


expected, _ = gradients(text, nothing, dout, nothing)
right, G = backward([nothing] * 4)  # with dS = 0 a rank passes on its G
for name, ranks in right.items():
    print(f"the gradients of {name} are right on ranks {ranks}")
compare("20.reverse", {0: "on none", 1: "on the last", 4: "on all"}[len(right["v"])])

# %% [markdown]
# Nobody comes after the last rank, so its dS is zero. And the gradients of q need only the state that enters.
#
# Another mistake is to leave out A: each rank takes the sum of all later G for dS, as in section 5 it added up all earlier B.

# %%
right, _ = backward([sum(G[rank + 1 :], nothing) for rank in range(4)])
print("the gradients of v are right on ranks", right["v"])

# %% [markdown]
# Now the last **two** ranks are right: the rank before the last needs the last rank's G, and no A. Once more a test with two ranks would
# find nothing.
#
# Remember both symptoms. If gradients of k, v, g and β are right on the last rank alone, dS is missing or G is wrong. (In
# [one library](https://github.com/fla-org/flash-linear-attention/issues/1115) decays were once loaded wrongly in the backward. The forward
# was exact, and gradients were wrong on all ranks but the last.) If they are right on the last two, look at A.
#
# ## 12 · How much a table holds
#
# The state of a real head is such a table with 128 × 128 numbers. How many pairs of a key and a value can it hold, before one disturbs
# another? We try it with a smaller state of 16 × 16 numbers. Keys and values are random, and keys have length 1. The plain sum and
# the delta rule go through the pairs once. Beside them is the best state that there is, found by least squares. Each error is a mean over
# 50 draws.

# %% tags=["nbval-ignore-output"]
predict(
    "20.fits",
    "The best state of 16 × 16 numbers: how many pairs of a key and a value, of 16 numbers each, "
    "can it give back without an error?",
    ["8", "16", "128", "256"],
)

# %%
def recall_errors(n, D=16, draws=50):
    """Mean error of values read back, over their length: plain sum, delta rule, best state."""
    draw, means = torch.Generator().manual_seed(20), []
    for _ in range(draws):
        keys, values = torch.randn(2, n, D, generator=draw, dtype=torch.float64)
        keys, delta = keys / keys.norm(dim=1, keepdim=True), torch.zeros(D, D).double()
        for key, value in zip(keys, values, strict=True):
            delta, _ = token(delta, key, key, value, 1.0, 1.0)
        best = torch.linalg.lstsq(keys, values).solution
        errors = [keys @ state - values for state in (keys.mT @ values, delta, best)]
        means.append([(x.norm(dim=1) / values.norm(dim=1)).mean().item() for x in errors])
    return [sum(column) / draws for column in zip(*means, strict=True)]


stored = [1, 2, 4, 8, 12, 16, 17, 24, 32]
errors = {"plain sum": [], "delta rule, once through": [], "the best state": []}
for n in stored:
    for name, error in zip(errors, recall_errors(n), strict=True):
        errors[name].append(error)
show(scan_view.recall(stored, errors, 16), scan_view.describe_recall(stored, errors, 16))
exact = max(n for n, error in zip(stored, errors["the best state"], strict=True) if error < 1e-9)
compare("20.fits", str(exact))

# %% [markdown]
# At best a state of D × D numbers gives back **D** pairs exactly: there are no more than D independent keys. The delta rule, which goes
# through the pairs once, blurs all but the last. Beyond 16 pairs the plain sum is even worse than a state of zeros, which gives back nothing.
#
# So a real head, with D = 128, gives back at most 128 pairs exactly, if their values are arbitrary. A long text may write a million. This is
# probably why models such as Qwen3-Next keep some softmax layers. These send far more, but forget nothing.
#
# Ring and scan have one thing in common: each rank adds its part, and parts are put together in any brackets. In the ring it is the merge of
# the online softmax (lesson 02) that allows this, and in the scan it is ∘.
#
# ## Recap
#
# - Without the exponential, all keys and values fold into one state of D × D numbers for each head.
# - A token forgets, corrects, writes and reads. A stretch of tokens makes A S + B of any state S.
# - Handed on in a relay, states make ranks wait for each other. A transition (A, B) can be computed before any state has arrived.
# - Transitions are associative, but do not commute. So a scan brings every rank its state: by doubling, in ⌈log₂ P⌉ rounds.
# - What travels does not grow with the sequence. With 131,072 tokens on each rank the scan takes about 1 % of its layer.
# - Inside a rank, chunks make the queue of tokens shorter, for more work per token.
# - The backward is a scan from the last rank to the first.
# - At best a state of D × D numbers gives back D pairs exactly.
#
# ## Self-check
#
# <details><summary>1. Somebody adds up the B of all earlier ranks by a sum over ranks. When is that right?</summary>Without decay and without
# the delta rule: then every A is the unit matrix. And on two ranks always.</details>
#
# <details><summary>2. Gradients of v are right on the last rank and wrong on all others, and those of q are right everywhere. What is
# missing or wrong?</summary>The gradient of the state from later ranks is missing, or G is wrong. If only A were wrong, the rank before the
# last would be right as well.</details>
#
# <details><summary>3. In doubling, why does a rank keep both <em>all</em> and <em>before</em>?</summary>Later ranks need to know of its own tokens too, so it
# sends <em>all</em>. Its own tokens must not be in the state that enters it, so it needs <em>before</em>.</details>
#
# <details><summary>4. Tokens are packed (lesson 18), and a document begins on rank r. The old document's state must not enter it. What is A of rank
# r?</summary>Zero: the state is set to zeros where the document begins, as by a decay of 0. So nothing from before passes this rank.</details>
#
# <details><summary>5. Softmax layers are dealt in a zig-zag (lesson 08). Does this balance a linear layer, too?</summary>It is balanced already: a token costs
# the same wherever it stands. A zig-zag only makes more stretches: two on each rank.</details>
#
# Now build it: [exercise 20](../exercises/20_beyond_softmax.ipynb), a chunk, a transition, the scan, and the layer.
