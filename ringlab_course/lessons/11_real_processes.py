# %% [markdown]
# # 11 · Real processes
#
# **Afterwards you can** run the ring of lesson 05 on real processes and under torchrun, order sends and receives so that they cannot deadlock, and say what
# every rank gets when one of them dies, is slow, or was called otherwise.
#
# **You need first** [lesson 05](05_emulated_ring.ipynb), the ring on virtual ranks.
#
# **Minutes** 60 to read and run; the exercise takes another 60.
#
# So far all ranks lived in this notebook. From here on each is a program of its own, which the operating system starts, runs beside the others, and may kill.
# Nothing about attention changes. What changes is how things go *wrong*: a virtual ring that is stuck tells you so, and a real one is silent.

# %%
import inspect
import math
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import torch
import torch.distributed as dist

from ringlab import VirtualCluster, contiguous, launch, ring_attention
from ringlab.comm.wrappers.faulty import Fault
from ringlab_course import compare, corpus, predict
from ringlab_course.checking.faults import Faults
from ringlab_course.checking.virtual_ranks import run_virtual
from ringlab.errors import AgreementError, DeadlockError, PeerDiedError, RankFailedError, TransportTimeout
from ringlab.merge import Partial, merge
from ringlab.viz import gantt
from ringlab.viz.style import show

torch.set_num_threads(1)

# %% [markdown]
# ## 1 · A process has its own memory
#
# `VirtualCluster(P).run(program)` ran a program on P ranks inside this process. `launch(program, P)` starts P new processes and runs it there, joined by
# *gloo*, PyTorch's transport for CPUs. (*NCCL* is its sister for NVIDIA's GPUs.) What a rank prints appears here as it comes, behind the rank's number.

# %% tags=["nbval-ignore-output"]
def hello(ring):
    print(f"process {os.getpid()}, started by {os.getppid()}; I send to rank {ring.next}", flush=True)
    return os.getpid()


started = time.monotonic()
pids = launch(hello, 3).results
seconds = time.monotonic() - started
print(f"this notebook is process {os.getpid()}; {len(set(pids))} others came and went in {seconds:.1f} s")

# %% [markdown]
# How did they find each other? Somebody has to tell each process three things: its **rank**, the **world size**, and an address at which all of them meet, the
# **rendezvous**: there everybody leaves the port it listens on and reads the ports of the others. After that they talk directly. `launch` chooses a free port,
# passes all three on, and clears up behind them. Nearly all of the seconds went into importing PyTorch once in every process.
#
# Now a program that writes into a list of this notebook, on two ranks.

# %% tags=["nbval-ignore-output"]
predict("11.shared", "Two processes append their rank to a list of this notebook. Its length here afterwards?",
        choices=["0", "1", "2"])

# %%
seen = []


def remember(ring):
    seen.append(ring.rank)
    return len(seen)


lengths = launch(remember, 2).results
print("length in each process:", lengths)
compare("11.shared", str(len(seen)))
print("and on two virtual ranks:", VirtualCluster(2).run(remember).results, "here:", len(seen))

# %% [markdown]
# **None.** Program, arguments and globals were *copied* to each process, and each appended to its own copy. A process sees nothing of another but messages.
# Virtual ranks are threads of one process, so they do share the list: a program that relies on that works there and nowhere else. Return what you want to have;
# keep nothing in globals.
#
# ## 2 · The same program, the same bytes
#
# Here is the overlapped ring of lesson 05, word for word. Two ranks, real text.

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


def on_shards(ring, layout, program, *whole):
    return program(ring, *layout.shard(whole, ring.rank))


# %%
layout, qkv = contiguous(S=1024, P=2), corpus.qkv(1024, heads=4, head_dim=32)
virtual = VirtualCluster(2).run(on_shards, layout, overlapped_ring, *qkv)
real = launch(on_shards, 2, layout, overlapped_ring, *qkv)
pairs = zip(virtual.results, real.results, strict=True)
same = [torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True)]
print("out and lse of both ranks, bit for bit:", same)
sent = [sorted((e.rank, e.to, e.shapes, e.bytes_sent) for e in run.trace.exchanges()) for run in (virtual, real)]
print("the same messages:", sent[0] == sent[1], "  bytes of rank 0:", real.trace.bytes_sent(0))

# %% [markdown]
# Not one bit differs, and the same messages were sent. This is what makes virtual ranks worth having: what is left to differ is **time**, and who is there. On
# the virtual clock a computation takes a second because we said so. Here it takes as long as it takes, another time on every run. Below are the processes' own
# clocks: the computations of each rank, and under them its message, from `post` to the end of `wait`. What is hatched was waited for.

# %% tags=["nbval-ignore-output"]
show(gantt.figure(real.trace, "Two processes"), gantt.describe(real.trace, "Two processes"))

# %% [markdown]
# The ranks neither begin together nor take equally long, and yet a rank seldom waits: while it computed, the next block came.
#
# ## 3 · A deadlock, produced
#
# Underneath are two operations: *send* to one rank, *receive* from one rank. `ring.shift` posts both at once. Take it apart:

# %%
def send(ring, x, to):
    """Send x; return once rank `to` has received it."""
    ring.comm.exchange(send=(x,), to=to, tag="x").wait()


def receive(ring, like, source):
    return ring.comm.exchange(receive=(torch.empty_like(like),), source=source, tag="x").wait()[0]


def all_send_first(ring):
    x = torch.tensor([ring.rank])
    send(ring, x, ring.next)
    return receive(ring, x, ring.previous)

# %% tags=["nbval-ignore-output"]
predict("11.send", "Two processes each send 4 bytes to the other, then receive. What happens?",
        choices=["it works: 4 bytes fit into any buffer", "one of them gets an error at once", "both wait for ever"])

# %% [markdown]
# To be fair to gloo, we ask it directly, without anything of ours between: `dist.send` and `dist.recv` of PyTorch.

# %%
def plain_torch(ring):
    x, y = torch.ones(1), torch.empty(1)
    dist.send(x, ring.next)
    dist.recv(y, ring.previous)
    return y


try:
    launch(plain_torch, 2, timeout=2)
    outcome = "it works: 4 bytes fit into any buffer"
except TransportTimeout as error:
    outcome = "both wait for ever"
    print(error)
compare("11.send", outcome)

# %% [markdown]
# Nothing would ever have happened: *we* had set a limit, two seconds from when all are connected, and all that can be said is who has not come back. A send is
# over when the other side has received, and nobody receives. (MPI and NCCL buffer small messages in some cases; such a program then works until the day your
# tensors grow.) Now the same orders on the virtual cluster, without a limit, and on three ranks, so that one can see which way round they wait:

# %%
try:
    VirtualCluster(3).run(all_send_first)
except DeadlockError as error:
    print(error)

# %% [markdown]
# It knows who waits for whom, and so sees the circle. **When a real run hangs, run it on virtual ranks.**
#
# The cure is to break the circle: somebody must receive first. One rank is enough. Or every second one. `in_order` takes the ranks that send first:

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
predict("11.chain", "8 ranks, all but rank 0 send first. How many messages' time does the shift take?",
        unit="messages")

# %%
def in_messages(P, program, *args):
    run = VirtualCluster(P).run(program, *args)
    assert run.results == [(rank - 1) % P for rank in range(P)]
    return round(max(event.done for event in run.trace.exchanges()) / 0.5)  # a virtual message takes half a second


def at_once(ring):
    return ring.shift(torch.tensor([ring.rank])).item()


line = in_messages(8, in_order, range(1, 8))
evens = [in_messages(P, in_order, range(0, P, 2)) for P in (8, 9)]
print(f"all but rank 0 send first: {line} messages; even ranks: {evens[0]}, and {evens[1]} among 9 ranks")
print("both ends posted at once:", in_messages(8, at_once))
compare("11.chain", line)

# %% [markdown]
# With one receiver the ranks wait in a *line*: rank 7 can only begin to receive when rank 0 has taken its message, and so on around. With every second rank
# first it takes 2 messages' time, 3 where P is odd and two neighbours do the same; posting both ends at once needs one. In plain PyTorch that is
# `dist.batch_isend_irecv`, and it is what `ring.post` does. Both cures, on real processes:

# %%
def plain_batch(ring):
    x, y = torch.tensor([float(ring.rank)]), torch.empty(1)
    ends = [dist.P2POp(dist.isend, x, ring.next), dist.P2POp(dist.irecv, y, ring.previous)]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    return int(y)


cured = launch(lambda ring: (plain_batch(ring), in_order(ring, {0, 2})), 3).results
print("whose x, batched and in order, on three processes:", cured)

# %% [markdown]
# ## 4 · Called otherwise
#
# Deadlock has an evil twin: ranks that exchange *something else*. Let odd ranks send V before K, all of one shape. Virtual ranks will do, and here they
# know no more than real ones, since nobody is stuck.

# %%
def mixed_up(ring):
    k, v = torch.tensor([ring.rank]), torch.tensor([ring.rank + 100])
    order = "vk" if ring.rank % 2 else "kv"
    return {name: ring.shift({"k": k, "v": v}[name]).item() for name in order}


print("what each rank takes for k and v:", VirtualCluster(2).run(mixed_up).results)

# %% [markdown]
# No error, no hang: K arrived as V. Messages between two ranks come in the order of sending, and nobody but you knows what they mean. So send K and V in *one*
# exchange. A wrong shape, dtype or tag is noticed, as ringlab sends a header ahead of each message. And options never travel at all: what if one process was
# called with `causal=True`, another one without?

# %% tags=["nbval-ignore-output"]
predict("11.agree", "Rank 0 runs ring_attention with causal=True, rank 1 with False. How many bytes of K and V travel?",
        unit="bytes")

# %%
def called_otherwise(ring, layout, *whole):
    try:
        return ring_attention(*layout.shard(whole, ring.rank), ring=ring, layout=layout, causal=ring.rank == 0)
    except AgreementError as error:
        return type(error).__name__, error.remedy


asked = launch(called_otherwise, 2, layout, *qkv)
print(*asked.results, sep="\n")
compare("11.agree", asked.trace.bytes_sent())

# %% [markdown]
# **Not one**, and *both* ranks get the error. Before any data moves, ranks compare a description of the call, 512 bytes each. If only the rank that is wrong
# raised, the others would wait for it: an error on one rank is a hang on all others, unless somebody tells them.
#
# ## 5 · A rank dies
#
# Machines fail, and systems kill what takes too much memory. A process that is killed says nothing. `Fault("kill", rank=2, exchange=1)` is such a death, a
# SIGKILL before the second of its exchanges. Four processes:

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
for rank in (0, 1, 3):
    text = died.errors[rank]
    print(f"rank {rank}: a PeerDiedError: {'PeerDiedError' in text}, which names rank 2: {'rank 2' in text}")

# %% [markdown]
# The other three got a `PeerDiedError` that names the dead rank, rank 0 too, which never spoke with it. Look at the seconds: nobody waited for a timeout,
# which for one message is three quarters of the 120 s that we allowed. The system closes a dead process's connections, so its neighbours know in a moment;
# rank 0 hears when *they* have gone, and failed ranks stay two seconds for last words. `launch` then gives *one* error, of the rank that failed first, with
# what the others saw in `errors`, and leaves no process behind. Plain gloo gives a line like "connection closed by peer", and who the peer was is up to you.
#
# Who notices when? Not everybody at once: only a missing message tells. Take eight ranks, of which rank 3 dies before its first exchange. Virtual ones, and
# `run_virtual`, which the exercise's checks use: it goes on when a rank is killed, and gives what the others returned.

# %% tags=["nbval-ignore-output"]
predict("11.cone", "Rank 3 of 8 dies before its first exchange. How many blocks will rank 7 have had, with its own?",
        unit="blocks")

# %%
def how_many(ring):
    blocks = [torch.tensor([ring.rank])]
    try:
        while len(blocks) < ring.world_size:
            blocks.append(ring.shift(blocks[-1]))
    except PeerDiedError:
        pass
    return len(blocks)


lost = run_virtual(8, how_many, Faults(kill=(3, 0))).results
print("blocks on ranks 0 to 7:", ["dead" if rank == 3 else count for rank, count in enumerate(lost)])
compare("11.cone", lost[7])

# %% [markdown]
# News of a death travel **one rank per step**, both ways round: the neighbours miss their first exchange, *their* neighbours the second. So a rank holds as
# many blocks as it is ranks away. Rank 7, on the other side, gets three blocks more than rank 4. What it holds is a correct partial over the blocks that
# came. The exercise keeps it.
#
# ## 6 · A rank is slow
#
# Slow is worse than dead: nothing fails. In a ring of three let a step take half a second, and 1.5 s on rank 1.

# %% tags=["nbval-ignore-output"]
predict("11.slow", "Three steps of 0.5 s, on rank 1 of 1.5 s. When is the ring done, about?",
        choices=["1.5 s", "2.5 s", "4.5 s"])

# %% [markdown]
# This time the timeline is drawn **while** the processes run: they tell each event as it is over, and the chart grows with what has come. (Drawing takes
# from the two cores that the ranks compute on; ranks that sleep do not mind.)

# %% tags=["nbval-ignore-output"]
def work_for(seconds):
    time.sleep(seconds)


def paced(ring):
    x = torch.zeros(1)
    for step in range(ring.world_size):
        work = ring.post(x) if step < ring.world_size - 1 else None
        ring.compute(f"step {step}", work_for, 1.5 if ring.rank == 1 else 0.5)
        print(f"step {step} is done", flush=True)
        if work:
            (x,) = work.wait()


with gantt.live("Rank 1 is slow", until=4.6) as watch:
    slow = launch(paced, 3, watch=watch)

# %%
end = gantt.chart(slow.trace).makespan
compare("11.slow", min(("1.5 s", "2.5 s", "4.5 s"), key=lambda choice: abs(float(choice[:3]) - end)))

# %% [markdown]
# The run ends when its slowest rank does. The two others get one step ahead of it, wait for its next block, and are then through, as there are only three
# blocks; in a longer ring they would wait again and again. Who is at fault? **The slow rank is the one that does not wait.** A profile of rank 0 alone would
# show time spent in `wait`, and blame the network.
#
# ## 7 · Does `isend` mean overlap?
#
# `isend` returns at once. Is the hop then hidden? Three rings, on the virtual clock, where a block takes 1 s and a hop half a second: shift after computing;
# post, *wait, compute*; post, compute, wait.

# %% tags=["nbval-ignore-output"]
predict("11.isend", "Four ranks. Compute, then shift takes 5.5 s. And post, wait, compute?",
        choices=["4.0 s", "4.5 s", "5.5 s"])

# %%
def ring_in_order(ring, q, k, v, order):
    state = Partial.identity(q)
    for step in range(ring.world_size):
        block = (k, v)
        for what in order if step < ring.world_size - 1 else ("compute",):
            if what == "compute":
                state = merge(state, ring.compute(f"attend {step}", attend, q, *block))
            elif what == "post":
                work = ring.post(*block)
            else:
                k, v = work.wait()
    return state.out


ORDERS = [("compute", "post", "wait"), ("post", "wait", "compute"), ("post", "compute", "wait")]

# %%
four = contiguous(S=64, P=4)
small = corpus.qkv(64, heads=1, head_dim=8)
runs = [VirtualCluster(4).run(on_shards, four, partial(ring_in_order, order=order), *small) for order in ORDERS]
ends = [max(event.end for event in run.trace.computes()) for run in runs]
for order, run, end in zip(ORDERS, runs, ends, strict=True):
    print(f"{', '.join(order)}: {end} s, of which rank 0 waited {run.trace.exposed(0)} s")
compare("11.isend", f"{ends[1]} s")

# %% [markdown]
# `isend` alone hides nothing. A hop hides behind what is computed **between post and wait**, and nothing else. That is a necessary condition, and on the
# virtual clock, where links work by themselves, a sufficient one. On real machines somebody has to move the bytes: for gloo that is a thread on *your*
# processor; NCCL takes some of the GPU's multiprocessors; a copy engine takes neither. Measured here, on two processes:

# %% tags=["nbval-ignore-output"]
def all_orders(ring, layout, *whole):
    for order in ORDERS:
        ring.barrier()
        ring_in_order(ring, *layout.shard(whole, ring.rank), order)


measured = launch(all_orders, 2, contiguous(S=2048, P=2), *corpus.qkv(2048, heads=4, head_dim=64)).trace
for order, *hops in zip(ORDERS, measured.exchanges(0), measured.exchanges(1), strict=True):
    waited = " and ".join(f"{1000 * hop.exposed:.1f}" for hop in hops)
    print(f"{', '.join(order)}: the ranks waited {waited} ms for {hops[0].bytes_received:,} bytes")
show(gantt.figure(measured, "Three orders, one after another"), gantt.describe(measured, "Three orders"))

# %% [markdown]
# (Dotted is the barrier between two orders: the ranks agree to go on.) Run the cell again: these numbers move. Mind what the wait contains. A rank
# waits for the *other rank* as well as for the bytes. On a processor with two cores and two ranks no core is left over for gloo's threads, so what a hidden
# hop saves in waiting, the computation may pay back. What you can say without a stopwatch is the order of the events, and that is what the exercise looks at;
# for speed, measure on the machine that you mean, more than once. On GPUs, lesson 13 will.
#
# ## 8 · torchrun
#
# On a cluster it is not this notebook that starts processes, but **torchrun**, on each machine. It tells each process what it needs through its environment:
# `RANK`, `WORLD_SIZE`, and `MASTER_ADDR` with `MASTER_PORT` for the rendezvous. `connect()` reads them. The program below is made of the source of this
# notebook's cells, and each rank leaves what it has in a file.

# %%
PROGRAM = """import math, sys, torch
from ringlab import connect, contiguous
from ringlab_course import corpus
from ringlab.merge import Partial, merge

{functions}

with connect() as ring:
    layout, qkv = contiguous(S=1024, P=ring.world_size), corpus.qkv(1024, heads=4, head_dim=32)
    torch.save(overlapped_ring(ring, *layout.shard(qkv, ring.rank)), f"{{sys.argv[1]}}/rank-{{ring.rank}}.pt")
"""
functions = "\n\n".join(inspect.getsource(function) for function in (attend, overlapped_ring))


# %%
def torchrun(program, ranks, *args):
    """Run a file under torchrun; `--standalone` says that all ranks are on this machine."""
    options = ["--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, program, *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with Popen(command, env=environment, stdout=PIPE, stderr=STDOUT, text=True, start_new_session=True) as agent:
        try:
            said, _ = agent.communicate(timeout=120)
        finally:
            agent.terminate()  # torchrun then ends its ranks; killed, it would leave them behind
    if agent.returncode:
        raise RuntimeError(said)

# %%
with tempfile.TemporaryDirectory() as folder:
    program = Path(folder) / "program.py"
    program.write_text(PROGRAM.format(functions=functions))
    torchrun(str(program), 2, folder)
    files = [torch.load(Path(folder) / f"rank-{rank}.pt") for rank in range(2)]
same = [torch.equal(a, b) for x, y in zip(files, virtual.results, strict=True) for a, b in zip(x, y, strict=True)]
print("torchrun, bit for bit the virtual ranks:", same)

# %% [markdown]
# The function has not changed by a letter since lesson 05. On several machines the command names the rendezvous, `torchrun --nnodes 2 --nproc-per-node 8
# --rdzv-endpoint HOST:29500 program.py`, and on GPUs `connect("nccl")` takes gloo's place. When a rank fails torchrun ends all others and can start the whole
# world again, from what you saved.
#
# ## Recap
#
# - A process shares nothing. Rank, world size and a rendezvous are all it is given; the rest are messages.
# - The same function gives the same bits on virtual ranks, under `launch` and under torchrun. Time is what differs.
# - A send ends when it is received. All send first: a deadlock, silent on real processes, drawn on virtual ranks. Post both ends at once, or let even ranks
#   send first; one rank first makes a line.
# - Messages of one pair arrive in order, and mean what you think they mean. Send K and V together; agree on the call before data moves.
# - A dead rank reaches the others as `PeerDiedError`, one rank per step. A slow rank reaches them as waiting; it is the one that does not wait.
# - `isend` is no overlap. Compute between post and wait, and ask who moves the bytes.
#
# ## Self-check
#
# 1. A job hangs on 64 GPUs, and all ranks stand in `wait`. What do you do first? *(Run the same program on virtual ranks: it names the circle, or the rank that
#    left.)*
# 2. Your program appends losses to a global list and prints it at the end. What does it print under torchrun? *(Every process its own losses.)*
# 3. 5 ranks, even ones send first: ranks 4 and 0 are neighbours and both send first. Deadlock? *(No. Rank 1 receives from 0, which then receives from 4: a line
#    of three messages, no circle.)*
# 4. Rank 6 of 16 dies before its exchange 2. How many blocks does rank 8 hold? *(2 hops away: 2 + 2 = 4.)*
#
# Now build it yourself: [exercise 11](../exercises/11_real_processes.ipynb), an order, a ring of unknown lengths, and what survives.
