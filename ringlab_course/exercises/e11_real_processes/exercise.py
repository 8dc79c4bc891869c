# %% [markdown]
# # Exercise 11 · Real processes
#
# **You build** three ring programs for real processes: one that cannot deadlock, one for shards whose lengths no rank
# knows beforehand, and one that keeps what it has when a rank dies.
# **You need** [lesson 11](../notebooks/11_real_processes.ipynb). **Minutes** 60.
#
# | stage | function | what is checked |
# |---|---|---|
# | 11.order | `blocking_shift` | no deadlock without buffers, for any number of ranks, in the time of three messages |
# | 11.uneven | `uneven_ring` | lengths that a rank has to ask for, post → compute → wait, exact bytes, slow networks |
# | 11.lost | `ring_with_losses` | a rank dies: which blocks are kept and named, which errors are not caught |
#
# The judge (the program behind `ringlab grade`) runs each rank as a process of its own and is the network between them. `check` runs the visible checks here, on
# virtual ranks, in seconds. Some checks stay hidden until you are graded. In all stages a program communicates by its
# `ring` only: neither virtual ranks nor the judge have a process group of `torch.distributed`.
#
# **Not allowed:** ringlab's merge, blocks and rings, PyTorch's attention, `torch.distributed`, and changing the
# arguments of a function.

# %%
import math

import torch

from ringlab import contiguous, launch
from ringlab.comm.wrappers.faulty import Fault
from ringlab_course import check, corpus, hint
from ringlab.errors import PeerDiedError, RankFailedError


def send(ring, x, to):
    """Send x to rank `to`; return once that rank has received it."""
    ring.comm.exchange(send=(x,), to=to, tag="x").wait()


def receive(ring, like, source):
    """Return the tensor that rank `source` sends, of the shape and dtype of `like`."""
    return ring.comm.exchange(receive=(torch.empty_like(like),), source=source, tag="x").wait()[0]


def nothing_seen(q):
    """Return the state (out, lse) of queries that have seen no key yet."""
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    return out, out.new_full(q.shape[:-1], -math.inf)

# %%
def attend(q, k, v, out, lse):
    """Return (out, lse) with this block's keys added. A block may be empty."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(out.dtype).repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.to(out.dtype) @ k.mT / math.sqrt(q.shape[-1])
    total = torch.logaddexp(lse, torch.logsumexp(scores, dim=-1))
    safe = total.masked_fill(total == -math.inf, 0.0)[..., None]  # −inf − (−inf) would be NaN
    return out * torch.exp(lse[..., None] - safe) + torch.exp(scores - safe) @ v, total


# %% [markdown]
# ## 11.order · An order that cannot deadlock
#
# `send` and `receive` above block: a send returns when the other rank has received. Send your `x` to the next rank, and
# return the `x` of the previous one. On all ranks `x` has the same shape and dtype.
#
# - Each rank makes one `send` and one `receive`, and no other exchange. A rank that is alone makes none.
# - The function has to end for every number of ranks.
# - On the virtual clock all ranks are done within the time of three messages, however many ranks there are.


# %% grade="11.order"
def blocking_shift(ring, x):
    """Return the previous rank's x, by one blocking send and one blocking receive."""
    # BEGIN SOLUTION an order without a circle
    if ring.world_size == 1:
        return x.clone()
    if ring.rank % 2 == 0:
        send(ring, x, ring.next)
        return receive(ring, x, ring.previous)
    arrived = receive(ring, x, ring.previous)
    send(ring, x, ring.next)
    return arrived
    # END SOLUTION


# %%
check("11.order")

# %% [markdown]
# Stuck? `hint("11.order")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 11.uneven · Shards of any length
#
# `q`, `k`, `v` are this rank's shards, `q` (B, H, L, D) and `k`, `v` (B, K, L, D). L differs from rank to rank and may be
# 0, and **a rank knows only its own**. Return `(out, lse)` of this rank's queries over the keys of all ranks.
#
# - Attend to each block by one `ring.compute(label, attend, q, k, v, out, lse)`. While it runs, the exchange that brings
#   the next block is under way: post, compute, wait. `ring.post(k, v, length=n)` makes room for n tokens.
# - Each rank makes P − 1 exchanges of K and V together, all with the next rank, without padding. To make lengths known
#   (`ring.all_gather(x)` returns a list of every rank's x, by rank; or shift them around), a rank may send 64 · P bytes
#   more. A rank that is alone may call `all_gather`, too.
# - Memory: your shard, a block in use and one that arrives.


# %% grade="11.uneven"
def uneven_ring(ring, q, k, v):
    """Return this rank's (out, lse) over all ranks' keys. Their lengths are not known here."""
    # BEGIN SOLUTION the ring over blocks of any length
    lengths = [int(n) for n in ring.all_gather(torch.tensor(k.shape[-2]))]
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=lengths[ring.origin(step + 1)])
        out, lse = ring.compute(f"attend {step}", attend, q, k, v, out, lse)
        if work is not None:
            k, v = work.wait()
    return out, lse
    # END SOLUTION


# %%
check("11.uneven")

# %% [markdown]
# Stuck? `hint("11.uneven")` in a new cell helps.

# %% [markdown]
# ## 11.lost · A rank dies
#
# A run of hours need not be lost with one rank. (In earnest each survivor would save its part to a file: `launch`
# raises an error in the end.) A partial `(out, lse)` over *some* blocks is worth keeping. Merging is associative, so
# the other blocks can be merged later, **if one knows which are in it**. Return `(out, lse, seen)`; `seen` is a list of
# the ranks whose blocks are in, in the order in which they came. All shards are equally long.
#
# - When nobody dies, `seen` names all ranks.
# - When a rank dies, `ring.shift` and `wait` raise `PeerDiedError`; on real processes `post` may raise it, too. Return
#   what you have: every block that you held is in `(out, lse)` and named in `seen`, and no other block is. Your own is
#   held from the start, another one once `shift` or `wait` has returned it. Whichever call raises, `post`, `wait` or
#   `shift`: if you have not yet attended to the block in your hands, do it before you return.
# - After the error no exchange, gather or barrier may follow. `attend` and `ring.compute` still work.
# - Catch no other error. A mismatch is a bug, and a timeout does not say that a rank is dead: nobody is helped by half an
#   answer.
# - If nobody dies, a rank makes P − 1 exchanges of K and V together, all with the next rank; they need not overlap here.
# - Memory: your shard, a block in use and one that arrives.


# %% grade="11.lost"
def ring_with_losses(ring, q, k, v):
    """Return (out, lse, seen) over the blocks of the ranks in `seen`; all, unless a rank died."""
    # BEGIN SOLUTION the ring, and what is left of it
    (out, lse), seen = nothing_seen(q), []
    for step in range(ring.world_size):
        out, lse = attend(q, k, v, out, lse)
        seen.append(ring.origin(step))
        if step < ring.world_size - 1:
            try:
                k, v = ring.shift(k, v)
            except PeerDiedError:
                break
    return out, lse, seen
    # END SOLUTION


# %%
check("11.lost")

# %% [markdown]
# Stuck? `hint("11.lost")` in a new cell helps.

# %% [markdown]
# ## The same functions on real processes
#
# When all checks hold, run `on_processes()` and `with_a_death()` in a new cell. The first one runs `blocking_shift` and
# `uneven_ring` on three processes, whose shards have 5, 0 and 3 tokens: it returns [(2, 5), (0, 0), (1, 3)]. The second
# one kills rank 2 of four by SIGKILL before its second exchange, and prints which blocks the others have: by the
# lesson's rule [1, 0] on rank 1, [3, 2] on rank 3 and [0, 3, 2] on rank 0, or fewer where a `post` raises. `launch` raises
# an error even so, because the run lost a rank.


# %%
def on_processes(lengths=(5, 0, 3)):
    """Return, for each rank, whose x it received and how many rows its out has."""

    def program(ring):
        shards = (torch.randn(1, 1, lengths[ring.rank], 4) for _ in range(3))
        whose = int(blocking_shift(ring, torch.tensor([ring.rank])))
        return whose, uneven_ring(ring, *shards)[0].shape[-2]

    return launch(program, len(lengths)).results


def with_a_death(S=64):
    """Print what each survivor has; return the rank that failed first."""
    layout, qkv = contiguous(S, 4), corpus.qkv(S, heads=2, head_dim=8)

    def program(ring):
        seen = ring_with_losses(ring, *layout.shard(qkv, ring.rank))[2]
        print("has the blocks of ranks", seen, flush=True)

    try:
        launch(program, 4, faults=[Fault("kill", rank=2, exchange=1)])
    except RankFailedError as error:
        return error.rank


# %% tags=["solution-only"]
print("whose x, and rows:", on_processes())

# %% tags=["solution-only", "nbval-ignore-output"]
print("failed first: rank", with_a_death())

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/11_real_processes.ipynb` runs the hidden ones, on inputs of its own.
