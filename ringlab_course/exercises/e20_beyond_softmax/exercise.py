# %% [markdown]
# # Exercise 20 · Rings beyond softmax
#
# **You build** linear attention over ranks: one chunk of it, what tokens do to a state, the scan that tells every rank which state
# enters it, and, from the last two, the layer.
# **You need** [lesson 20](../notebooks/20_beyond_softmax.ipynb). **Minutes** 75.
#
# | stage | function | what is checked |
# |---|---|---|
# | 20.chunk | `chunk` | outputs and the state that leaves, from forgetting nothing to forgetting everything |
# | 20.transition | `transition` | the two matrices of the gated delta rule |
# | 20.scan | `enter` | the entering state on any number of ranks, in ⌈log₂ P⌉ rounds of one message |
# | 20.layer | `ring_linear` | values on stretches of any lengths, and bytes that do not grow with them |
#
# 20.chunk needs section 10 of the lesson. The other three stages need only sections 1 to 7, and you may begin with them.
#
# As in the lesson, S is the state. Shapes are (H, L, D) here: heads, tokens, head dim, without a batch. All numbers are float64. `check` runs the visible checks
# in seconds.
#
# **Not allowed:** `ringlab.scan`, ringlab's attention, PyTorch's attention, and writing into the
# tensors that a function is given.

# %%
import torch

from ringlab import VirtualCluster, contiguous, launch
from ringlab_course import check, corpus, hint

# %% [markdown]
# ## 20.chunk · One chunk
#
# Token t makes the state $S_t = e^{g_t} S_{t-1} + k_t v_t^\top$, and its output is $S_t^\top q_t$. There is no scale. `q` and `k` are
# (H, L, D), `v` (H, L, Dv), and `state` (H, D, Dv) enters. `decay` (H, L) holds logarithms $g_t \le 0$: the lesson's factor is
# $\alpha_t = e^{g_t}$. Return `(out, state)`: the outputs (H, L, Dv), and the state after the last token. D and Dv differ.
#
# - A loop over tokens is right, but slow. Try the lesson's matrix E, which has shape (H, L, L) here. To get a row, multiply the row above by
#   the token's own α, and append a 1. So $E_{ij} = e^{g_{j+1} + \dots + g_i}$, and 0 for j > i. A loop that only builds E is fine.
# - The lesson's e includes the token's own decay: $e_i = e^{g_1 + \dots + g_i}$.
# - Do not divide, and do not subtract running sums $G_i = g_1 + \dots + g_i$. $E_{ij}$ is also the quotient of $e^{G_i}$ and $e^{G_j}$, but
#   a decay may erase the past: two decays with logarithm −400 make $e^{-800}$, which is 0 in float64, and dividing by it gives an infinity
#   or NaN. $e^{G_i - G_j}$ fails where a logarithm is −∞: −∞ − (−∞) is NaN.
# - A chunk may be empty. Then it has no last row: return the state unchanged.


# %% grade="20.chunk"
def chunk(q, k, v, decay, state):
    """Return (out, state) of one chunk of linear attention with decay."""
    # BEGIN SOLUTION outputs within the chunk and from the entering state; the state that leaves
    L = decay.shape[-1]
    below = torch.ones(L, L, dtype=torch.bool).tril(-1)
    sums = decay[..., None].expand(*decay.shape, L).masked_fill(~below, 0.0).cumsum(-2)
    between = sums.exp().tril()  # e^(g_{j+1} + … + g_i)
    since = decay.cumsum(-1).exp()[..., None]
    out = since * (q @ state) + (between * (q @ k.mT)) @ v
    if L == 0:
        return out, state.clone()
    left = between[..., -1, :, None]
    return out, since[..., -1:, :] * state + (left * k).mT @ v
    # END SOLUTION


# %%
check("20.chunk")

# %% [markdown]
# Stuck? `hint("20.chunk")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 20.transition · What tokens do to a state
#
# Under the **gated delta rule** a token first forgets, then corrects what the state says for its key:
#
# $$S_t = e^{g_t}\,(I - \beta_t\, k_t k_t^\top)\, S_{t-1} + \beta_t\, k_t v_t^\top.$$
#
# Whatever state S enters some tokens, the state that leaves is A S + B, with two matrices that depend on the tokens alone. `k` is
# (H, L, D), `v` (H, L, Dv), `decay` and `beta` (H, L). Return `(A, B)`, (H, D, D) and (H, D, Dv). A loop over tokens is fine.
# There may be no token (then A = I and B = 0), and a decay may be −∞.
#
# The lesson found A by a run from the unit matrix, which left A + B. Here D and Dv differ, so the unit matrix does not have the shape of a
# state. But a run from the unit matrix, with zeros of shape (H, L, D) for values, writes nothing and leaves A.
# The function `recurrence`, given in 20.layer, shows the products for all heads at once.

# %% grade="20.transition"
def transition(k, v, decay, beta):
    """Return (A, B): these tokens make A S + B of any state S."""
    # BEGIN SOLUTION the two matrices, token by token
    H, L, D = k.shape
    eye = torch.eye(D, dtype=k.dtype)
    A, B = eye.expand(H, D, D).clone(), k.new_zeros(H, D, v.shape[-1])
    for t in range(L):
        k_t, v_t, b_t = k[:, t, :, None], v[:, t, None, :], beta[:, t, None, None]
        step = decay[:, t, None, None].exp() * (eye - b_t * k_t * k_t.mT)
        A, B = step @ A, step @ B + b_t * k_t * v_t
    return A, B
    # END SOLUTION


# %%
check("20.transition")

# %% [markdown]
# Stuck? `hint("20.transition")` in a new cell helps.

# %% [markdown]
# ## 20.scan · The scan over ranks
#
# Rank r holds the r-th stretch of tokens, and `A` (H, D, D) and `B` (H, D, Dv) say what they do to a state. Return the state
# (H, D, Dv) that **enters** this rank: what the tokens of ranks 0 to r − 1 make of zeros. Rank 0 returns zeros.
#
# - The messages take ⌈log₂ P⌉ **rounds**: on a clock on which a message takes ½ s, the last one arrives after ⌈log₂ P⌉ · ½ s.
#   P is any number, not only a power of two.
# - In each round a rank sends one A and one B at most. You may always send both, although the lesson's ranks sometimes send B
#   alone. A hidden check counts them.
# - In each round the first ranks have nobody to hear from, and the last ranks have nobody to send to.
# - A may be singular: tokens that forget everything have A = 0.
# - `ring.comm.exchange(send=(x, y), to=rank, receive=(room_x, room_y), source=rank).wait()` sends two tensors and returns the two
#   that arrive. Leave out `send` and `to`, or `receive` and `source`, to receive only or to send only: build a dict of the keyword
#   arguments that apply. `room_x` is `torch.empty_like(x)`. Post what a rank sends and what it receives in a round in one call. A rank that
#   does neither makes no call in that round. No tag is needed.


# %% grade="20.scan"
def enter(ring, A, B):
    """Return the state that enters this rank."""
    # BEGIN SOLUTION twice as many ranks in every round
    def then(first, second):
        return second[0] @ first[0], second[0] @ first[1] + second[1]

    own, before, distance = (A, B), None, 1  # before: ranks from rank − distance + 1 to rank − 1
    while distance < ring.world_size:
        halves = {}
        if ring.rank + distance < ring.world_size:
            halves |= {"send": own, "to": ring.rank + distance}
        if ring.rank >= distance:
            room = torch.empty_like(A), torch.empty_like(B)
            halves |= {"receive": room, "source": ring.rank - distance}
        arrived = ring.comm.exchange(**halves).wait() if halves else None
        if ring.rank >= distance:
            before = arrived if before is None else then(arrived, before)
            own = then(arrived, own)
        distance *= 2
    return torch.zeros_like(B) if before is None else before[1]
    # END SOLUTION


# %%
check("20.scan")

# %% [markdown]
# Stuck? `hint("20.scan")` in a new cell helps.

# %% [markdown]
# ## 20.layer · The layer over ranks
#
# Rank r holds the r-th stretch of the sequence, (H, L, ·) each; stretches differ in length, and some are empty. Return the outputs
# (H, L, Dv) of this rank's tokens, as if one process had gone through all tokens of all ranks. `recurrence` is given: it goes through
# tokens from a state. What travels may depend on H, D and Dv, but not on the number of tokens. Rounds are not counted here.
#
# Use `recurrence`, and your `transition` and `enter`. `chunk` does not help: it has no delta rule.


# %% grade="20.layer"
def recurrence(q, k, v, decay, beta, state):
    """Given: the outputs (H, L, Dv) of these tokens, from the state that enters, token by token."""
    outs = []
    for t in range(q.shape[1]):
        q_t, k_t, v_t = (x[:, t, :, None] for x in (q, k, v))
        state = decay[:, t, None, None].exp() * state
        state = state + k_t @ (beta[:, t, None, None] * (v_t - state.mT @ k_t)).mT
        outs.append((state.mT @ q_t)[..., 0])
    return torch.stack(outs, dim=1) if outs else torch.zeros_like(v)


def ring_linear(ring, q, k, v, decay, beta):
    """Return the outputs of this rank's tokens."""
    # BEGIN SOLUTION three lines, with the functions above
    A, B = transition(k, v, decay, beta)
    state = enter(ring, A, B)
    return recurrence(q, k, v, decay, beta, state)
    # END SOLUTION


# %%
check("20.layer")

# %% [markdown]
# Stuck? `hint("20.layer")` in a new cell helps.

# %% [markdown]
# ## The layer, on real text
#
# When all stages hold, run `on_real_text()` in a new cell. It takes q, k and v of real text, normalises the keys, and compares your layer
# on 5 virtual ranks and on 4 processes with the recurrence on one. The bytes for 200 tokens and for 400 should be equal on the same number of ranks.


# %%
def on_real_text(H=2, D=16):
    """Print the error of the layer on many ranks, and the bytes that rank 0 sends."""

    def program(ring, layout, parts):
        own = (layout.shard(x, ring.rank, dim=1) for x in parts)
        return ring_linear(ring, *own)

    for N in (200, 400):
        q, k, v = (x[0].double() for x in corpus.qkv(N, heads=H, head_dim=D))
        k = k / k.norm(dim=-1, keepdim=True)
        gate = torch.sigmoid(q[..., 0])  # any number between 0 and 1
        parts = q, k, v, -0.1 * gate, gate
        true = recurrence(*parts, torch.zeros(H, D, D, dtype=torch.float64))
        layouts = {"virtual ranks": contiguous(N, 5), "processes": contiguous(N, 4)}
        for name, layout in layouts.items():
            start = launch if name == "processes" else lambda f, P, *a: VirtualCluster(P).run(f, *a)
            run = start(program, layout.P, layout, parts)
            error = (layout.unshard(run.results, dim=1) - true).abs().max() / true.abs().max()
            sent = run.trace.bytes_sent(0)
            right = bool(error < 1e-10)
            print(f"{N} tokens, {layout.P} {name}: error below 1e-10: {right}, {sent:,} bytes")


# %% tags=["solution-only"]
on_real_text()

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/20_beyond_softmax.ipynb` also runs the hidden ones, on its own inputs.
