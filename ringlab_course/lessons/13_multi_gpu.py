# %% [markdown]
# # 13 · Multi-GPU ring attention
#
# **Afterwards you can** launch a ring on one machine or many, read a profile of it as lanes, say what of its communication is exposed and who holds it up, and
# report an efficiency that survives a second look.
#
# **You need first** [lesson 06](06_what_it_costs.ipynb), what it costs; [lesson 11](11_real_processes.ipynb), real processes.
#
# **Minutes** 75 to read and run; the exercise takes another 60.
#
# The ring is right, and it runs. Now somebody asks whether it is *fast*, and three things go wrong, in this order: the ranks are not where you think they
# are; the profile shows something else than what you read into it; the number in your table answers another question. None of the three raises an error.
#
# Everything here runs on a laptop, on real processes over gloo. With two GPUs or more the same cells use NCCL. Recorded figures are of CPU processes, and say
# so; at the end stands how to put those of your cluster in their place.

# %%
import json
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import numpy as np
import torch
from torch.profiler import profile, record_function

from ringlab import launch, ring_attention, zigzag
from ringlab.bench.profile import recorded
from ringlab.blocks import get_block
from ringlab.cost import hardware, sizes
from ringlab.cost.simulate import Network, simulate
from ringlab.checkout import find_checkout
from ringlab_course import compare, predict
from ringlab_course.lab import l1, preflight, result, start
from ringlab.merge import Partial, merge
from ringlab.viz import lanes, style
from ringlab_course.figures import profiler_lanes

# %%
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages
GPUS = torch.cuda.device_count()
RANKS, TRANSPORT, DEVICE = (GPUS, "nccl", "cuda") if GPUS > 1 else (2, "gloo", "cpu")
LABS = find_checkout() / "benchmarks" / "results" / "lab"

# %% [markdown]
# ## 1 · Launching
#
# On one machine: `torchrun --standalone --nproc-per-node gpu program.py`, a process for every GPU. On two, the same command on each, with who is who:
#
# ```sh
# torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr node0 --master-port 29500 program.py
# torchrun --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr node0 --master-port 29500 program.py
# ```
#
# Under SLURM `srun` starts that line once on every node, and a rendezvous deals out the numbers; `docs/labs/slurm.sh` is such a script, `docs/labs/ssh.sh`
# does it by plain ssh. Whoever starts them, four things must hold: every process has a RANK of its own, all the same WORLD_SIZE, all one meeting place, and
# each a device that nobody else takes. The last one goes by LOCAL_RANK.

# %% tags=["nbval-ignore-output"]
predict(
    "13.local",
    "Two machines with 2 processes each. Which GPU of its machine does the process with RANK 3 take?",
    unit="(0 is the first)",
)

# %% [markdown]
# Two machines can be had on one: two `torchrun`s that think they are on different ones, and meet at a port of this one.

# %%
PROGRAM = """import json, os, sys, torch
from ringlab import connect

with connect() as ring:
    heard = ring.shift(torch.tensor([ring.rank])).item()
    facts = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK")}
    with open(f"{sys.argv[1]}/{ring.rank}.json", "w") as file:
        json.dump({**facts, "heard from": heard}, file)
"""


# %%
def torchrun(node, port, *arguments):
    """Start torchrun as node `node` of 2, with 2 processes; a session of its own, so that all can be ended."""
    where = f"--nnodes 2 --node-rank {node} --master-addr 127.0.0.1 --master-port {port} --nproc-per-node 2"
    command = [sys.executable, "-m", "torch.distributed.run", *where.split(), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return Popen(command, env=environment, stdout=PIPE, stderr=STDOUT, text=True, start_new_session=True)


# %%
with tempfile.TemporaryDirectory() as folder, socket.socket() as held:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # bound, not listening: kept free for torchrun
    held.bind(("127.0.0.1", 0))
    port, program = held.getsockname()[1], Path(folder) / "program.py"
    program.write_text(PROGRAM)
    agents = [torchrun(node, port, str(program), folder) for node in (0, 1)]
    try:
        said = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # torchrun then ends its ranks; killed, it would leave them behind
    if any(agent.returncode for agent in agents):
        raise RuntimeError("\n".join(said))
    found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(4)]
for facts in found:
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
compare("13.local", found[3]["LOCAL_RANK"])

# %% [markdown]
# RANK is a place in the ring, LOCAL_RANK a place in the machine. (`GROUP_RANK` is torchrun's name for the machine.) So the launcher decides *which hops are
# fast*. torchrun deals ranks out machine by machine. Where `srun` starts every rank itself, they may also be dealt out in turn (`--distribution=cyclic`). On
# two machines with eight GPUs each:


# %%
def hops_between(machines):
    """How many hops of the ring leave a machine; `machines[r]` is that of rank r."""
    return sum(here != after for here, after in zip(machines, [*machines[1:], machines[0]], strict=True))


for name, machines in {"machine by machine": [0] * 8 + [1] * 8, "in turn": [0, 1] * 8}.items():
    print(f"{name}: {hops_between(machines)} of 16 hops leave a machine")

# %% [markdown]
# A ring is as fast as its slowest hop, and a step takes as long with two slow links as with sixteen; but in turn, eight GPUs push their blocks through the
# network at the same time, where one would. Look before you measure. `ringlab lab preflight` gathers what every rank says of itself and compares; `ringlab lab`
# begins with the same look, and then on all ranks or on none:

# %% tags=["nbval-ignore-output"]
everyone, findings = start.look(l1.L1(), start.Start(Path("l1.json"), ranks=RANKS, transport=TRANSPORT))
for finding in findings:
    print("ok " if finding.ok else "NO ", finding.name, "·", finding.told)

# %% [markdown]
# What if the last rank had another version of PyTorch? Then the two may well agree on the bytes of a message and not on what is computed of them:

# %%
older = {**everyone[-1], "versions": {**everyone[-1]["versions"], "torch": "2.11.0"}}
for finding in preflight.judge([*everyone[:-1], older], 0, None):
    if not finding.ok:
        print(finding.name, "· remedy:", finding.remedy)

# %% [markdown]
# ## 2 · What a profiler writes
#
# Two rings that differ in nothing but the order of three words, from lesson 11: post, wait, compute; and post, compute, wait. Three layers of each, on real
# processes, under `torch.profiler`. It writes Chrome's trace format: a list of events with a name, a category, a beginning and a duration.

# %%
ORDERS = {
    "post, wait, compute": ("post", "wait", "compute"),
    "post, compute, wait": ("post", "compute", "wait"),
}


def ring_in_order(ring, q, k, v, order):
    state, block = Partial.identity(q), get_block("auto", q)
    for step in range(ring.world_size):
        here = k, v
        for what in order if step < ring.world_size - 1 else ("compute",):
            if what == "post":
                work = ring.post(k, v)
            elif what == "wait":
                k, v = work.wait()
            else:
                state = merge(state, block.forward(q, *here, causal=False, scale=0.125))
    return state.out


# %%
def profiled(ring, order):
    """The events of three layers on this rank, after one that is not profiled."""
    torch.manual_seed(ring.rank)
    q, k, v = (torch.randn(1, 8, 1024, 64, device=DEVICE) for _ in range(3))
    ring_in_order(ring, q, k, v, order)
    with profile() as profiler:
        ring.barrier()
        with record_function(lanes.MARK):  # second 0 of every rank, by whatever clock it has
            pass
        for _ in range(3):
            ring_in_order(ring, q, k, v, order)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        return json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]


def both(ring):
    return {name: profiled(ring, order) for name, order in ORDERS.items()}


events = launch(both, RANKS, transport=TRANSPORT, memory=False).results  # [rank][order]

# %% tags=["nbval-ignore-output"]
kinds = Counter(
    (event.get("cat"), event["name"]) for event in events[0]["post, compute, wait"] if event["ph"] == "X"
)
for (category, name), count in kinds.most_common(6):
    print(f"{count:4} × {category}: {name}")
print("   …")
for (category, name), count in kinds.items():
    if "gloo" in name or "nccl" in name.lower():
        print(f"{count:4} × {category}: {name}")

# %% [markdown]
# Hundreds of events, and nearly all are noise: operators that call operators. Two lanes are enough to begin with. **Compute**: on a CPU PyTorch's operators,
# on a GPU its kernels (what the CPU did then is launching, and waiting). **Copy**: gloo's messages, NCCL's kernels. Frames that contain everything else, such
# as an autograd function, belong to neither.


# %%
def lane_of(event):
    """On a CPU; with GPU events in it a trace's operators count for nothing: see ringlab.viz.lanes."""
    if event.get("ph") != "X":
        return None
    if event["name"].startswith("gloo:"):
        return "copy"
    return "compute" if event["name"].startswith("aten::") else None


def read(events):
    """(lane, beginning, end) in seconds from the mark."""
    begin = next(event["ts"] for event in events if event["name"] == lanes.MARK)
    rows = [(lane_of(event), event["ts"] - begin, event.get("dur", 0)) for event in events if "ts" in event]
    return [
        (lane, start / 1e6, (start + length) / 1e6) for lane, start, length in rows if lane and start >= 0
    ]


# %% [markdown]
# Spans of a lane overlap and lie inside one another, so durations must not be added up. What counts is the time that they cover together: their **union**.
# With that, what is *exposed*, copied while nothing is computed, takes no more than two unions.


# %%
def covered(spans):
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def exposed(compute, copy):
    return covered([*compute, *copy]) - covered(compute)


# %%
record = recorded()
print(record.label)
print(record.machine)
for name, spans in record.runs.items():
    for rank in (0, 1):
        own = {
            lane: [(s.start, s.end) for s in spans if (s.rank, s.lane) == (rank, lane)]
            for lane in ("compute", "copy")
        }
        hidden = 1 - exposed(**own) / covered(own["copy"])
        same = abs(hidden - lanes.overlap(spans, rank).fraction) < 1e-9
        print(f"{name}, rank {rank}: {hidden:.0%} of its copying is hidden (ringlab says the same: {same})")

# %% [markdown]
# That was the *recorded* run, so that the figures here stay what they are. (That machine had other things to do as well, which is why blocks are not equally
# long.) Its lanes, for all ranks or one of them:

# %% tags=["nbval-ignore-output"]
profiler_lanes.play(record.runs)

# %% [markdown]
# Both programs post at once, and in the first one nothing is hidden: **`isend` does not mean overlap**. The second hides nearly all of it. What is left
# need be no message: a bar lasts, too, while the other rank is late (section 4). Now your run:

# %% tags=["nbval-ignore-output"]
yours = {
    name: [span for rank in range(RANKS) for span in lanes.read({"traceEvents": events[rank][name]}, rank)]
    for name in ORDERS
}
style.show(profiler_lanes.figure(yours), profiler_lanes.describe(yours))

# %%
if DEVICE == "cpu":
    for name in ORDERS:
        mine = read(events[0][name])
        own = {lane: [(start, end) for of, start, end in mine if of == lane] for lane in ("compute", "copy")}
        same = abs(covered(own["copy"]) - lanes.overlap(yours[name], 0).copy_s) < 1e-9
        print(f"{name}: read by hand, rank 0 has the same lanes: {same}")

# %% [markdown]
# ## 3 · Hidden is not saved
#
# A lane says *when* something happened. It does not say what that cost the other lane. Lab L1 asks for this: it times a block alone, a hop alone, and both at
# once, in turn. On the two recorded processes:

# %% tags=["nbval-ignore-output"]
predict(
    "13.saved",
    "Two processes on two cores, and nearly all of a hop hides. What does that save, beside block and hop one after the other?",
    choices=["the hop", "some of the hop", "nothing"],
)

# %%
overlaps = result.load(LABS / "l1-two-processes.json")
print(overlaps["label"])
for case in (case for case in overlaps["cases"] if case["case"] == "overlap"):
    block, hop, at_once = (1000 * case[f"{name}_s"] for name in ("compute", "exchange", "both"))
    print(
        f"{case['tokens']:5} tokens: block {block:5.1f} ms, hop {hop:4.1f} ms; one after the other {block + hop:5.1f}, "
        f"at once {at_once:5.1f} ms; hidden {case['hidden']:.2f}"
    )
compare(
    "13.saved",
    "the hop" if at_once < block + hop / 10 else "some of the hop" if at_once < block + hop else "nothing",
)

# %% [markdown]
# **Nothing**: at all four lengths both at once take *longer*, though the picture is full of orange under blue. gloo's threads copy on the cores that
# compute, and take turns with them. On a GPU it is NCCL's kernels that occupy some multiprocessors, and `NCCL_MAX_CTAS` says how many; a copy engine, as
# behind symmetric memory, takes none. So a profile finds exposed communication, and only a measurement with and without finds what hiding is worth. Lab L1
# is that measurement, and its ratio `hidden` is 1 where a hop is free, 0 where nothing is gained, and negative here.
#
# ## 4 · A long bar is no slow link
#
# Four ranks, zig-zag. In one ring rank 2 takes three times as long for its blocks, as a chip does that is too hot, or has somebody else's job. In the other
# the link out of rank 1 has a tenth of its rate. Both are *simulated*: what we want is their pattern.

# %% tags=["nbval-ignore-output"]
predict(
    "13.blame", "Rank 2 is slow. Which rank waits least?", choices=["rank 0", "rank 1", "rank 2", "rank 3"]
)


# %%
class SlowLink(Network):
    """A tenth of the rate from rank 1 to rank 2."""

    def bytes_per_s(self, source, to):
        return super().bytes_per_s(source, to) / np.where(source == 1, 10, 1)


shape, layout, machine = (
    sizes.Attention(1, 8, 8, 64, "float32", True),
    zigzag(4096, 4),
    hardware.hardware("laptop"),
)
link = machine.inside
sick = {
    "simulated, rank 2 is slow": simulate(shape, layout, machine, slow={2: 3.0}),
    "simulated, the link from 1 to 2 is slow": simulate(
        shape, layout, machine, network=SlowLink.uniform(4, link.bytes_per_s, link.latency_s)
    ),
}
for name, run in sick.items():
    waited = ", ".join(f"{x:.0%}" for x in run.waited_s / run.makespan_s)
    print(f"{name}: ranks 0 to 3 wait {waited} of the time")
compare("13.blame", f"rank {np.argmin(sick['simulated, rank 2 is slow'].waited_s)}")

# %% tags=["nbval-ignore-output"]
profiler_lanes.play({name: lanes.of_trace(run.trace()) for name, run in sick.items()})

# %% [markdown]
# In the first picture there are long copies with nothing beside them on rank 2's *neighbours*, then on theirs, and one would call the network slow; all links
# are sound. A bar begins when **its** rank posts. Nothing moves until the other end has posted too: NCCL's kernel spins all that while, and looks busy. The
# rank at fault is the one that never waits. In the second picture everybody waits, those at the link's two ends most.
#
# Two numbers contain nobody else's lateness: what a computation takes for its *work*, and what a message takes from when **both** ends have posted.

# %%
for name, run in sick.items():
    trace = run.trace()
    busy = [np.median([event.end - event.start for event in trace.computes(rank)]) for rank in range(4)]
    posted, done = (
        [np.array([getattr(hop, when) for hop in trace.exchanges(rank)]) for rank in range(4)]
        for when in ("posted", "done")
    )
    moved = [
        np.min(np.minimum(done[r - 1], done[r]) - np.maximum(posted[r - 1], posted[r])) for r in range(4)
    ]
    print(name)
    print(
        "   a computation, in blocks of rank 0:",
        ", ".join(f"rank {r} {busy[r] / busy[0]:.2f}" for r in range(4)),
    )
    print(
        "   a message, in blocks, at most:     ",
        ", ".join(f"{(r - 1) % 4}→{r} {moved[r] / busy[0]:.2f}" for r in range(4)),
    )

# %% [markdown]
# The first line finds a slow rank, the second a slow link, and neither is taken in by the other. ("At most": of a message that hides behind a block we only know
# that it was there when its `wait` asked for it; the shortest of its hops is the best bound.) These are differences between the clocks of *two* ranks: on two
# machines count each rank's time from a barrier, before you subtract. And mind the work: under the contiguous causal layout a long computation is no slow one.
#
# ## 5 · Equal local, or equal global?
#
# "One GPU does 8k tokens in a time T. Eight GPUs with 8k tokens each take 8.5 T. Ring attention is slower." You will meet this table.

# %% tags=["nbval-ignore-output"]
predict(
    "13.equal",
    "One process takes T for c tokens. A perfect ring of 2 processes with c tokens EACH takes",
    choices=["T / 2", "T", "2 T"],
)


# %%
def pairs(S):
    return S * (S + 1) // 2  # causal


ratio = pairs(2 * 8192) / pairs(8192) / 2
compare("13.equal", min(("T / 2", 0.5), ("T", 1), ("2 T", 2), key=lambda choice: abs(choice[1] - ratio))[0])
print("          the same sequence          as many tokens per rank")
print("  P   tokens   work  hop/block      tokens   work  hop/block")
for P in (1, 2, 4, 8, 16):
    strong, weak = (pairs(S) / P / pairs(8192) for S in (8192, 8192 * P))
    print(f"{P:3} {8192 // P:8} {strong:6.2f} {P:10} {8192:11} {weak:6.1f} {1:10}")

# %% [markdown]
# (Tokens and work of one rank; work and hop/block in those of P = 1.) Attention is quadratic: P times the tokens are P² times the pairs, and each of P
# ranks has P times as many. **As many tokens per rank is not as much work per rank.** The honest question is what *the same work* would take if it were split perfectly:
#
# $$\text{efficiency} = \frac{T_1 \cdot W_P / W_1}{P \cdot T_P},\qquad W = \text{visible pairs}.$$
#
# The ring of the anecdote has 64 times the pairs on 8 ranks, and 64 / (8 · 8.5) = 94%. Both tables are fair with that formula, and they answer different
# questions. **Strong** scaling keeps the sequence: blocks shrink as 1/P², hops as 1/P, so that a hop gets longer beside its block, and it ends badly for every ring. **Weak** scaling keeps the tokens
# per rank, and the ratio with them; it flatters. A report says which, or has both. Measured, on your machine, in turn:


# %%
def in_turn(ring, c, rounds):
    """Seconds of (one process with c tokens, the ring with c tokens per rank), by round, on this rank."""
    split = zigzag(c * ring.world_size, ring.world_size)
    q, k, v = (torch.randn(1, 8, c, 64, device=DEVICE) for _ in range(3))
    block, found = get_block("auto", q), []
    runs = (
        lambda: block.forward(q, k, v, causal=True, scale=0.125) if ring.rank == 0 else None,
        lambda: ring_attention(q, k, v, ring=ring, layout=split, causal=True, validate=False),
    )
    for _ in range(rounds):
        for run in runs:
            ring.barrier()
            begin = time.perf_counter()
            run()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - begin)
    return found


# %% tags=["nbval-ignore-output"]
measured = np.array(launch(in_turn, RANKS, 2048, 9, transport=TRANSPORT, memory=False).results)
one, ring_s = (
    measured[0, 4::2],
    measured[:, 5::2].max(axis=0),
)  # two rounds to warm up; the slowest rank of each round
print(
    f"one process, 2,048 tokens: {1e3 * np.median(one):.1f} ms; {RANKS} with 2,048 each: {1e3 * np.median(ring_s):.1f} ms"
)
print(
    f"as it is often told: {np.median(one / ring_s):.0%}; of a perfect split of the same work: {np.median(RANKS * one / ring_s):.0%}"
)

# %% [markdown]
# The one process here uses the *same block* as the ring, or the table would measure how good the block is. It has one of the cores while the others wait:
# on CPUs all share caches, memory and clock, so that figures above 100% happen. Lab L2 takes torch's own attention with as many threads as there are processes
# for the perfect split; on GPUs, one of them, by P. Its recorded run, forward and backward:

# %%
scaling = result.load(LABS / "l2-two-processes.json")
print(scaling["label"])
for case in (case for case in scaling["cases"] if case["pass"] == "forward_backward"):
    told = ", ".join(f"{name} {one['efficiency']:.2f}" for name, one in case["contenders"].items())
    print(f"{case['scaling']}, {case['S']} tokens on {case['P']}: {told}")

# %% [markdown]
# (Weak comes out lower here, not higher: with two ranks it has *half* the sequence, and small blocks.) Contiguous is what lesson 07 said: its slowest rank has
# (2P − 1)/P = 1.5 times the mean.
#
# ## 6 · FLOPs, once
#
# MFU, model FLOPs utilisation, is FLOP/s of the work that *had* to be done over the peak of all devices. Forward a visible pair takes 4·D FLOPs a head, backward
# 10·D: five products to the forward's two, one of them the scores again, which nobody kept. (Who calls the backward twice the forward, 8·D, leaves that
# one out: say how you count.) Hidden pairs are no work. The recorded ring counted them rightly. If it had counted S²:

# %%
rate = overlaps["cases"][-1]["flops_per_s"]  # of a block alone, without a mask, on one process
ring = scaling["cases"][0]["contenders"]["zigzag"]
once = ring["tflops_per_rank"] * 1e12 / rate
print(f"visible pairs: {once:.0%} of the rate of a block; all pairs: {2 * once:.0%}")
print(f"all pairs, against a peak three times as high: {2 * once / 3:.0%}")

# %% [markdown]
# More than everything: **a number above 100% is a counting mistake first.** A ring further from its peak hides the same mistake: the second figure looks like a result,
# and is on a slide. Two more such factors of two: a data sheet's peak "with sparsity" is twice what dense matrices can have, and a link's rate is often the
# sum of both directions. (And a GB is 10⁹ bytes there, 7% less than 2³⁰.)
#
# ## 7 · Which number of many
#
# Eleven times the same 4 KiB, from lab L1's file of section 3:

# %%
times = sorted(next(case for case in overlaps["cases"] if case["case"] == "bandwidth")["times_s"])
print("ms:", ", ".join(f"{1e3 * t:.2f}" for t in times))
print(f"best {1e3 * times[0]:.2f}, median {1e3 * np.median(times):.2f}, mean {1e3 * np.mean(times):.2f} ms")

# %% [markdown]
# The mean is made by three rounds in which the machine did something else. The best falls the longer you measure. The **median** stays. Five habits more:
#
# - **Warm up**: the first rounds load kernels, connect, allocate.
# - **Synchronise** on GPUs before reading a clock: otherwise you time the launching. Barrier before, and the *slowest rank* of each round.
# - **Interleave**: one round of each contender in turn. A clock that falls as the chip gets warm then hits all of them.
# - **Lock or read the clocks** (`nvidia-smi -q -d CLOCK`); every result of `ringlab lab` has them.
# - **Right first**: a ring that skips half of its blocks is fast. Labs L2 and L3 hold every result against float64.
#
# ## 8 · The lab sheet
#
# On your machine, or cluster; without GPUs they are `ringlab lab l1` and `ringlab lab l2`, with nothing behind them:
#
# ```sh
# torchrun --nproc-per-node gpu -m ringlab lab l1 --transport nccl --dtype bfloat16 --heads 16 --head-dim 128
# torchrun --nproc-per-node gpu -m ringlab lab l2 --transport nccl --dtype bfloat16 --heads 16 --head-dim 128
# ringlab lab report results --output results/report.html
# ```
#
# | before the run, on paper | after it |
# |---|---|
# | tokens per rank that hide a hop (lesson 06) | L1: the c from which *at once* is as long as the block |
# | hops that leave a machine | preflight: ranks per machine |
# | layouts in order, contiguous' factor (2P − 1)/P | L2: efficiencies, strong and weak |
# | bytes of a hop over the link's rate in one direction | L1: its bandwidth at that size |
#
# To read your own results in this notebook, give `result.load` your files; and for the lanes, `python -m ringlab.bench.profile lanes.json` records both orders
# (on all GPUs of a machine, where there are two or more), and `recorded(Path("lanes.json"))` reads them. `docs/labs.md` has the instructor's run sheets, and what to do
# when it hangs. Nothing of this lesson has been run on several GPUs yet: be the first, and trust no figure before you have looked at it twice.
#
# ## Recap
#
# - Who launches decides which hops are fast. RANK is a place in the ring, LOCAL_RANK a device; look before you measure.
# - Read a profile as lanes; take unions, never sums. Exposed: copied, and nothing computed at that moment.
# - `isend` is no overlap, and overlap is no gain until it is measured with and without.
# - A long bar of communication may be somebody's lateness. Seconds per work, and seconds from the later post, belong to one culprit.
# - As many tokens per rank is P times the work per rank. Efficiency: on the same work. Strong and weak, both.
# - Visible pairs, dense peaks, one direction, medians of the slowest rank.
#
# ## Self-check
#
# 1. 4 machines of 8 GPUs, ranks machine by machine. How many hops leave a machine? *(4: one out of each.)*
# 2. A rank's lanes: compute 0–6 and 8–10 ms, copy 5–9 ms. Exposed? *(2 ms, from 6 to 8; half is hidden.)*
# 3. In a trace of 64 GPUs all NCCL kernels are long but those of rank 17. Who is it? *(Rank 17: it comes last to every exchange.)*
# 4. 16 ranks, as many tokens each as one process had, 20 times its time. Efficiency? *(16/20: 80%.)*
# 5. A causal run reports 70% MFU, and its FLOPs are 4·S²·D·H. What is it? *(35%: half of those pairs are hidden.)*
#
# Now build the tools: [exercise 13](../exercises/13_multi_gpu.ipynb), a look before the launch, lanes, honest seconds, a report, and who holds the ring up.
