# %% [markdown]
# # 11 · Real processes
#
# **Afterwards you can** run the ring of lesson 05 on real processes and under torchrun, order sends and receives so that
# they cannot deadlock, and say what every rank gets when one of them dies, is slow, or was called with other arguments.
#
# **You need first** [lesson 05](05_emulated_ring.ipynb), the ring on virtual ranks.
#
# **Minutes** 60 to read and run; the exercise takes another 60.
#
# So far all ranks lived in this notebook. From here on each rank is a program of its own. The operating system starts it,
# runs it beside the others, and may kill it. Nothing about attention changes. The ways in which things go *wrong* do: a
# virtual ring that is stuck says so, and a real one is silent.

# %%
import inspect
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from subprocess import PIPE, STDOUT, Popen

import torch
import torch.distributed as dist

from ringlab import VirtualCluster, contiguous, launch, ring_attention
from ringlab.comm.wrappers.faulty import Fault, RankKilled
from ringlab.errors import (AgreementError, DeadlockError, MismatchError, PeerDiedError,
                            RankFailedError, TransportTimeout)
from ringlab.merge import Partial, merge
from ringlab.viz import gantt
from ringlab.viz.style import PAPER, QUIET, RED, new_figure, rank_colour, show, styled
from ringlab_course import compare, corpus, predict

torch.set_num_threads(1)

# %% [markdown]
# ## 1 · One program, several processes
#
# `VirtualCluster(P).run(program)` ran a program on P ranks inside this process. `launch(program, P)` starts P new processes
# and runs it there. They are joined by *gloo*, PyTorch's transport for CPUs. (*NCCL* is its counterpart for NVIDIA's GPUs.)
#
# The program below appends its rank to a list of this notebook, and prints where it runs. A rank's output appears here as
# it comes, after the rank's number.

# %% tags=["nbval-ignore-output"]
seen = []


def remember(ring):
    print(f"process {os.getpid()}; I send to rank {ring.next}", flush=True)
    seen.append(ring.rank)
    return os.getpid(), len(seen)


started = time.monotonic()
returned = launch(remember, 2).results
seconds = time.monotonic() - started
print(f"this notebook is process {os.getpid()}; to start, run and end took {seconds:.1f} s")
here = len(seen)
print("the same program on virtual ranks:")
threads = VirtualCluster(2).run(remember).results

# %%
print("length here:", here)
print("length in each process:", [length for _, length in returned])
print("on virtual ranks:", [length for _, length in threads], " and here after them:", len(seen))

# %% [markdown]
# **Zero** here. Program, arguments and globals were *copied* to each process, and each appended to its own copy. A process
# learns of another only by messages. Virtual ranks are threads of one process, so they do share the list: a program that
# relies on this works there and nowhere else. Return the values that you want, and keep nothing in globals.
#
# How did the processes find each other? Each must be given three things: its **rank**, the **world size**, and an
# address at which all of them meet, the **rendezvous**. There each process leaves the port on which it listens, and
# reads the ports of the others. After that they talk directly. `launch` chooses a free port, passes all three on, and
# cleans up afterwards. Each new process had to import PyTorch first.
#
# ## 2 · The same program, the same bytes
#
# Here is the overlapped ring of lesson 05, word for word, on two ranks and real text.

# %%
def attend(q, k, v):
    """Attention of q on one block, as the Partial (out, lse)."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    lse = torch.logsumexp(scores, dim=-1)
    return Partial(torch.exp(scores - lse[..., None]) @ v, lse)


def overlapped_ring(ring, q, k, v):
    state = Partial.identity(q)
    for step in range(ring.world_size):
        work = ring.post(k, v) if step < ring.world_size - 1 else None
        state = merge(state, ring.compute(f"attend {step}", attend, q, k, v))
        if work:
            k, v = work.wait()
    return state.out, state.lse


def on_shards(ring, layout, program, q, k, v, *more):
    return program(ring, *layout.shard((q, k, v), ring.rank), *more)

# %%
def same_bits(some, others):
    """Whether out and lse agree bit for bit, for every rank."""
    pairs = zip(some, others, strict=True)
    return [torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True)]


layout, qkv = contiguous(S=1024, P=2), corpus.qkv(1024, heads=4, head_dim=32)
virtual = VirtualCluster(2).run(on_shards, layout, overlapped_ring, *qkv)
real = launch(on_shards, 2, layout, overlapped_ring, *qkv)
print("out and lse of both ranks, bit for bit:", same_bits(virtual.results, real.results))
sent = [sorted((e.rank, e.to, e.shapes, e.bytes_sent) for e in run.trace.exchanges())
        for run in (virtual, real)]
print("the same messages:", sent[0] == sent[1], "  bytes of rank 0:", real.trace.bytes_sent(0))

# %% [markdown]
# Not one bit differs, and the same messages were sent. On one machine and with equally many threads, the same function
# gives the same bits. Only two things can differ: **time**, and whether all ranks are still there. Everything else
# is the same, so a fault that virtual ranks show is a fault of real ones. On the virtual clock a computation takes a second because we said so. Here it takes as long as it
# takes, and a different time on every run. Below are the processes' own clocks: each rank's computations, and under
# them its message. Hatched is the time in which a rank waited. The orange bar runs from *posted* to *found complete*: a
# process cannot see when bytes travel.

# %% tags=["nbval-ignore-output"]
title = "Real clocks: ranks start when they can"
show(gantt.figure(real.trace, title), gantt.describe(real.trace, title))
waited = [sum(1000 * hop.exposed for hop in real.trace.exchanges(rank)) for rank in (0, 1)]
print("waited for messages:", ", ".join(f"rank {r} {ms:.1f} ms" for r, ms in enumerate(waited)))

# %% [markdown]
# The ranks need not begin together or take equally long. Yet both wait only briefly: most of the hop passed while they
# computed. (A first block often takes longer: a new process is still warming up.) White means that a rank
# posted, merged, waited for a core, or had not begun.
#
# ## 3 · Send, then receive
#
# `ring.post` is made of two operations: *send* to one rank, *receive* from one rank. `ring.shift` posts both at once and
# waits. Below, each is a call of its own: `ring.comm.exchange` can send, receive, or do both, and its `wait()` returns
# when that is done. (A *tag* is a name that both ends must give alike.)

# %%
def send(ring, x, to):
    """Send x; return once rank `to` has received it."""
    ring.comm.exchange(send=(x,), to=to, tag="x").wait()


def receive(ring, like, source):
    return ring.comm.exchange(receive=(torch.empty_like(like),), source=source, tag="x").wait()[0]


def all_send_first(ring):
    x = torch.tensor([float(ring.rank)])
    send(ring, x, ring.next)
    return receive(ring, x, ring.previous)

# %% tags=["nbval-ignore-output"]
predict("11.send", "On virtual ranks this order was a deadlock (lesson 05). Real sockets have "
        "buffers of many kilobytes. Two processes each send 4 bytes, then receive, without a time "
        "limit. What happens?",
        choices=["it works: 4 bytes fit into a buffer", "one of them gets an error at once",
                 "both wait for ever"])

# %% [markdown]
# We ask gloo directly, with nothing of ours in between: `dist.send` and `dist.recv` of PyTorch.

# %%
def plain_torch(ring):
    x, y = torch.ones(1), torch.empty(1)
    dist.send(x, ring.next)
    dist.recv(y, ring.previous)
    return y


try:
    launch(plain_torch, 2, timeout=2)
    outcome = "it works: 4 bytes fit into a buffer"
except TransportTimeout as error:
    outcome = "both wait for ever"
    print(error)
compare("11.send", outcome)

# %% [markdown]
# This is a **deadlock**. gloo's send is over when the other side has received, however small the message, and here nobody
# receives. Only a time limit ends such a run: we had set two seconds, counted from when the ranks had met (PyTorch's
# default is half an hour). All that the error can say is which ranks have not come back. (MPI and NCCL buffer small
# messages in some cases. Such a program then works until the day when your tensors grow.) Now the same order on three
# virtual ranks, without a limit, to see which way round they wait:

# %%
try:
    VirtualCluster(3).run(all_send_first)
except DeadlockError as error:
    print(error)

# %% [markdown]
# The virtual cluster knows which rank waits for which, and so it sees the circle. **When a real run hangs, run it on
# virtual ranks.**
#
# The cure is to break the circle: somebody must receive first, and one rank is enough. `in_order` is given the ranks that
# send first:

# %%
def in_order(ring, sends_first):
    x = torch.tensor([ring.rank])
    if ring.rank in sends_first:
        send(ring, x, ring.next)
    arrived = receive(ring, x, ring.previous)
    if ring.rank not in sends_first:
        send(ring, x, ring.next)
    return arrived.item()

# %% tags=["nbval-ignore-output"]
predict("11.chain", "8 ranks, and all but rank 0 send first. "
        "The time of how many messages does the shift take?", unit="messages")

# %%
MESSAGE = 0.5  # virtual seconds of a message


def shifted(P, program, *args):
    """Run a shift on P virtual ranks, look at what came, and return the trace."""
    run = VirtualCluster(P).run(program, *args)
    assert run.results == [(rank - 1) % P for rank in range(P)]
    return run.trace


def in_messages(trace):
    return round(max(event.done for event in trace.exchanges()) / MESSAGE)


def at_once(ring):
    return ring.shift(torch.tensor([ring.rank])).item()


line = shifted(8, in_order, range(1, 8))
compare("11.chain", in_messages(line))
print("both ends posted at once:", in_messages(shifted(8, at_once)))

# %%
with styled():
    stairs = new_figure((8.0, 3.8))
    ax = stairs.subplots()
    for sent in (event for event in line.exchanges() if event.bytes_sent):
        y, begin = sent.rank, sent.done - MESSAGE
        ax.barh(y, begin - sent.posted, 0.4, left=sent.posted, color=PAPER, edgecolor=QUIET,
                hatch="////")
        ax.barh(y, MESSAGE, 0.8, left=begin, color=rank_colour(y), alpha=0.6)
        ax.text(begin + MESSAGE / 2, y, f"{y}→{sent.to}", ha="center", va="center")
    ax.set(xlabel="time (s); a message takes 0.5 s", ylim=(7.6, -0.6),
           ylabel="sender", yticks=range(8),
           title="All but rank 0 send first. Hatched: posted, and not yet received")
show(stairs, "Time from left to right, a row for each sender. The message 7→0 passes first, then "
     "6→7, 5→6 and so on up to 0→1: a staircase of 8 messages that ends at 4 s.")

# %% [markdown]
# If only one rank receives first, the messages pass in a *line*. Rank 0 takes 7→0. Only then does rank 7 receive, and
# take 6→7, and so on around the ring, until rank 0 sends the last message itself. If more ranks receive first, the
# lines are shorter. In the exercise you choose who receives first, so that the time does not grow with P. Posting both
# ends at once takes the time of one message. In plain PyTorch that is `dist.batch_isend_irecv`, and it is what
# `ring.post` does. Both cures, on real processes:

# %%
def plain_batch(ring):
    x, y = torch.tensor([float(ring.rank)]), torch.empty(1)
    ends = [dist.P2POp(dist.isend, x, ring.next), dist.P2POp(dist.irecv, y, ring.previous)]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    return int(y)


cured = launch(lambda ring: (plain_batch(ring), in_order(ring, {0})), 2).results
print("whose x, batched and in order, on two processes:", cured)

# %% [markdown]
# ## 4 · Another order, other arguments
#
# There is a quieter fault than a deadlock: ranks that exchange *different things*. Let odd ranks send V before K, both of
# one shape. Virtual ranks are enough to show it. No rank is stuck, so they report no error, and real ones would not either.

# %%
def mixed_up(ring, tags):
    block = {"k": torch.tensor([ring.rank]), "v": torch.tensor([ring.rank + 100])}
    order = "vk" if ring.rank % 2 else "kv"
    return {name: ring.shift(block[name], tag=tags[name]).item() for name in order}


alike, apart = {"k": "x", "v": "x"}, {"k": "k", "v": "v"}
print("what each rank takes for k and v:", VirtualCluster(2).run(mixed_up, alike).results)
try:
    VirtualCluster(2).run(mixed_up, apart)
except MismatchError as error:
    print("with a tag for each:", error.got)

# %% [markdown]
# With one tag, no error and no hang: K arrived as V. Messages between two ranks arrive in the order in which they were
# sent. ringlab sends a header, a description of the tensors, ahead of each message, and notices a wrong shape, dtype or
# tag. So tag K and V, or send them in *one* exchange: then every rank has the same order. But a header says nothing about
# options. What if one process was called with `causal=True` and the other without?

# %% tags=["nbval-ignore-output"]
predict("11.agree", "Rank 0 runs ring_attention with causal=True, rank 1 with False. What happens?",
        choices=["each applies its own mask", "they wait without end", "an error"])

# %%
def called_differently(ring, layout, *whole):
    shards = layout.shard(whole, ring.rank)
    try:
        return ring_attention(*shards, ring=ring, layout=layout, causal=ring.rank == 0)
    except AgreementError as error:
        return type(error).__name__, error.remedy


asked = VirtualCluster(2).run(called_differently, layout, *qkv)
print(*asked.results, sep="\n")
print("bytes of K and V that travelled:", asked.trace.bytes_sent())
errors = sum(result[0] == "AgreementError" for result in asked.results)
print("ranks with an error:", errors)
compare("11.agree", "an error" if errors else "each applies its own mask")

# %% [markdown]
# **Both** get the error, before any block moves. Ranks first compare descriptions of their calls, 512 bytes each, which
# `bytes_sent` does not count; real processes do the same. If only one rank raised the error and left, the other would
# learn only that a neighbour is gone, not why.
#
# ## 5 · A rank dies
#
# Machines fail, and systems kill processes that take too much memory. A process that is killed says nothing.
# `Fault("kill", rank=2, exchange=1)` is such a death: SIGKILL, the signal that ends a process at once, before the second
# of its exchanges. The others get a `PeerDiedError`. Four processes:

# %% tags=["nbval-ignore-output"]
def until_the_end(ring):
    x = torch.tensor([ring.rank])
    try:
        for _ in range(ring.world_size - 1):
            begin = time.monotonic()
            x = ring.shift(x)
    except PeerDiedError as error:
        print(f"waited {time.monotonic() - begin:.2f} s: {error.got}", flush=True)
        raise


try:
    launch(until_the_end, 4, faults=[Fault("kill", rank=2, exchange=1)], timeout=120)
except RankFailedError as error:
    died = error

# %%
print(f"failed first: rank {died.rank}, {died.errors[died.rank].partition(';')[0]}")
texts = [died.errors[rank] for rank in (0, 1, 3)]
naming = ["PeerDiedError" in text and "rank 2" in text for text in texts]
print("a PeerDiedError that names rank 2, on ranks 0, 1 and 3:", naming)

# %% [markdown]
# The other three got a `PeerDiedError` that names rank 2, and nobody waited for the limit of 120 s. How do they know?
#
# 1. Rank 2 dies, and the system closes its connections. Its neighbours, 1 and 3, notice at once.
# 2. They fail. ringlab keeps a failed rank alive for two more seconds, so that an error seen elsewhere still reaches
#    `launch`. Then its connections close.
# 3. Only now does rank 0 find out: it never exchanges with rank 2, and was waiting for one of its own neighbours.
#
# `launch` tells each of them which rank died first. It then raises *one* error, that of the rank which failed first, with
# the others' in `errors`, and leaves no process running. Plain gloo gives a line like "connection closed by peer", and
# you have to find out which peer.
#
# Which rank notices when? Not all at once: a rank notices a death only when one of its own exchanges fails, because a
# neighbour no longer sends or no longer receives. It then leaves the ring as well. Take eight virtual ranks, of which
# rank 3 dies before its first exchange. Since the run raises, ranks note their blocks in `had`, a global: these are
# threads.

# %% tags=["nbval-ignore-output"]
predict("11.cone", "Rank 3 of 8 dies before its first exchange. "
        "How many blocks will rank 1 have had, with its own?", unit="blocks")

# %%
def until_a_death(ring):
    """Note the blocks that this rank has had when all have come, or a death ends it."""
    x = torch.tensor([ring.rank])
    had[ring.rank] = [ring.rank]
    try:
        while len(had[ring.rank]) < ring.world_size:
            x = ring.shift(x)
            had[ring.rank].append(x.item())
    except PeerDiedError:
        pass


had = {}
try:
    VirtualCluster(8, faults=[Fault("kill", rank=3, exchange=0)]).run(until_a_death)
except RankKilled:
    had[3] = []
compare("11.cone", len(had[1]))
print("blocks on ranks 0 to 7:", *(len(had[rank]) or "dead" for rank in range(8)))

# %%
with styled():
    spread = new_figure((8.0, 4.0))
    ax = spread.subplots()
    for rank in range(8):
        for row, block in enumerate(had[rank]):
            ax.bar(rank, 0.9, bottom=row - 0.45, width=0.9, color=rank_colour(block), alpha=0.6)
            ax.text(rank, row, block, ha="center", va="center")
        end = "dies" if rank == 3 else "ends"
        ax.text(rank, len(had[rank]), end, ha="center", va="center", color=RED)
    ax.set(xlabel="rank (7 and 0 are neighbours)", xticks=range(8),
           ylabel="exchange", ylim=(-0.6, 4.6),
           yticks=range(5), yticklabels=["its own", "1st", "2nd", "3rd", "4th"],
           title="Rank 3 dies before its first exchange: the blocks that the others have had")
    ax.grid(visible=False)
show(spread, "A column for each of 8 ranks, a row for each exchange; numbers are blocks. Rank 3 "
     "dies before the first exchange. Ranks 2 and 4 end in it, 1 and 5 in the second, 0 and 6 in "
     "the third, and rank 7 in the fourth: a V that opens upward.")

# %% [markdown]
# A rank that has left the ring counts as dead for its neighbours, whether it was killed or returned early. So news of a
# death travels **one rank per step**, both ways round, which is the V of the picture: the neighbours miss their first
# exchange, *their* neighbours the second. Rank 1 could still have received 0, 7, 6, 5, 4. It ends earlier, because its
# receiver, rank 2, has left. In general: if a rank dies before exchange n (counted from 0), a rank d places away (the
# shorter way) ends with n + d blocks, at most P. Each holds a correct partial over the blocks that came. The exercise keeps it.
#
# ## 6 · A rank is slow
#
# Slow is worse than dead, because nothing fails. In a ring of three, let a step take half a second, and 1.5 s on rank 1.
# Every rank posts its exchange, computes, and waits. Rank 1 gets its blocks from rank 0, so it never has to wait, and needs
# 4.5 s. Rank 0 gets its blocks from rank 2, which is as fast as itself.

# %% tags=["nbval-ignore-output"]
predict("11.slow", "Three steps of 0.5 s on ranks 0 and 2, of 1.5 s on rank 1. "
        "When is rank 0 done, about?", choices=["1.5 s", "2.0 s", "4.5 s"])

# %% [markdown]
# This time the timeline is drawn **while** the processes run: they report each event as it ends, and the chart grows.
# (Drawing uses the cores on which the ranks run. These ranks only sleep, so drawing does not disturb them.)

# %% tags=["nbval-ignore-output"]
def work_for(seconds):
    time.sleep(seconds)


def paced(ring):
    x = torch.zeros(1)
    for step in range(ring.world_size):
        work = ring.post(x) if step < ring.world_size - 1 else None
        ring.compute(f"step {step}", work_for, 1.5 if ring.rank == 1 else 0.5)
        if work:
            (x,) = work.wait()


with gantt.live("Rank 1 is slow", until=4.6) as watch:
    slow = launch(paced, 3, watch=watch)

# %%
mine = slow.trace.computes(0)
end, choices = mine[-1].end - mine[0].start, ("1.5 s", "2.0 s", "4.5 s")
compare("11.slow", min(choices, key=lambda choice: abs(float(choice[:3]) - end)))

# %% [markdown]
# **2.0 s**: rank 0 waits for half a second, although the block that it needs has come. An exchange has two ends. Rank 1
# posts its second exchange only when its first computation is over, at 1.5 s. Until then rank 0 still holds the block
# that it sends second. So **slowness travels backwards too**, against the direction of the blocks: rank 2 waits for the
# slow rank's block; rank 0 waits until the slow rank takes a block. Both may begin step n + 1 when rank 1 begins step n, not
# earlier. In a longer ring they would wait again and again.
#
# Which rank is at fault? **The one that does not wait.** A profile of rank 0 alone would show time spent in `wait`, and you
# would blame the network.
#
# ## 7 · Does `isend` mean overlap?
#
# `isend`, and with it `ring.post`, returns before the message has arrived. Is the hop then hidden? Take three rings on
# the virtual clock, where a block takes 1 s and a hop half a second: compute, then shift; post, *wait, compute*; post,
# compute, wait.

# %%
def ring_in_order(ring, q, k, v, order):
    state = Partial.identity(q)
    for step in range(ring.world_size):
        block = (k, v)
        for action in order if step < ring.world_size - 1 else ("compute",):
            if action == "compute":
                state = merge(state, ring.compute(f"attend {step}", attend, q, *block))
            elif action == "post":
                work = ring.post(*block)
            else:
                k, v = work.wait()
    return state.out


ORDERS = {"A": ("compute", "post", "wait"), "B": ("post", "wait", "compute"),
          "C": ("post", "compute", "wait")}

# %%
four, small = contiguous(S=64, P=4), corpus.qkv(64, heads=1, head_dim=8)
clocked = {name: VirtualCluster(4).run(on_shards, four, ring_in_order, *small, order).trace
           for name, order in ORDERS.items()}
ends = {name: max(event.end for event in trace.computes()) for name, trace in clocked.items()}
print("done after:", ", ".join(f"{name} {end} s" for name, end in ends.items()))
names = [f"{name} ({', '.join(order)})" for name, order in ORDERS.items()]
traces = list(clocked.values())
show(gantt.compare(traces, names, ranks=[0, 1]), gantt.describe_all(traces, names))

# %% [markdown]
# `isend` alone hides nothing. A hop is hidden only by what is computed **between post and wait**: in C each message travels
# while its rank computes. On the virtual clock, where links work by themselves, that is enough if the computation is no shorter
# than the hop. On real machines somebody has to move the bytes. For gloo that is a thread on *your* processor. NCCL uses
# some of the GPU's multiprocessors, the units that also compute. A *copy engine*, a part of the GPU that only moves data,
# needs neither the processor nor those units. Here are the three orders on two processes, each five times in turn:

# %% tags=["nbval-ignore-output"]
def all_orders(ring, layout, *whole):
    """The seconds that this rank takes in each of six rounds of A, B, C."""
    seconds = []
    for _ in range(6):  # the first round warms up
        for order in ORDERS.values():
            ring.barrier()  # all ranks begin together
            began = time.perf_counter()
            ring_in_order(ring, *layout.shard(whole, ring.rank), order)
            seconds.append(time.perf_counter() - began)
    return seconds


whole = corpus.qkv(2048, heads=4, head_dim=64)
measured = launch(all_orders, 2, contiguous(S=2048, P=2), *whole)
for number, name in enumerate(names):
    hops = [hop for rank in range(2) for hop in measured.trace.exchanges(rank)[3 + number :: 3]]
    waited = median(1000 * hop.exposed for hop in hops)
    total = median(1000 * each for seconds in measured.results for each in seconds[3 + number :: 3])
    print(f"{name}: a rank waited {waited:.1f} ms of {total:.0f},", end=" ")
    print(f"for {hops[0].bytes_received:,} bytes")

# %% [markdown]
# A rank in C has the least to wait for. It is not always done sooner by as much, because the whole time depends on more
# than the hop:
#
# - A rank waits for the *other rank* as well, until that one has come to its own `post`. (So whether A or B waits longer
#   changes from run to run.)
# - Part of a hop may pass inside `post`, where bytes are copied: this is not counted as waiting.
# - With as many ranks as cores, no core is left for gloo's threads. The computation then pays for what a hidden hop saves.
#
# The order of events can be relied on without a stopwatch, so it is what the exercise looks at. For speed, measure on the
# machine that you mean, more than once: lesson 13 shows how.
#
# ## 8 · torchrun
#
# On a cluster **torchrun**, and not this notebook, starts the processes on each machine. It passes each process what it
# needs through the environment: `RANK`, `WORLD_SIZE`, and `MASTER_ADDR` with `MASTER_PORT` for the rendezvous. `connect()`
# reads them. The program below is made of the source of this notebook's cells, and each rank saves its result in a file.

# %%
PROGRAM = """import math, sys, torch
from ringlab import connect, contiguous
from ringlab_course import corpus
from ringlab.merge import Partial, merge

{functions}

with connect() as ring:
    layout = contiguous(S=1024, P=ring.world_size)
    shards = layout.shard(corpus.qkv(1024, heads=4, head_dim=32), ring.rank)
    torch.save(overlapped_ring(ring, *shards), f"{{sys.argv[1]}}/rank-{{ring.rank}}.pt")
"""
functions = "\n\n".join(inspect.getsource(function) for function in (attend, overlapped_ring))


# %%
def torchrun(program, ranks, *args):
    """Run a file by the module behind `torchrun`; `--standalone`: all ranks are on this machine."""
    options = ["--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, program, *args]
    pipes = {"stdout": PIPE, "stderr": STDOUT, "text": True, "start_new_session": True}
    with Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as agent:
        try:
            output, _ = agent.communicate(timeout=120)
        finally:
            agent.terminate()  # torchrun then ends its ranks; killed, it would leave them running
    if agent.returncode:
        raise RuntimeError(output)

# %%
with tempfile.TemporaryDirectory() as folder:
    program = Path(folder) / "program.py"
    program.write_text(PROGRAM.format(functions=functions))
    torchrun(str(program), 2, folder)
    files = [torch.load(Path(folder) / f"rank-{rank}.pt") for rank in range(2)]
print("torchrun and the virtual ranks, bit for bit:", same_bits(files, virtual.results))

# %% [markdown]
# The function is the one of lesson 05, to the letter. On several machines the command names the rendezvous, `torchrun
# --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 program.py`, and on GPUs
# `connect("nccl")` puts NCCL in gloo's place. When a rank fails, torchrun ends all others, and can start all of them
# again. Your program then has to load what it saved before.
#
# ## Recap
#
# - A process shares nothing. It is given a rank, a world size and a rendezvous; everything else is messages.
# - On one machine and with equally many threads, the same function gives the same bits on virtual ranks, under `launch` and
#   under torchrun. Only time differs.
# - A send ends when it is received. If all send first, they deadlock: silently on real processes, with a description on
#   virtual ranks. Post both ends at once, or let some ranks receive first. If only one does, the others wait in a line.
# - Messages of one pair arrive in order. Tag K and V, or send them together, and agree on the call before data moves.
# - A death reaches the others as `PeerDiedError`, one rank per step. A slow rank makes both its neighbours wait, and does not
#   wait itself.
# - `isend` is not overlap. Compute between post and wait, and ask who moves the bytes.
#
# ## Self-check
#
# <details><summary>1. A job hangs on 64 GPUs. What do you do first?</summary>
#
# Run the same program on virtual ranks. If the program is at fault, they name the circle, or the rank that left. If it
# runs through, look at the machines: which rank does not wait for another one?
# </details>
#
# <details><summary>2. Your program appends losses to a global list and prints it at the end. What does it print under
# torchrun?</summary>
#
# Every process prints its own losses.
# </details>
#
# <details><summary>3. 6 ranks, of which 2 and 5 receive first: ranks 0 and 1 are neighbours, and both send first. Is this a
# deadlock?</summary>
#
# No. Rank 2 receives from 1, which then receives from 0, which then receives from 5: a line of three messages, not a circle.
# </details>
#
# <details><summary>4. Rank 6 of 16 dies before its exchange number 2, counted from 0. How many blocks does rank 9
# hold?</summary>
#
# It is 3 ranks away: 3 blocks, had the death come before the first exchange, and one for each of the 2 before it: 5.
# </details>
#
# Now build it yourself: [exercise 11](../exercises/11_real_processes.ipynb), an order, a ring of unknown lengths, and what
# survives.
