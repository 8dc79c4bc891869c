# %% [markdown]
# # 20 · Rings beyond softmax
#
# **Afterwards you can** write linear attention with decay chunk by chunk, and the delta rule token by token; say what a rank must
# hear from the ranks before it; and let all ranks work at once although each needs the state of the one before.
#
# **You need first** [lesson 09](09_backward_ring.ipynb), what travels in a backward, and [lesson 14](14_training.ipynb), layers around
# attention.
#
# **Minutes** 75 to read and run; the exercise takes another 75.
#
# Qwen3-Next has 48 layers. Twelve of them have softmax attention, and their keys and values go around a ring, as in lesson 05. The other
# 36 have *linear attention*. Such a layer keeps no keys and values. It keeps one small matrix for each head, the **state**, and a rank
# hands its state to the next rank once. Below is one layer of each kind, for a sequence of 1,048,576 tokens on 8 ranks.

# %%
import torch

from ringlab import VirtualCluster, contiguous
from ringlab.comm.virtual.cluster import Costs
from ringlab.cost.hardware import hardware
from ringlab.cost.models import model
from ringlab.cost.scan_traffic import LinearAttention, rounds, scan_flops, scan_traffic
from ringlab.cost.traffic import ring_traffic
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
# (A red square holds the states of all 32 heads.) The small squares raise two questions. How can 2 MiB stand for the keys and values of a million tokens? And are they worth it? In the ring
# all ranks work at the same time. On the right, rank 7 waits for the state of rank 6, and rank 6 for that of rank 5. **Are eight GPUs in a
# queue any faster than one?** At the end of this lesson all eight work at once, and still no more than such squares travel.
#
# ## 1 · A table in place of a cache
#
# In this lesson **S is the state**, and N is the number of tokens. (In the other lessons S is the number of tokens.)
#
# Softmax attention weighs a value by $e^{q \cdot k}$, over the sum of all such weights. Let the weight be $q \cdot k$ itself, without the
# exponential and without the sum to divide by. Then brackets can move:
#
# $$\sum_{j \le i} (q_i \cdot k_j)\, v_j^\top = q_i^\top \Big( \sum_{j \le i} k_j v_j^\top \Big).$$
#
# On the left, query i visits all keys and values before it. The bracket on the right is one matrix, the state S. It does not depend on the
# query. So each token can *add* its $k v^\top$ to the state, and its query can read from the state at once.
#
# Here is an example for paper, which stays with us. Eight tokens each write a value of two numbers under a name: the first writes a = (3, 1).
# The name is the key. Let a be (1, 0), and let b be (0, 1). Then S is a table with two rows: the first holds what was written under a, and the
# second what was written under b. A third name, c = (0.6, 0.8), lies between the two. Every token asks for a.

# %%
keys, Token = {"a": (1.0, 0.0), "b": (0.0, 1.0), "c": (0.6, 0.8)}, scan_view.Token
eight = [Token("a", (3, 1)), Token("b", (0, 5)), Token("a", (5, 0)), Token("c", (8, -6)),
         Token("b", (2, 2), keeps=0.5), Token("b", (2, 1)), Token("c", (9, 4)), Token("b", (1, 1))]
K = torch.tensor([keys[token.name] for token in eight])
V = torch.tensor([token.value for token in eight]).float()
Q = K[:1].expand(8, 2)  # every token asks for a

left = (Q @ K.mT).tril() @ V  # 8 × 8 weights
S, right = torch.zeros(2, 2), []
for q, k, v in zip(Q, K, V, strict=True):  # one state
    S = S + torch.outer(k, v)
    right.append(S.mT @ q)
print("the two sides agree:", torch.allclose(left, torch.stack(right)))

# %% [markdown]
# Both sides agree, and the right side never looked back at an earlier token. That answers half of the first question: the state has the size
# of one key times one value, and not of all of them. But what does it give back?

# %% tags=["nbval-ignore-output"]
predict(
    "20.twice",
    "Token 0 writes a = (3, 1). Token 2 writes a = (5, 0), and asks for a. What does it hear?",
    ["(5, 0), the newer value", "(4, 0.5), their mean", "(8, 1), their sum"],
)

# %%
heard = right[2].tolist()
print("token 2 hears", heard)
compare("20.twice", {5: "(5, 0), the newer value", 4: "(4, 0.5), their mean",
                     8: "(8, 1), their sum"}[round(heard[0])])

# %% [markdown]
# It hears the *sum* of both values. A sharp softmax would have given about their mean, because its weights add up to 1. Nothing divides here,
# and nothing is ever overwritten. So the plain sum makes a poor memory.
#
# ## 2 · Forget, correct, write, read
#
# In today's models a token therefore does four things to the state, in this order:
#
# 1. it **forgets**: the state is multiplied by a *decay* $\alpha_t \le 1$, often given as its logarithm $g_t \le 0$;
# 2. it **corrects**: it reads what the state says for its key, and takes a share $\beta_t$ of that out again;
# 3. it **writes** its value, times $\beta_t$, under its key;
# 4. its query **reads**.
#
# $\beta_t$ lies between 0 and 1. Steps 2 and 3 together are the *delta rule*: only the difference to what the state says already is written.
# All four are the [gated delta rule](https://arxiv.org/abs/2412.06464), which Qwen3-Next uses. In the code `g` is the logarithm of the decay.


# %%
def token(state, q, k, v, g, beta):
    """The state after one token, and the token's output."""
    state = g.exp() * state
    said = state.mT @ k  # what the state says for this key
    state = state + beta * torch.outer(k, v - said)
    return state, state.mT @ q


# %% [markdown]
# Now the eight tokens lie on four ranks, two on each. Let β be 1. Token 4 first forgets half of the state; no other token forgets anything. Below
# is the state that each rank hands on, for the plain sum and for the four steps.

# %%
g, one = torch.tensor([token.keeps for token in eight]).log(), torch.tensor(1.0)


def through(state, rank):
    """The state after this rank's two tokens."""
    for t in (2 * rank, 2 * rank + 1):
        state, _ = token(state, Q[t], K[t], V[t], g[t], one)
    return state


handed_on = [through(torch.zeros(2, 2), 0)]
for rank in (1, 2, 3):
    handed_on.append(through(handed_on[-1], rank))
summed = [K[:n].mT @ V[:n] for n in (2, 4, 6, 8)]
rows = {"plain sum": [S.tolist() for S in summed], "four steps": [S.tolist() for S in handed_on]}
show(scan_view.states(eight, 4, rows), scan_view.describe_states(eight, 4, rows))

# %% [markdown]
# With the four steps, rank 0 hands on exactly what was written. On rank 1, a = (5, 0) replaces the old a. Then c = (8, −6) is written. Before,
# the state says 0.6 · (5, 0) + 0.8 · (0, 5) = (3, 4) for c. The difference to the new value is (5, −10). It goes to both rows, since c lies
# between a and b: 0.6 of it to a, and 0.8 of it to b. So c can be read back, but a and b have changed.
#
# That is the other half of the first question. The state of a real head has 128 × 128 numbers. How many pairs of a key and a value can it hold, so that none changes another? We try it with a smaller
# state. Keys and values are random, and keys have length 1. The delta rule goes through them once. Beside it is the best state that there is,
# found by least squares.

# %% tags=["nbval-ignore-output"]
predict(
    "20.fits",
    "The best state of 16 × 16 numbers: how many pairs of a key and a value, of 16 numbers each, "
    "can it give back without an error?",
    ["8", "16", "128", "256"],
)


# %%
def recall_errors(n, D=16):
    """Mean error of values read back, over their length: plain sum, delta rule, best state."""
    draw = torch.Generator().manual_seed(20)
    keys, values = (torch.randn(n, D, generator=draw, dtype=torch.float64) for _ in range(2))
    keys, delta = keys / keys.norm(dim=1, keepdim=True), torch.zeros(D, D, dtype=torch.float64)
    for key, value in zip(keys, values, strict=True):
        delta, _ = token(delta, key, key, value, 0 * one, one)
    best = torch.linalg.lstsq(keys, values, driver="gelsd").solution
    errors = (keys @ state - values for state in (keys.mT @ values, delta, best))
    return [(error.norm(dim=1) / values.norm(dim=1)).mean().item() for error in errors]


stored = [1, 2, 4, 8, 12, 16, 18, 24, 32]
errors = {"plain sum": [], "delta rule, once through": [], "the best state": []}
for n in stored:
    for name, error in zip(errors, recall_errors(n), strict=True):
        errors[name].append(error)
show(scan_view.recall(stored, errors, 16), scan_view.describe_recall(stored, errors))
exact = max(n for n, error in zip(stored, errors["the best state"], strict=True) if error < 1e-9)
compare("20.fits", str(exact))

# %% [markdown]
# A state of D × D numbers holds at most **D** pairs, one for each independent key. Only the best state holds them exactly; the delta rule, which goes through the tokens once, gets less. So the table of the example, with its two rows, has no room for a third name. (At an error of 1, zeros would be as good an answer.) So 2 MiB do not stand for
# a million tokens. They stand for what a head keeps of them, and the model learns what to keep. This is one reason why hybrids keep
# some softmax layers.
#
# The first question is answered, and the price is known. Now to the queue.
#
# ## 3 · The queue
#
# Cut the sequence, so that rank r has the r-th stretch of tokens. Its first token needs the state after all tokens before it, and nothing else. The plain
# way is a *relay*: rank 0 goes through its stretch and sends its state to rank 1; rank 1 does the same, and so on.
# We take 256 tokens of real text, and two heads of 16. `plain.recurrence` is our function `token` in a loop over all tokens, for all heads.
# It is the answer that the ranks must reproduce.

# %%
N, D = 256, 16
draw = torch.Generator().manual_seed(20)
q, k, v = (x.double() for x in corpus.qkv(N, heads=2, head_dim=D))
decay, beta = torch.rand(2, 1, 2, N, generator=draw, dtype=torch.float64)
text = q, k / k.norm(dim=-1, keepdim=True), v, -0.2 * decay, beta
nothing = torch.zeros(1, 2, D, D, dtype=torch.float64)
whole, last = plain.recurrence(*text, nothing, 1.0)  # no scale: 1
print("one process, token by token: outputs", tuple(whole.shape), "and a state", tuple(last.shape))

# %% [markdown]
# `plain.by_chunks` does the same faster; section 10 opens it. A rank calls it with its own tokens and the state that it received.


# %%
def relay(ring, layout):
    """This rank's outputs: receive the state, go through this rank's stretch, send the state on."""
    own, state = [layout.shard(x, ring.rank, dim=2) for x in text], nothing.clone()
    if ring.rank > 0:
        (state,) = ring.comm.exchange(receive=(state,), source=ring.rank - 1, tag="S").wait()
    out, state = ring.compute("attend", plain.by_chunks, *own, state, 1.0, 64)
    if ring.rank < ring.world_size - 1:
        ring.comm.exchange(send=(state,), to=ring.rank + 1, tag="S").wait()
    return out


# %% [markdown]
# The virtual clock is that of lesson 05: going through a stretch takes 1 s, and a message takes ½ s. One GPU alone, with all eight stretches,
# would be done after 8 s.

# %% tags=["nbval-ignore-output"]
predict(
    "20.queue",
    "When are eight ranks done that hand their states on?",
    ["much earlier than after 8 s", "after 8 s, too", "later than after 8 s"],
)

# %%
even = contiguous(N, P)
handed = VirtualCluster(P).run(relay, even)
print("the outputs of one process:", torch.allclose(even.unshard(handed.results, dim=2), whole))
charts = {"Relay": handed.trace}
show(scan_view.timeline(charts), scan_view.describe_timeline(charts))
end = max(event.end for event in handed.trace.computes())
which = ["much earlier than after 8 s", "after 8 s, too", "later than after 8 s"]
compare("20.queue", which[(end >= 8) + (end > 8)])

# %% [markdown]
# The outputs are right, and eight ranks are **slower than one**. At any time one rank works, and seven messages come on top. The ranks share the memory
# for the tokens, but not the work. So a small message alone is no gain.
#
# What holds a rank up? It has all its tokens. It lacks only the state before them. Can it do most of its work for a state
# that it does not know yet?
#
# ## 4 · What a stretch does to any state
#
# Write the four steps of a token as one formula:
#
# $$S \mapsto \alpha\,(I - \beta\, k k^\top)\, S + \beta\, k v^\top .$$
#
# It is a matrix times S, plus a matrix. A second token does the same to the result, and what comes out is once more a matrix times S, plus a matrix. So however long a stretch is, it does
#
# $$S \mapsto A\, S + B$$
#
# to *any* state S. The pair (A, B) is the **transition** of the stretch. A says what the stretch leaves of the old state, and B what it writes. Both depend on the
# stretch's own tokens alone. So **every rank can compute its transition before it has heard anything.**
#
# Two runs find it. From zeros, A S is zero, so B is left. From the unit matrix, A + B is left.

# %%
pairs = []
for rank in range(4):
    B = through(torch.zeros(2, 2), rank)
    A = through(torch.eye(2), rank) - B
    pairs.append((A, B))
drawn = [(A.tolist(), B.tolist()) for A, B in pairs]
show(scan_view.transitions(eight, drawn), scan_view.describe_transitions(eight, drawn))

# %% [markdown]
# Read rank 0: it overwrites both a and b, so A is zero, and nothing of an older state is left. Rank 2 writes b twice, so the old b is gone. Of the old a it
# leaves a half. On rank 1 the old a is gone, and c takes out of row a 0.48 of the old b.
#
# Now rank r needs the state that enters it. Each B says what one rank wrote. To add something up over ranks is a single call. So is the state that enters a rank the sum of the B of all earlier ranks?

# %% tags=["nbval-ignore-output"]
predict(
    "20.adding",
    "On which of the four ranks is the sum of all earlier B the state that enters?",
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
# It is right on ranks 0 and 1 only, so a test with two ranks would find nothing. Rank 2 hears rank 0's B as if rank 1 had not overwritten a. The sum needs A: rank
# 1 leaves $A_1 B_0$ of what rank 0 wrote.
#
# Two stretches, one after the other, have a transition as well. Put the first state into the second formula:

# %%
show(scan_view.composition(), scan_view.describe_composition())

# %% [markdown]
# Write ∘ for "after":
#
# $$(A_2, B_2) \circ (A_1, B_1) = (A_2 A_1,\; A_2 B_1 + B_2).$$
#
# The later stretch stands on the left, as in a product of matrices. What may one change about such a product? We try it on ranks 0 to 2. Together they
# make, of zeros, the state that enters rank 3.


# %%
def after(later, earlier):
    """The transition of two stretches, `earlier` and then `later`."""
    (A_2, B_2), (A_1, B_1) = later, earlier
    return A_2 @ A_1, A_2 @ B_1 + B_2


T_0, T_1, T_2, _ = pairs
for name, (_, B) in {"T₂ ∘ (T₁ ∘ T₀)": after(T_2, after(T_1, T_0)),
                     "(T₂ ∘ T₁) ∘ T₀": after(after(T_2, T_1), T_0),
                     "T₁ ∘ (T₂ ∘ T₀)": after(T_1, after(T_2, T_0))}.items():
    print(f"{name} is the state that enters rank 3: {torch.allclose(B, enters[3], atol=1e-5)}")

# %% [markdown]
# The brackets do not matter: transitions are **associative**. The order does matter: they do **not commute**. This is all that we need. The brackets
# may be set so that many ranks combine transitions at the same time. Before we do so, let us see what A costs.
#
# ## 5 · Four kinds of A
#
# Not every model corrects, and not every model forgets. So A is not always a full matrix:
#
# - Without decay and without the delta rule nothing is ever lost. A is the unit matrix, and need not travel.
# - With one decay for each head, A is the product of the decays: one number. In RetNet the decay is fixed; in Mamba-2 each token has its own.
# - With a decay for each entry of the keys, each row of the state decays by itself: A is a diagonal.
# - With the delta rule each token multiplies by $I - \beta k k^\top$. The product over a stretch is a full matrix.
#
# The cell below counts bytes in 32 bits, for one layer. The sizes of the models are the defaults of their configurations in
# [flash-linear-attention](https://github.com/fla-org/flash-linear-attention/tree/main/fla/models), all of width 2,048. Those of Qwen3-Next come
# from ringlab's table of models.

# %%
models = {  # kind of A, heads, length of a key, length of a value; the paper
    "Linear attention": ("nothing", 4, 512, 512),  # arXiv 2006.16236
    "RetNet": ("a number", 8, 256, 512),  # arXiv 2307.08621
    "Mamba-2": ("a number", 64, 128, 64),  # arXiv 2405.21060
    "GLA": ("a diagonal", 4, 256, 512),  # arXiv 2312.06635
    "DeltaNet": ("a matrix", 16, 128, 128),  # arXiv 2406.06484
    "Gated DeltaNet": ("a matrix", 6, 256, 512),  # arXiv 2412.06464
    "KDA": ("a matrix", 16, 128, 128),  # Kimi Linear, arXiv 2510.26692
    "Qwen3-Next": ("a matrix", layer.H, layer.D, layer.Dv),
}
print(f"{'':16} {'heads of':>14}   {'state':>8}   A")
for name, (kind, H, d, d_v) in models.items():
    state = LinearAttention(H=H, D=d, Dv=d_v).state_bytes
    A = 4 * H * {"nothing": 0, "a number": 1, "a diagonal": d, "a matrix": d * d}[kind]
    print(f"{name:16} {H:2} of {d:3} × {d_v:3}   {state / 2**20:4.1f} MiB   {kind}: {A:,} bytes")
kinds = {kind: [name for name in models if models[name][0] == kind] for kind in scan_view.KINDS}
show(scan_view.kinds(kinds), scan_view.describe_kinds(kinds))

# %% [markdown]
# A state has some megabytes, whatever the model. A is at most as large again. (KDA forgets by a diagonal, but it also corrects, so over a stretch its A
# is a full matrix.) None of these numbers knows how many tokens there are.
#
# ## 6 · Doubling
#
# Every rank wants the composition of all transitions before it. An operation that gives it to every rank is called a **scan**. It can be done in few rounds, by *doubling* (Hillis and Steele, 1986). In round
# i, every rank sends what it knows to the rank $2^{i-1}$ places further on. After each round a rank knows the transition of up to twice as many ranks.
#
# A rank keeps two compositions:
#
# - *all* includes its own tokens. It sends this one. At first it is the rank's own transition.
# - *before* leaves its own tokens out. It wants this one. At first it is (I, 0), the transition that changes nothing.
#
# A message m tells of tokens that come earlier than all those that the rank knows. So both compositions go *after* it: all ← all ∘ m, and before ← before ∘ m. The
# picture shows 8 ranks, and below them the two compositions of rank 5.

# %%
held = scan_view.known(SCANS["doubling"](P), P)
show(scan_view.doubling(held, 5), scan_view.describe_doubling(held, 5))

# %% [markdown]
# Follow rank 5. In round 1 it hears of rank 4. In round 2 it hears from rank 3, which by then knows of ranks 2 and 3. In round 3 it hears from rank 1, of ranks 0 and 1. Three rounds are enough for
# eight ranks, and ⌈log₂ P⌉ for P ranks. At the end B of *before* is the state that enters, because the sequence begins with zeros, and A · 0 + B = B.
#
# Here is the B of *before* for the eight tokens. Four ranks need two rounds:

# %%
show(scan_view.entering(eight, drawn), scan_view.describe_entering(eight, drawn))

# %% [markdown]
# In the second row are the very states that the ranks of section 2 handed on one after the other. Rank 3 gets (4, −3) for a and (2, 1) for b, as it did there. But nobody has waited for a finished state.
#
# Because the sequence begins with zeros, a rank with a ✓ sends B alone. It knows all ranks before it, so the B of its *all* is the finished state that leaves it.
#
# ringlab's `linear_attention` does this for the whole layer: transitions, scan, outputs. Does it give what one process gives?


# %%
def on_ranks(ring, layout):
    """This rank's outputs, by a scan."""
    *qkv, g, beta = (layout.shard(x, ring.rank, dim=2) for x in text)
    how = {"scan": "doubling", "scale": 1.0, "validate": False}
    return linear_attention(*qkv, ring=ring, layout=layout, decay=g, beta=beta, **how)


run = VirtualCluster(P).run(on_ranks, even)
print("the outputs of one process:", torch.allclose(even.unshard(run.results, dim=2), whole))
state = 2 * D * D * 8  # bytes of S, and of B, and of A: two heads, 64 bits
print("states' worth of bytes that each rank sends:",
      [run.trace.bytes_sent(rank) // state for rank in range(P)])

# %% [markdown]
# Rank 0 sends three finished states. Rank 3 sends two pairs (A, B) and then one finished state: 2 + 2 + 1 = 5. The last rank sends nothing.
#
# ## 7 · All eight at work
#
# Back to the queue. On the clock of section 3, a product of such small matrices takes next to nothing. So we let it take no time:


# %%
class Clock(Costs):
    """A pass through a stretch takes a second, a message half a second, and composing no time."""

    def compute(self, rank, label, args):
        return 0.0 if label == "compose passages" else 1.0


scanned = VirtualCluster(P, costs=Clock()).run(on_ranks, even)
charts = {"Relay": handed.trace, "Doubling": scanned.trace}
show(scan_view.timeline(charts), scan_view.describe_timeline(charts))

# %% [markdown]
# **3.5 seconds instead of 11.5**, and instead of 8 on one GPU. First all ranks compute their transitions at the same time. (The last rank does not, because nobody comes after it.) Then three short rounds of
# messages bring every rank the state that enters it. Then all compute their outputs at the same time.
#
# There is a price: each rank goes through its stretch twice, once for the transition, A and B together, and once for the outputs. (The clock above gives each of the two passes a second.) But two passes at the same time as all others are better than eight passes in a queue. With 64
# ranks the queue would have 64.
#
# Rank 0 needs nothing from anyone, and yet it waits. In ringlab a rank goes on only when what it *sends* has arrived, too.
#
# Doubling is one of three scans in ringlab. In `scan="all-gather"` ([arXiv 2502.07563](https://arxiv.org/abs/2502.07563)) each rank sends its transition
# to all later ranks in one round. In `scan="relay"` ([arXiv 2404.02882](https://arxiv.org/abs/2404.02882)) a state goes from rank to rank, but the
# transitions are ready, so a hop costs only a product of small matrices.
#
# ## 8 · What it costs
#
# Now to Qwen3-Next itself. In doubling on 8 ranks the busiest rank sends 5 matrices A or B for each head, as we saw. In the ring, keys and values of every token
# pass every rank.

# %%
attention = softmax.attention()
print(f"linear layer: A {layer.transition_bytes / 2**20:g} MiB,",
      f"B {layer.state_bytes / 2**20:g} MiB")
print(f"softmax layer: key and value of a token {attention.block_bytes_per_token:,} bytes")

# %% tags=["nbval-ignore-output"]
predict(
    "20.equal",
    "Qwen3-Next on 8 ranks, forward. From how many tokens in the whole sequence on does the "
    "busiest rank of the ring send more bytes than that of the doubling?",
    ["600", "6,000", "60,000", "600,000"],
)

# %%
doubled = scan_traffic(layer, P, "doubling").total_bytes
equal = next(n for n in range(P, 10**6, P) if ring_traffic(attention, n, P).total_bytes > doubled)
lengths = [2**power for power in range(10, 21, 2)]
sent = [ring_traffic(attention, n, P).total_bytes for n in lengths]
curves = lengths, sent, doubled, equal
show(scan_view.lengths(*curves), scan_view.describe_lengths(*curves))
print(f"at {lengths[-1]:,} tokens the ring sends {sent[-1] / doubled:.0f} times as much")
choices = {600: "600", 6_000: "6,000", 60_000: "60,000", 600_000: "600,000"}
compare("20.equal", choices[min(choices, key=lambda n: max(n, equal) / min(n, equal))])

# %% [markdown]
# For short sequences the scan sends *more*. But its line is flat, and the ring's line rises with the length.
#
# Are few bytes also little time? In the ring, hops hide behind the attention, if there is enough of it. In ringlab nothing hides the scan, so its time is
# added in full. We compare it with the time of its layer, and count the whole layer: its matrices, its experts, and the linear attention itself with both passes. The scan's time is that of the rank that sends most. The
# speeds are from ringlab's table of an H100:
#
# - The peak is 989 TFLOP/s in 16 bits, from NVIDIA's white paper. The matrices run at 80 % of it: the lower end of what [arXiv 2307.08691](https://arxiv.org/abs/2307.08691) says of matrix products.
# - The linear attention itself runs at 65.5 % of the peak. This is an **assumption**: it is what FlashAttention-3 reaches ([arXiv 2407.08608](https://arxiv.org/abs/2407.08608)).
# - NVLink inside a node moves 450 GB/s one way, and InfiniBand between nodes 50 GB/s, from the data sheets. Before its first byte a message takes 3.4 µs or 14 µs, from NCCL's tuning model.

# %% tags=["nbval-ignore-output"]
predict(
    "20.share",
    "The 1,048,576 tokens on 8 GPUs, and between any two of them only the slow link, 50 GB/s. "
    "What share of the layer's forward does the scan take?",
    ["about 1 %", "about 10 %", "about half"],
)

# %%
gpu, bars = hardware("h100"), {}
peak, links = gpu.peak("bfloat16"), {"NVLink": gpu.inside, "InfiniBand": gpu.between}
for ranks, each, name in ((8, 131_072, "NVLink"), (8, 131_072, "InfiniBand"),
                          (8, 8_192, "NVLink"), (8, 8_192, "InfiniBand"),
                          (64, 8_192, "InfiniBand")):
    matrices = 2 * each * linear.active_parameters / (peak * gpu.reached.linear)
    itself = scan_flops(layer, each) / (peak * gpu.reached.attention_forward)
    link, sent = links[name], scan_traffic(layer, ranks, "doubling").total_bytes
    scan = rounds(ranks, "doubling") * link.latency_s + sent / link.bytes_per_s
    bars[f"{ranks} × {each:,} tokens, {name}"] = {
        "matrices and experts": matrices, "linear attention, both passes": itself, "scan": scan}
show(scan_view.shares(bars), scan_view.describe_shares(bars))
print(f"a token uses {linear.active_parameters / 1e6:.0f} million weights of this layer,",
      f"with {linear.active_experts} of {linear.experts} experts;",
      f"in Llama 3 8B {model('llama3-8b').only.active_parameters / 1e6:.0f} million")
asked = bars["8 × 131,072 tokens, InfiniBand"]
share = asked["scan"] / sum(asked.values())
compare("20.share", "about 1 %" if share < 0.03 else "about 10 %" if share < 0.3 else "about half")

# %% [markdown]
# It takes about 1 % over the slow link, and a tenth of that inside a node. The scan takes the same time for any number of tokens, and the layer does not. So the share grows as
# a rank gets fewer tokens. With 8,192 on each rank it is 2 % over NVLink, but 14 % over InfiniBand, and 26 % on 64 ranks. This layer computes little for each token, since a token goes to few
# of the experts. A token uses three times as many weights in a layer of Llama 3 8B. With such a layer around the same state, the share would be smaller.
#
# The puzzle is solved. Eight ranks work at once, what travels is a few small squares, and the time of handing them on hardly shows where a sequence is long enough to need eight GPUs. Three things are left
# that you need in practice: the backward, the inside of a rank, and the layers around.
#
# ## 9 · Backward
#
# Gradients come from later tokens, so in the backward states are handed on **from the last rank to the first**. A stretch receives dS, the gradient of the state that leaves
# it. It passes on the gradient of the state that entered, which has two parts:
#
# $$A^\top dS + B' .$$
#
# The first comes through the state that leaves, S ↦ A S + B. The second, B′, comes through the stretch's own outputs. These depend on the entering state linearly, so
# B′ does not depend on it, and a rank finds B′ alone. So $(A^\top, B')$ is a transition again, and the backward is a scan again, in the reverse order.
#
# What if the reverse scan is wrong? In [one library](https://github.com/fla-org/flash-linear-attention/issues/1115) it once loaded wrong decays, while the forward was exact. We leave it out entirely: each of
# four ranks gets the right entering state, and takes dS for zero.

# %% tags=["nbval-ignore-output"]
predict(
    "20.reverse",
    "The forward is right, and every rank takes dS for zero. On which of the four ranks are the "
    "gradients of v right?",
    ["on none", "on the first", "on the last", "on all"],
)

# %%
leaf, dout = v.clone().requires_grad_(), torch.randn(v.shape, generator=draw, dtype=torch.float64)
out, _ = plain.by_chunks(text[0], text[1], leaf, *text[3:], nothing, 1.0, 64)
(expected,) = torch.autograd.grad(out, leaf, dout)

state, right = nothing, []
for rank in range(4):
    own = slice(rank * N // 4, (rank + 1) * N // 4)
    q_r, k_r, v_r, g_r, beta_r = (x[:, :, own] for x in text)
    v_r = v_r.clone().requires_grad_()
    out, state = plain.by_chunks(q_r, k_r, v_r, g_r, beta_r, state.detach(), 1.0, 64)
    (found,) = torch.autograd.grad(out, v_r, dout[:, :, own])
    right.append(torch.allclose(found, expected[:, :, own]))
print("right on ranks", [rank for rank in range(4) if right[rank]])
compare("20.reverse", {0: "on none", 1: "on the last", 4: "on all"}[sum(right)])

# %% [markdown]
# Only on the last rank, since nobody comes after it. The gradients of q are right on every rank, because they need only the state that enters. Remember this symptom: *gradients of k, v, decay and β are right on the last
# rank alone, and those of q everywhere.* With its reverse scan `linear_attention` has
# the gradients of one process:


# %%
def gradients_on_ranks(ring, layout):
    """This rank's gradients of v and of the decays."""
    *qkv, g, beta = (layout.shard(x, ring.rank, dim=2).clone().requires_grad_() for x in text)
    how = {"scan": "doubling", "scale": 1.0}
    out = linear_attention(*qkv, ring=ring, layout=layout, decay=g, beta=beta, **how)
    return torch.autograd.grad(out, (qkv[2], g), layout.shard(dout, ring.rank, dim=2))


quarters = contiguous(N, 4)
by_scan = VirtualCluster(4).run(gradients_on_ranks, quarters).results
found = quarters.unshard([dv for dv, _ in by_scan], dim=2)
print("gradients of v as on one process:", torch.allclose(found, expected))

# %% [markdown]
# ## 10 · Inside a rank
#
# A rank has thousands of tokens, and a loop over them leaves a GPU idle. The way out is the same idea once more. Cut the stretch into *chunks* of, say, 64 tokens, and hand a state from
# chunk to chunk. Inside a chunk all weights are computed at once, as for softmax.
#
# First without the delta rule. Here is a chunk of four tokens. A row says what fraction a token reads of the state that enters, and of each write:

# %%
alphas = (0.5, 0.9, 0.8, 0.5)
show(scan_view.survival(alphas), scan_view.describe_survival(alphas))

# %% [markdown]
# The state that enters has met every decay up to the reader's: the column **e**. A write has met only the decays after it: the triangle **E**. For example, token 4 reads
# 0.9 · 0.8 · 0.5 = 0.36 of token 1's write. The state that leaves keeps what the last token can still read, so the row **f** is the last row of E. For a chunk of C tokens:
#
# $$O = (E \odot QK^\top)\,V + e \odot (Q\,S), \qquad S' = e_C\, S + (f \odot K)^\top V .$$
#
# ⊙ multiplies number by number. With e or f it multiplies row i by $e_i$ or $f_i$. So a chunk is a few products of matrices. You write this in the exercise.
#
# Now with the delta rule. What token i really writes is not $v_i$, but $w_i = \beta_i\,(v_i - \text{what the state says for } k_i)$. Let W have the rows $w_i$. If we knew W, everything above would hold with W in the
# place of V. And what does the state say for $k_i$? By then it holds what is left of S, the state that entered the chunk, and of the earlier writes:
#
# $$w_i = \beta_i \Big( v_i - e_i\, S^\top k_i - \sum_{j<i} E_{ij}\,(k_i \cdot k_j)\, w_j \Big).$$
#
# Each $w_i$ depends on the earlier ones only. These are C equations with a triangular matrix, and one call solves them: `torch.linalg.solve_triangular`. That is the whole difference
# between linear attention and the delta rule ([arXiv 2406.06484](https://arxiv.org/abs/2406.06484)). ringlab's page [ringlab/scan/plain.py](../ringlab/scan/plain.py) has it in four lines; open it after the exercise.

# %%
for chunk in (1, 16, 64, 256):
    by_chunk, end = plain.by_chunks(*text, nothing, 1.0, chunk)
    same = torch.allclose(by_chunk, whole) and torch.allclose(end, last)
    print(f"chunks of {chunk:3} tokens: the outputs and the state of the loop over tokens: {same}")

# %% [markdown]
# ## 11 · In a hybrid
#
# **The layout.** A token costs the same wherever it stands. There is no triangle, and nothing to balance, so contiguous stretches are best. In a zig-zag each rank has two stretches, and the
# chain of states has 2P links instead of P. But the softmax layers of a hybrid want the zig-zag. Either the linear layers pay for two stretches on a rank, or tokens change
# ranks between the layers.
#
# **Documents.** The state of a packed document must not enter the next one ([lesson 18](18_packed_batches.ipynb)). So it is set to zeros where a document begins, as by g = −∞. If a document begins on
# rank r, then A of rank r is zero, and nothing from before passes it.
#
# **The tokens next door.** In Qwen3-Next, a short convolution stands before the linear attention: a token sees itself and the three before it. So every rank but the last also sends its last three tokens to
# the next rank. In the backward their gradient comes back.
#
# ## Recap
#
# - A ring moves keys and values, which grow with the sequence. A linear layer hands on a state, whose size does not depend on it.
# - Without the exponential, all keys and values fold into one state of D × D numbers for each head. It holds at most D independent pairs: that is its price.
# - A token forgets, corrects, writes and reads. A stretch of tokens makes A S + B of any state S.
# - Handed on in a relay, states make ranks wait for each other. A transition (A, B) can be computed before any state has arrived.
# - Transitions compose associatively, but do not commute. So a scan brings every rank its state: by doubling, in ⌈log₂ P⌉ rounds.
# - The backward is a scan from the last rank. Inside a rank a state is handed from chunk to chunk.
#
# ## Self-check
#
# <details><summary>1. Without the delta rule, but with a decay for each entry of the keys, what is A?</summary>A diagonal matrix: entry i of a key
# writes row i of the state, and that row decays by itself. Its diagonal has D numbers for each head.</details>
#
# <details><summary>2. Somebody adds up the B of all earlier ranks by a sum over ranks. When is that right?</summary>Without decay and without
# the delta rule: then every A is the unit matrix. And on two ranks always.</details>
#
# <details><summary>3. Gradients of v are right on the last rank and wrong on all others, and those of q are right everywhere. What is missing or wrong?</summary>The reverse scan: it brings
# the gradient of the state from later ranks.</details>
#
# <details><summary>4. In doubling, why does a rank keep both <em>all</em> and <em>before</em>?</summary>Later ranks need to know of its own tokens too, so it
# sends <em>all</em>. Its own tokens must not be in the state that enters it, so it needs <em>before</em>.</details>
#
# Now build it: [exercise 20](../exercises/20_beyond_softmax.ipynb), a chunk, a transition, the scan, and the layer.
#
# ## The end of the lessons
#
# You began with attention in NumPy, and with the tensor that does not fit. Now you can
#
# - run attention over any number of ranks, forward and backward, and say what travels, when, and why the result is exact;
# - deal tokens so that no rank waits for another, and keep packed documents apart;
# - train and serve a model on many ranks, and choose what each group of ranks divides;
# - tell a rounding error from a bug, and find the bug by its ranks, bytes and rounds;
# - say where the ring ends: where a layer keeps a state, it becomes a scan.
#
# One thing is left, and it is what the course has led to: the [capstone](../exercises/21_capstone.ipynb). You hand in a ring attention of your own, forward and backward, and it meets the whole suite that checks other
# people's. It builds on lessons 05 and 07 to 11. Each of its parts you have built once.
