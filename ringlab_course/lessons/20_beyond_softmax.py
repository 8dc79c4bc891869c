# %% [markdown]
# # 20 · Rings beyond softmax
#
# **Afterwards you can** write linear attention with decay chunk by chunk, and the delta rule token by token; say what a rank must
# hear from the ranks before it; and pass it on by a relay, by an all-gather, or by doubling.
#
# **You need first** [lesson 09](09_backward_ring.ipynb), what travels in a backward, and [lesson 14](14_training.ipynb), layers around
# attention.
#
# **Minutes** 75 to read and run; the exercise takes another 75.
#
# Many models of today are *hybrids*: some layers have softmax attention; the others, three of four in Qwen3-Next, do without the softmax. Such a
# layer keeps no keys and values, but one matrix for each head, however long the text is. So what does a rank have to send?

# %%
import numpy as np
import torch

from ringlab import VirtualCluster, contiguous
from ringlab.comm.virtual.cluster import Costs
from ringlab.cost.scan_traffic import (
    LinearAttention,
    attend_flops,
    passage_flops,
    scan_traffic,
)
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import ring_traffic
from ringlab.scan import plain
from ringlab.scan.attention import linear_attention
from ringlab.scan.graph import SCANS
from ringlab.viz import gantt
from ringlab.viz.style import show
from ringlab_course import compare, corpus, predict
from ringlab_course.figures import scan_view

# %% [markdown]
# ## 1 · Take the exponential away
#
# Softmax attention weighs a value by $e^{q \cdot k}$. Let the weight be $q \cdot k$ itself, without exponential and without a sum to divide
# by. Then brackets can move:
#
# $$\sum_{j \le i} (q_i \cdot k_j)\, v_j^\top = q_i^\top \Big( \sum_{j \le i} k_j v_j^\top \Big).$$
#
# The bracket on the right is a matrix of D × D numbers, the **state**. In this lesson S is the state, and N the number of tokens. S does not depend on the query, and each token brings it up to date
# with one addition. Both ways, for one head and N tokens of real text:

# %%
N, D = 256, 16
q, k, v = (x[0, 0].double() for x in corpus.qkv(N, heads=1, head_dim=D))

scores = (q @ k.mT).tril()  # left: N × N weights
left = scores @ v
state, rows = torch.zeros(D, D, dtype=torch.float64), []
for t in range(N):  # right: one state
    state = state + torch.outer(k[t], v[t])
    rows.append(q[t] @ state)
print("the two sides agree:", torch.allclose(left, torch.stack(rows)))

# %% [markdown]
# This is **linear attention**. The state replaces the whole cache of keys and values. Compare two layers with 32 heads of 128: softmax, with 8
# K/V heads cached in 16 bits, and 32 states in 32 bits.

# %% tags=["nbval-ignore-output"]
predict(
    "20.cache",
    "Keys and values of 1,048,576 tokens, 8 heads of 128 in 16 bits, against the 32 "
    "states of 128 × 128 in 32 bits: how many times as many bytes?",
    unit="times",
)

# %%
cache_bytes = 2 * 2**20 * 8 * 128 * 2
state_bytes = 32 * 128 * 128 * 4
print(f"cache {cache_bytes / 2**30:.0f} GiB, states {state_bytes / 2**20:.0f} MiB")
compare("20.cache", cache_bytes / state_bytes)

# %% [markdown]
# ## 2 · Forget, correct, write, read
#
# A plain sum has two weaknesses. It never forgets. And where two keys are similar, their values mix: asked with one key, it gives a part of the
# other's value. So in today's models a token does four things to the state, in this order:
#
# 1. it **forgets**: the state is multiplied by a *decay* $\alpha_t \le 1$, often written as its logarithm $g_t \le 0$;
# 2. it **corrects**: it reads what the state says for its key, and takes a share $\beta_t$ of that out again (the *delta rule*);
# 3. it **writes** its value, times $\beta_t$, under its key;
# 4. its query **reads**.
#
# $\beta_t$ lies between 0 and 1. In the code, `decay` holds $g_t$. All four together are the [gated delta rule](https://arxiv.org/abs/2412.06464):


# %%
def token(state, q, k, v, decay, beta):
    """The state after one token, and the token's output."""
    state = decay.exp() * state
    said = state.mT @ k  # what the state says for this key
    state = state + beta * torch.outer(k, v - said)
    return state, state.mT @ q


# %% [markdown]
# How much does a state remember? Store n pairs of a key and a value, then ask for each value by its key. Keys are random and of length 1. The
# delta rule writes only the part of a value that the state does not give back yet, so one may go through the same pairs several times.


# %%
def recall_error(n, delta, passes=1):
    """Mean distance of values read back from those that were stored, over their length."""
    draw = torch.Generator().manual_seed(20)
    keys, values = (torch.randn(n, D, generator=draw, dtype=torch.float64) for _ in range(2))
    keys, state = keys / keys.norm(dim=1, keepdim=True), torch.zeros(D, D, dtype=torch.float64)
    no_decay, beta = torch.tensor(0.0), 1.0
    for _ in range(passes):
        for key, value in zip(keys, values, strict=True):
            if delta:
                state, _ = token(state, key, key, value, no_decay, beta)
            else:
                state = state + torch.outer(key, value)
    return ((keys @ state - values).norm(dim=1) / values.norm(dim=1)).mean().item()


stored = [1, 2, 4, 8, 12, 16, 18, 24, 32]
errors = {"plain sum": [recall_error(n, False) for n in stored],
          "delta rule, one pass": [recall_error(n, True) for n in stored],
          "delta rule, 100 passes": [recall_error(n, True, 100) for n in stored]}
show(scan_view.recall(stored, errors, D), scan_view.describe_recall(stored, errors))

# %% [markdown]
# The plain sum mixes values from the second key on. (At an error of 1, zeros would be as good an answer.) The delta rule mixes them less. No
# model goes through its tokens a hundred times, but the third line shows how much the matrix could hold: about D values. So a state must lose
# something: one reason why hybrids keep some layers with softmax.
#
# ## 3 · Chunk by chunk
#
# A loop over tokens leaves a GPU idle. So cut the sequence into *chunks* of, say, 64 tokens. Inside a chunk the weights are computed at once, as for
# softmax; only from chunk to chunk does the state travel. Here is a chunk of four tokens. A row says what fraction a token reads of the state that
# enters, and of each write:

# %%
alphas = (0.5, 0.9, 0.8, 0.5)
show(scan_view.survival(alphas), scan_view.describe_survival(alphas))

# %% [markdown]
# The state that enters has met every decay up to the reader's: the column **e**. A write has met only the later ones: the triangle **E**. For
# example, token 4 reads 0.9 · 0.8 · 0.5 = 0.36 of token 1's write. The state that leaves keeps what the last token reads: the row **f** is the last row
# of E. With them a chunk of C tokens, for now without the delta rule, is a few products of matrices:
#
# $$O = (E \odot QK^\top)\,V + e \odot (Q\,S), \qquad S' = e_C\, S + (f \odot K)^\top V .$$
#
# (⊙ multiplies number by number; with e or f it multiplies row i by $e_i$ or $f_i$.)
#
# You write this chunk in the exercise. With the delta rule each write depends on those before it, which takes one triangular system more
# ([`ringlab.scan.plain`](../ringlab/scan/plain.py); open it after the exercise). Its chunks, with all four steps of section 2, beside the loop:

# %%
draw = torch.Generator().manual_seed(20)
q, k, v = (x.double() for x in corpus.qkv(N, heads=2, head_dim=D))
k = k / k.norm(dim=-1, keepdim=True)
decay = -0.2 * torch.rand(1, 2, N, generator=draw, dtype=torch.float64)
beta = torch.rand(1, 2, N, generator=draw, dtype=torch.float64)
nothing = torch.zeros(1, 2, D, D, dtype=torch.float64)
by_token, last = plain.recurrence(q, k, v, decay, beta, nothing, 1.0)
for length in (1, 16, 64, 256):
    by_chunk, end = plain.by_chunks(q, k, v, decay, beta, nothing, 1.0, length)
    same = torch.allclose(by_chunk, by_token) and torch.allclose(end, last)
    print(f"chunks of {length:3} tokens: the same outputs and the same state: {same}")

# %% [markdown]
# The decays hide a trap. $E_{ij} = \alpha_{j+1} \cdots \alpha_i$ is a quotient, $(\alpha_1 \cdots \alpha_i) / (\alpha_1 \cdots \alpha_j)$. So one could
# scale row i of Q by the numerator and row j of K by one over the denominator, and would need no matrix E. The cell below also tries differences of
# running sums, $e^{G_i - G_j}$ with $G_i = g_1 + \dots + g_i$, and a second sequence, whose 21st token forgets everything: g = −∞.

# %% tags=["nbval-ignore-output"]
predict(
    "20.quotient",
    "64 tokens that each keep a tenth of the state; D is 1, and all q and k are 1. In 32 bits, "
    "how many of the 64 rows of (scaled Q)(scaled K)ᵀ hold a NaN or an infinity on or below the "
    "diagonal? (The largest number is 3.4 · 10³⁸.)",
    unit="rows",
)

# %%
def lost(factors):
    """The number of rows that hold a NaN or an infinity on or below the diagonal."""
    return int((~factors.isfinite()).tril().any(1).sum())


def by_sums(g):
    """E: for each pair the sum of the logarithms between the two, and then the exponential."""
    below = torch.ones(64, 64).tril(-1).bool()
    # Column j holds g_i for i > j, else 0. Summed downwards: g_{j+1} + … + g_i.
    return g[:, None].expand(64, 64).masked_fill(~below, 0.0).cumsum(0).exp().tril()


g = torch.full((64,), 0.1).log()
q_one = k_one = torch.ones(64, 1)
since = g.cumsum(0).exp()[:, None]
compare("20.quotient", lost((since * q_one) @ (k_one / since).mT))
print("the numerator is 0 from token", int((since[:, 0] == 0).nonzero()[0]) + 1)
g_forgets = torch.cat([g[:20], torch.tensor([-torch.inf]), g[21:]])  # the 21st forgets everything
for name, each in (("a tenth each", g), ("one forgets everything", g_forgets)):
    G = each.cumsum(0)
    print(f"{name:22} rows lost: by the quotient {lost(G.exp()[:, None] * (1 / G.exp())):2},",
          f"by G_i − G_j {lost((G[:, None] - G).exp()):2}, by sums {lost(by_sums(each))}")

# %% [markdown]
# After 39 tokens the denominator is $10^{-39}$, and one over it is more than the largest number in 32 bits. From token 46 on the numerator is below
# the smallest one, so it is 0, and 0 · ∞ is NaN. Differences of running sums do not overflow below the diagonal. But after a token that forgets
# everything both sums are −∞, and their difference is NaN. `by_sums` neither divides nor subtracts: for each pair it adds up the logarithms
# between the two, and takes the exponential last.
#
# ## 4 · What a rank must hear
#
# Now cut the sequence: rank r has the r-th stretch of tokens. Its first token needs the state after all tokens before it. That is all: **one
# state**, whatever the length of the sequence. The simple way is a relay: rank 0 computes its stretch and sends its state to rank 1, which
# computes, and so on.

# %% tags=["nbval-ignore-output"]
predict(
    "20.relay",
    "8 ranks; each rank's stretch takes 1 s to compute, a message ½ s. After how many seconds "
    "is the last rank done, in a relay?",
    unit="s",
)


# %%
def relay(ring, work):
    """Receive the state, compute this rank's stretch, send the state on."""
    state = torch.zeros(4, 4)
    if ring.rank > 0:
        (state,) = ring.comm.exchange(receive=(state,), source=ring.rank - 1, tag="state").wait()
    state = ring.compute("stretch", work, state)
    if ring.rank < ring.world_size - 1:
        ring.comm.exchange(send=(state,), to=ring.rank + 1, tag="state").wait()


run = VirtualCluster(8).run(relay, lambda state: state + 1)
end = max(event.end for event in run.trace.computes())
print(f"the last rank is done after {end:g} s")
compare("20.relay", end)
show(gantt.figure(run.trace), gantt.describe(run.trace))

# %% [markdown]
# One rank alone would take 8 s. The relay takes longer, as no two ranks ever work at the same time: it shares out memory, and gains no time.
#
# ## 5 · Say what you would do to any state
#
# A rank cannot know its outputs before it knows the state that enters. But it can say what its tokens do to **any** state. One token makes
# $\alpha (I - \beta k k^\top) S + \beta k v^\top$ of S: a matrix times S, plus a matrix. So does a whole stretch, with other matrices:
#
# $$S \mapsto A S + B, \qquad (A_2, B_2) \circ (A_1, B_1) = (A_2 A_1,\; A_2 B_1 + B_2).$$
#
# (∘ means "after".)

# %%
show(scan_view.composition(), scan_view.describe_composition())

# %% [markdown]
# (A, B) is the **transition** of a stretch. Here two runs find it: from zeros, which gives B, and from the unit matrix, which gives A + B. (ringlab
# finds both in one.)


# %%
def transition(q, k, v, decay, beta):
    """(A, B) of these tokens, found by running them from zeros and from the unit matrix."""
    start = torch.zeros(1, 2, D, D, dtype=torch.float64)
    _, B = plain.by_chunks(q, k, v, decay, beta, start, 1.0, 64)
    unit = start + torch.eye(D, dtype=torch.float64)
    _, moved = plain.by_chunks(q, k, v, decay, beta, unit, 1.0, 64)
    return moved - B, B


def stretch(number, of=4):
    """One of `of` stretches of the tokens."""
    own = slice(number * N // of, (number + 1) * N // of)
    return *(x[:, :, own] for x in (q, k, v)), decay[:, :, own], beta[:, :, own]


(A_0, B_0), (A_1, B_1) = (transition(*stretch(number)) for number in (0, 1))
both = transition(*stretch(0, of=2))
for order, A, B in (("1 after 0", A_1 @ A_0, A_1 @ B_0 + B_1),
                    ("0 after 1", A_0 @ A_1, A_0 @ B_1 + B_0)):
    right = torch.allclose(A, both[0]), torch.allclose(B, both[1])
    print(f"stretch {order}: A is right {right[0]}, B is right {right[1]}")

# %% [markdown]
# Transitions compose **associatively**: one may group them at will. They do **not commute**: one may not swap them. Nor can one add up the B
# alone: A says what later tokens leave of earlier writes. (Without the delta rule A is one number for each head, the product of
# the decays. With it, A has as many numbers as a state.)
#
# A **scan** gives every rank the composition of all transitions before it. It needs an associative operation and the order of the ranks.
#
# ## 6 · Three scans
#
# All ranks compute their transitions at the same time. Then they scan, in one of three ways:
#
# - **all-gather** ([arXiv 2502.07563](https://arxiv.org/abs/2502.07563)): a rank sends its transition to all ranks after it, in one round, and composes those that it received;
# - **doubling** (Hillis and Steele, 1986): in round i a rank sends the transition of all tokens it knows of to the rank $2^{i-1}$ further on, so after each round it knows
#   of twice as many ranks;
# - **relay** ([arXiv 2404.02882](https://arxiv.org/abs/2404.02882)): a state goes from rank to rank, as in section 4. But the transitions are there already, so a hop costs one product of small
#   matrices.
#
# In the picture a row is a rank, and its boxes are the ranks whose tokens it knows of, its own framed. In doubling a rank keeps two compositions:
#
# - *all* is of all its boxes, at first of its own alone. This one it sends.
# - *before* leaves out its own box. At first it is the pair that changes nothing, (I, 0). At the end its B is the state that enters.
#
# A message m comes from earlier tokens, so both go after it: all ← all ∘ m, before ← before ∘ m. Rank 3 in round 2 has all = {2, 3} and
# before = {2}. It hears m = {0, 1} from rank 1 (hatched), and has all = {0, 1, 2, 3} and before = {0, 1, 2}. In the all-gather a rank needs *before*
# alone, and takes up the nearest rank's message first.

# %%
P = 8
scans = {name: scan_view.known(SCANS[name](P), P) for name in ("doubling", "all-gather")}
show(scan_view.rounds(scans), scan_view.describe(scans))

# %% [markdown]
# A rank with a check knows of all ranks before it. The sequence begins with a state of zeros, and A · 0 + B = B: the B of its *all* is the very state
# that leaves it. So it sends B alone from then on, rank 0 from the start. A rank that hears B alone then has a check too, and needs its A no more.

# %% tags=["nbval-ignore-output"]
predict(
    "20.rounds",
    "Doubling on 100 ranks: after how many rounds does the last rank know of all of them?",
    unit="rounds",
)

# %%
compare("20.rounds", len(SCANS["doubling"](100)))
print("rounds on 100 ranks:", {name: len(hops(100)) for name, hops in SCANS.items()})

# %% [markdown]
# ringlab's `linear_attention` takes the scan by name. Does it give what one process gives? (A state has 2 · 16 · 16 numbers of 8 bytes, 4,096
# bytes, and A as many.)


# %%
def on_ranks(ring, layout, scan):
    """This rank's outputs."""
    own = [layout.shard(x, ring.rank, dim=2) for x in parts]
    how = {"ring": ring, "layout": layout, "decay": own[3], "beta": own[4], "scan": scan}
    return linear_attention(*own[:3], scale=1.0, validate=False, **how)


parts, quarters = (q, k, v, decay, beta), contiguous(N, 4)
for scan in SCANS:
    run = VirtualCluster(4).run(on_ranks, quarters, scan)
    same = torch.allclose(quarters.unshard(run.results, dim=2), by_token)
    sends = [run.trace.bytes_sent(rank) for rank in range(4)]
    print(f"{scan:10} as on one process: {same}, bytes sent by each rank: {sends}")

# %% [markdown]
# In doubling rank 1 sends (A, B), then one state.
#
# ## 7 · What a scan costs
#
# On the clock of section 4 (a stretch 1 s, a message ½ s, a product of small matrices nothing):


# %%
class Clock(Costs):
    """A pass through a stretch takes a second, and a message half a second."""

    def compute(self, rank, label, args):
        return 0.0 if label == "compose passages" else 1.0  # a product of small matrices


for scan in SCANS:
    run = VirtualCluster(P, costs=Clock()).run(on_ranks, contiguous(N, P), scan)
    end = max(event.end for event in run.trace.computes())
    print(f"{scan:10} 8 ranks are done after {end:g} s")
    if scan == "doubling":
        show(gantt.figure(run.trace), gantt.describe(run.trace))

# %% [markdown]
# The relay of whole stretches took 11.5 s, and one rank alone would take 8. With transitions computed first, the relay takes 1 + 7 · ½ + 1 = 5.5 s, doubling 3.5, the all-gather 2.5. In the timeline all ranks work side by side, and go
# through their stretches twice: for the transition (*passage*; nobody needs rank 7's), then for the outputs (*attend*). The thin bars are
# messages, in two rows where some of a rank's overlap. Rank 0 needs nothing, and yet waits until 2.5 s: in
# ringlab a rank goes on when what it *sends* has arrived, too.
#
# This clock does not count bytes, of which an all-gather sends most. Here are 32 states of 128 × 128 with the delta rule, on links of 50 GB/s (400 Gbit/s)
# whose messages take 10 µs before their first byte. For scale, the computing of a whole layer around them, of the widths of Llama 3 8B, at an assumed 400 TFLOP/s,
# two fifths of an H100's peak:

# %%
layer = LinearAttention(H=32, D=128, Dv=128, delta=True)  # states and transitions in 32 bits
start_ms, bytes_per_ms = 0.01, 50e6
pair = layer.transition_bytes + layer.state_bytes  # A, and B, which is as large as a state
print(f"one transition (A and B): {pair / 1e6:.1f} MB,",
      f"{pair / bytes_per_ms * 1e3:.0f} µs on the link")
for ranks in (8, 64):
    for scan, hops in SCANS.items():
        rounds, sends = len(hops(ranks)), scan_traffic(layer, ranks, scan).total_bytes
        in_line = rounds * sends if scan == "relay" else sends  # in a relay, hop after hop
        print(f"{ranks:2} ranks, {scan:10} the busiest sends {sends / pair:4.1f} transitions,",
              f"so the scan takes at least {rounds * start_ms + in_line / bytes_per_ms:.2f} ms")
own = attend_flops(layer, 8_192) + passage_flops(layer, 8_192)
around = 2 * 8_192 * (4 * 4_096**2 + 3 * 4_096 * 14_336)  # q, k, v, o and the feed-forward
print(f"a stretch of 8,192 tokens: linear attention {own / 400e9:.2f} ms,",
      f"the whole layer {(own + around) / 400e9:.1f} ms")

# %% [markdown]
# So on these links doubling is fastest. A relay's ranks send least, but their hops wait for each other. ringlab overlaps no computing with the scan, so
# its time is added in full. With 8,192 tokens on a rank, doubling adds 0.24 ms on 8 ranks and 0.52 ms on 64. That is more than the 0.21 ms of the linear
# attention itself. But the whole layer takes 10.2 ms, and of that the scan is 2 % on 8 ranks and 5 % on 64.
#
# ## 8 · Backward
#
# Gradients come from later tokens, so the backward is a scan **from the last rank to the first**. A stretch receives dS, the
# gradient of the state that leaves it. It passes on the gradient of the state that entered,
#
# $$A^\top dS + B' .$$
#
# The first part comes through the state that leaves. The second, B′, comes through the stretch's own outputs. These are linear in the state that
# entered, so B′ does not depend on it, and a rank finds it alone. Autograd agrees:

# %%
entering = torch.randn(1, 2, D, D, generator=draw, dtype=torch.float64).requires_grad_()
out, leaving = plain.by_chunks(*stretch(1), entering, 1.0, 64)
dout, dstate = (torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in (out, leaving))
(B_prime,) = torch.autograd.grad(out, entering, dout, retain_graph=True)
(found,) = torch.autograd.grad((out, leaving), entering, (dout, dstate))
print("the gradient of the state that entered is Aᵀ dS + B′:",
      torch.allclose(found, A_1.mT @ dstate + B_prime))

# %% [markdown]
# So (Aᵀ, B′) is a transition again, and all three scans work backward too. With its dS, and the entering state from the forward, a rank has all that
# the gradients of its own q, k, v, decays and β need. On four ranks, those of the values and of the decays:


# %%
def gradients_on_ranks(ring, layout, scan, dout):
    """This rank's gradients of v and of the decays."""
    own = [layout.shard(x, ring.rank, dim=2).clone().requires_grad_() for x in parts]
    how = {"ring": ring, "layout": layout, "decay": own[3], "beta": own[4], "scan": scan}
    out = linear_attention(*own[:3], scale=1.0, **how)
    return torch.autograd.grad(out, (own[2], own[3]), layout.shard(dout, ring.rank, dim=2))


dout = torch.randn(by_token.shape, generator=draw, dtype=torch.float64)
leaves = v.clone().requires_grad_(), decay.clone().requires_grad_()
whole, _ = plain.by_chunks(q, k, *leaves, beta, nothing, 1.0, 64)
expected = torch.autograd.grad(whole, leaves, dout)
for scan in SCANS:
    run = VirtualCluster(4).run(gradients_on_ranks, quarters, scan, dout)
    found = [quarters.unshard(x, dim=2) for x in zip(*run.results, strict=True)]
    print(f"{scan:10} the gradients of one process:", all(map(torch.allclose, found, expected)))

# %% [markdown]
# [One library](https://github.com/fla-org/flash-linear-attention/issues/1115) once loaded wrong decays in its reverse scan. The forward was exact,
# and the gradients were right on the last rank only, since nobody comes after it.
#
# ## 9 · The ledger
#
# In the ring, K and V of every token pass every rank. The scan sends transitions and states only. Here are the softmax layer
# of section 1, and that of section 7 with doubling, forward, on 8 ranks, for the rank that sends most.

# %% tags=["nbval-ignore-output"]
predict(
    "20.equal",
    "Forward, on 8 ranks. At how many tokens in the whole sequence do the busiest rank of the ring "
    "and that of the doubling send equally many bytes? (A and B have 4.2 MB, and the doubling's "
    "busiest rank sends 2.5 such pairs. A token's key and value have 4 KiB.)",
    ["300", "3,000", "30,000", "300,000"],
)

# %%
softmax = Attention(H=32, K=8, D=128, dtype="bfloat16")
doubled = scan_traffic(layer, P, "doubling").total_bytes
for length in (1_024, 8_192, 131_072, 1_048_576):
    ring = ring_traffic(softmax, length, P).total_bytes
    times = ring / doubled
    print(f"{length:9,} tokens, ring: {ring / 1e6:8.1f} MB, {times:7.1f} times the doubling")
at_equal = next(n for n in range(64, 10**6, 64)
                if ring_traffic(softmax, n, P).total_bytes >= doubled)
choices = (300, 3_000, 30_000, 300_000)
print(f"equal at {at_equal:,} tokens; the nearest choice:")
compare("20.equal", f"{min(choices, key=lambda n: abs(np.log(n / at_equal))):,}")

# %% [markdown]
# For short sequences the scan sends more, but its bytes do not grow with the length: at a million tokens the ring sends hundreds of times as
# much.
#
# ## 10 · Three things left to settle
#
# **The layout.** A token costs the same wherever it stands: there is no triangle, and nothing to balance. Contiguous stretches are best. In a
# zig-zag each rank has two stretches, so the chain has 2P links instead of P; in a striped layout every token would be a stretch. But the softmax layers of a hybrid want a zig-zag: either the other layers pay for two stretches on a rank, or tokens change ranks.
#
# **Documents.** The state of a packed document must not enter the next one ([lesson 18](18_packed_batches.ipynb)): it is set to zeros where a
# document begins, as by g = −∞. If a document begins on rank r, then A of rank r is zero, and nothing earlier passes it.
#
# **The tokens next door.** Today's linear layers begin with a short convolution: a token sees itself and the three before it. So every
# rank but the last sends its last three tokens to the next, a *halo*, and in the backward their gradient comes back.
#
# ## Recap
#
# - Without the exponential, keys and values of all tokens fold into one state of D × D numbers per head.
# - A token forgets, corrects, writes and reads. The state can hold about D values: that is its price.
# - Inside a chunk everything is a few products of matrices, and with the delta rule one triangular system; a state crosses its border.
# - A stretch of tokens makes A S + B of any state S. Its transition (A, B) composes with others associatively, in order. A scan needs no more.
# - With transitions computed first, a relay is P − 1 short hops, an all-gather one round, doubling ⌈log₂ P⌉ rounds.
# - The backward is a scan from the end. The bytes depend on heads, head dims, the scan and the number of ranks, not on the length.
#
# ## Self-check
#
# <details><summary>1. Without the delta rule, but with a decay for each entry of the keys, what is A?</summary>A diagonal matrix: entry i of a key
# writes row i of the state, and that row decays by itself. Its diagonal has D numbers for each head.</details>
#
# <details><summary>2. Somebody adds up the B of all earlier ranks by a sum over ranks. When is that right?</summary>Without decay and without
# the delta rule: then every A is the unit matrix.</details>
#
# <details><summary>3. Gradients are right on the last rank and wrong on all others. What is missing or wrong?</summary>The reverse scan: it brings
# the gradient of the state from later ranks.</details>
#
# Now build it: [exercise 20](../exercises/20_beyond_softmax.ipynb), a chunk, a transition, the scan, and the layer.
#
# This was the last lesson. One thing is left: the [capstone](../exercises/21_capstone.ipynb), a ring attention of your own, forward and backward, against the
# whole suite that checks other people's. It needs lessons 05 and 07 to 11, and nothing that you have not built once.
