# %% [markdown]
# # 13 · Multi-GPU ring attention
#
# **Afterwards you can** launch a ring on one machine or many, read a profile of it as lanes, say how much of its
# communication is exposed and who holds it up, and report an efficiency that survives a second look.
#
# **You need first** [lesson 06](06_what_it_costs.ipynb), what it costs; [lesson 11](11_real_processes.ipynb), real processes.
#
# **Minutes** 75 to read and run; the exercise takes another 60.
#
# The ring is right, and it runs. Now somebody asks whether it is *fast*, and three things go wrong, in this order: the
# ranks are not where you think they are; the profile does not show what you read into it; the number in your table
# answers another question.
#
# Everything here runs, and was recorded, on real processes over gloo, on CPUs. On a machine with several GPUs the same cells
# choose NCCL, but **nobody has run them there yet**.

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
from ringlab.checkout import find_checkout
from ringlab.cost import hardware, sizes
from ringlab.cost.simulate import Network, simulate
from ringlab.merge import Partial, merge
from ringlab.viz import lanes, style
from ringlab_course import compare, predict
from ringlab_course.figures import profiler_lanes
from ringlab_course.lab import l1, preflight, result, start

# %%
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages
GPUS = torch.cuda.device_count()
RANKS, TRANSPORT, DEVICE = (GPUS, "nccl", "cuda") if GPUS > 1 else (2, "gloo", "cpu")
LABS = find_checkout() / "benchmarks" / "results" / "lab"

# %% [markdown]
# ## 1 · Launching
#
# On one machine, `torchrun --standalone --nproc-per-node gpu program.py` starts one process for each GPU. On two
# machines, the same program is started on each, and each start says which machine it is on:
#
# ```sh
# torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr node0 --master-port 29500 program.py
# torchrun --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr node0 --master-port 29500 program.py
# ```
#
# On a cluster that SLURM schedules, its command `srun` starts one torchrun on every node, without `--node-rank`: they
# meet at one address, the *rendezvous*, where each gets its number. `docs/labs/slurm.sh` is such a script;
# `docs/labs/ssh.sh` uses plain ssh. However the processes are started, four things must hold: each has a RANK of its
# own; all have the same WORLD_SIZE; all meet at one address and port; and each has a device that no other process
# takes. LOCAL_RANK chooses the device.

# %% tags=["nbval-ignore-output"]
predict(
    "13.local",
    "Two machines, 2 processes each. Which GPU of its machine, counted from 0, does RANK 3 take?",
)

# %% [markdown]
# You can imitate two machines on one: start `torchrun` twice, with different node ranks.

# %%
PROGRAM = """import json, os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK")
facts = {name: int(os.environ[name]) for name in names}
pathlib.Path(sys.argv[1], str(facts["RANK"])).write_text(json.dumps(facts))
"""


# %%
def torchrun(node, port, *arguments):
    """Start torchrun as machine `node` of 2, with 2 processes."""
    options = f"--nnodes 2 --node-rank {node} --nproc-per-node 2"
    meeting = f"--master-addr 127.0.0.1 --master-port {port}"
    words = [*options.split(), *meeting.split(), *arguments]
    return Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=PIPE,
        stderr=STDOUT,
        text=True,
        start_new_session=True,
    )


# %%
with tempfile.TemporaryDirectory() as folder, socket.socket() as held:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # bound, not listening: a free port
    held.bind(("127.0.0.1", 0))
    port, program = held.getsockname()[1], Path(folder) / "program.py"
    program.write_text(PROGRAM)
    agents = [torchrun(node, port, str(program), folder) for node in (0, 1)]
    try:
        printed = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # torchrun then ends its processes; if killed, it would leave them
    if any(agent.returncode for agent in agents):
        raise RuntimeError("\n".join(printed))
    found = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(4)]
for facts in found:
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
compare("13.local", found[3]["LOCAL_RANK"])

# %% [markdown]
# RANK is a place in the ring, LOCAL_RANK a place in the machine. (`GROUP_RANK` is torchrun's name for the machine.) So
# the launcher decides *which hops are fast*. torchrun deals out ranks machine by machine. If `srun` starts every rank
# itself, they may also be dealt out like cards (`--distribution=cyclic`). On two machines with eight GPUs each:

# %%
def hops_between(machines):
    """How many hops of the ring leave a machine; `machines[r]` is that of rank r."""
    following = [*machines[1:], machines[0]]
    return sum(here != after for here, after in zip(machines, following, strict=True))


for name, machines in {"machine by machine": [0] * 8 + [1] * 8, "like cards": [0, 1] * 8}.items():
    print(f"{name}: {hops_between(machines)} of 16 hops leave a machine")

# %% [markdown]
# A ring is as fast as its slowest hop. So if every hop had a link to itself, two slow hops would cost as much as sixteen.
# Dealt out like cards, however, the eight GPUs of a machine share its network: all send through it at once, where otherwise
# one would.
#
# So look before you measure. ringlab has ready-made measurements, its **labs**: L1 times a hop beside a block, L2
# measures scaling, and L3 compares your ring with ringlab's. On GPUs their ring runs torch's flash attention, and L2
# with `--block triton` runs the kernel of [lesson 12](12_triton_ring_step.ipynb), whose last section says when which is
# better. Each lab begins with a check that collects facts from every rank and compares them. `ringlab lab preflight` runs
# this check alone. Here is that of L1:

# %% tags=["nbval-ignore-output"]
plan = start.Start(Path("l1.json"), ranks=RANKS, transport=TRANSPORT)
everyone, findings = start.look(l1.L1(), plan)
for finding in findings:
    print("ok " if finding.ok else "NO ", finding.name, "·", finding.told)

# %% [markdown]
# (A busy machine is reported, not refused: read the text, not only the *ok*.) What if the last rank had another version of
# PyTorch?

# %% tags=["nbval-ignore-output"]
older = {**everyone[-1], "versions": {**everyone[-1]["versions"], "torch": "2.11.0"}}
for finding in preflight.judge([*everyone[:-1], older], needed_bytes=0, nodes=None):
    if not finding.ok:
        print("NO ", finding.name, "·", finding.told)
        print("    remedy:", finding.remedy)

# %% [markdown]
# ## 2 · Reading a profile
#
# The next cells run two rings that differ only in the order of three words from lesson 11: post, wait, compute; and
# post, compute, wait. Each runs three layers, on real processes, under `torch.profiler`. The profiler writes Chrome's
# trace format: a list of events, each with a name, a category, a begin and a duration.

# %%
ORDERS = {
    "post, wait, compute": ("post", "wait", "compute"),
    "post, compute, wait": ("post", "compute", "wait"),
}


def ring_in_order(ring, q, k, v, order):
    state, block = Partial.identity(q), get_block("auto", q)
    for step in range(ring.world_size):
        here = k, v
        for word in order if step < ring.world_size - 1 else ("compute",):
            if word == "post":
                work = ring.post(k, v)
            elif word == "wait":
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
        with record_function(lanes.MARK):  # second 0 of every rank, by its own clock
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
timed = [event for event in events[0]["post, compute, wait"] if event["ph"] == "X"]
kinds = Counter((event.get("cat"), event["name"]) for event in timed)
for (category, name), count in kinds.most_common(6):
    print(f"{count:4} × {category}: {name}")
print(f"   …, {len(timed)} events in all")
for (category, name), count in kinds.items():
    if "gloo" in name or "nccl" in name.lower():
        print(f"{count:4} × {category}: {name}")

# %% [markdown]
# Eleven sends for three hops: each sends K, V and ringlab's header, and the barrier sends twice. We draw two lanes.
# **Compute**: PyTorch's operators on a CPU, kernels on a GPU. (There, the CPU's events are launches and waits, which do not
# count.) **Copy**: gloo's messages, or NCCL's kernels. Leave out an event that only wraps others, such as an autograd
# function: it would cover the gaps between them.

# %%
def lane_of(event):
    """The lane of a CPU's event; ringlab.viz.lanes does it for GPUs too."""
    if event.get("ph") != "X":
        return None
    if event["name"].startswith("gloo:"):
        return "copy"
    return "compute" if event["name"].startswith("aten::") else None


def read(events):
    """(lane, begin, end) in seconds since the mark."""
    origin = next(event["ts"] for event in events if event["name"] == lanes.MARK)
    rows = [(lane_of(e), e["ts"] - origin, e.get("dur", 0)) for e in events if "ts" in e]
    return [(lane, at / 1e6, (at + long) / 1e6) for lane, at, long in rows if lane and at >= 0]


# %% [markdown]
# Spans of a lane overlap and contain one another, so their durations must not be added up. We want the time that they
# cover together, their **union**. A copy is *exposed* while nothing is computed, and two unions are enough for the
# exposed time:


# %%
def covered(spans):
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def exposed(compute, copy):
    return covered([*compute, *copy]) - covered(compute)


# %% [markdown]
# First a *recorded* run, so that the figures in this text stay the same; yours comes afterwards.

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
        print(f"{name}, rank {rank}: {hidden:.0%} of the copying is hidden; ringlab agrees: {same}")

first = record.runs["post, wait, compute"]
copies = " and ".join(f"{1e3 * lanes.overlap(first, rank).copy_s:.0f} ms" for rank in (0, 1))
print(f"\npost, wait, compute: over after {1e3 * lanes.duration(first):.0f} ms; copies {copies}")

# %% [markdown]
# Both programs post before they compute, and yet the first one hides nothing: **`isend` does not mean overlap**.

# %% tags=["nbval-ignore-output"]
predict(
    "13.hidden",
    "The first takes 145 ms; copies of 18 and 13 ms are exposed. The second hides 92%. It takes",
    choices=["at least 10 ms less", "3 to 10 ms less", "about the same"],
)

# %%
saved = 1e3 * (lanes.duration(first) - lanes.duration(record.runs["post, compute, wait"]))
for name, spans in record.runs.items():
    print(f"{name}: done after {1e3 * lanes.duration(spans):.0f} ms")
    for rank in (0, 1):
        own = lanes.overlap(spans, rank)
        computes, copies, bare = (1e3 * t for t in (own.compute_s, own.copy_s, own.exposed_s))
        end = 1e3 * max(span.end for span in spans if span.rank == rank)
        print(f"   rank {rank} computes {computes:.0f} ms, copies {copies:.0f} ms", end=", ")
        print(f"{bare:.0f} ms of it exposed; done after {end:.0f} ms")
compare(
    "13.hidden",
    "at least 10 ms less" if saved >= 10 else "3 to 10 ms less" if saved > 3 else "about the same",
)

# %% tags=["nbval-ignore-output"]
profiler_lanes.play(record.runs)

# %% [markdown]
# **The 92% flatters.** Exposed copying fell from 18 to 6 ms on rank 0 and from 13 to 4 ms on rank 1: by two thirds. The
# hidden share looks better (92%, not 67%) because a copy's bar lasts from the post to the end of the wait. A copy that
# hides under a block has a longer bar than the same copy alone: 75 ms in place of 18. (In the lower half, rank 0's
# later copies have an exposed beginning: there it is still posting, and does not compute yet.)
#
# One run of each cannot say what hiding was worth: rank 1 was done 19 ms sooner, rank 0 was not. Section 3 measures it.
# Now your run:


# %% tags=["nbval-ignore-output"]
def lanes_of(name):
    """The lanes of all ranks in your run of one order."""
    documents = [{"traceEvents": events[rank][name]} for rank in range(RANKS)]
    return [span for rank in range(RANKS) for span in lanes.read(documents[rank], rank)]


yours = {name: lanes_of(name) for name in ORDERS}
style.show(profiler_lanes.figure(yours), profiler_lanes.describe(yours))

# %%
if DEVICE == "cpu":
    for name in ORDERS:
        copy = [(begin, end) for lane, begin, end in read(events[0][name]) if lane == "copy"]
        same = abs(covered(copy) - lanes.overlap(yours[name], 0).copy_s) < 1e-9
        print(f"{name}: rank 0's copies, read by hand, cover the same time: {same}")

# %% [markdown]
# ## 3 · What hiding is worth
#
# Does your second order end sooner, as its share promises? It may even end later: a lane says *when* something happened,
# not what that cost the other lane. Lab L1 measures that: it times a block alone, a hop alone, and both at once. Its result
# is the **gain** (in its files `hidden`): (block + hop − both) / (the shorter of block and hop). It is 1 if the shorter one is
# free, 0 if nothing is gained, and negative if both at once take longer than one after the other.

# %% tags=["nbval-ignore-output"]
predict(
    "13.saved",
    "2 processes on 2 cores. A block and a hop at once, compared with one after the other, take",
    choices=["less time", "the same time", "more time"],
)

# %%
overlaps = result.load(LABS / "l1-two-processes.json")
print(overlaps["label"])
ratios = []
for case in (case for case in overlaps["cases"] if case["case"] == "overlap"):
    block, hop, at_once = (1000 * case[f"{name}_s"] for name in ("compute", "exchange", "both"))
    ratios.append(at_once / (block + hop))
    print(
        f"{case['tokens']:5} tokens: block {block:5.1f} ms, hop {hop:4.1f} ms; "
        f"one by one {block + hop:5.1f}, at once {at_once:5.1f} ms; gain {case['hidden']:.2f}"
    )
outcome = "less" if max(ratios) < 0.99 else "more" if min(ratios) > 1.01 else "the same"
compare("13.saved", f"{outcome} time")

# %% [markdown]
# **More**, at all four lengths. gloo's threads copy on the cores that compute: the two take turns, and pay for each change.
# On a GPU, NCCL's kernels occupy some of the multiprocessors (`NCCL_MAX_CTAS` caps how many). A copy engine (lesson 11)
# occupies none.
#
# ## 4 · Who is to blame?
#
# Four ranks, zig-zag. In one ring, rank 2 takes three times as long for its blocks. In the other, the link out of rank 1 has
# a tenth of its rate. Both are *simulated*.

# %% tags=["nbval-ignore-output"]
predict(
    "13.blame",
    "All links are sound; rank 2 is three times as slow. Who has the most exposed copying?",
    choices=["rank 2", "rank 3", "ranks 1 and 3", "none: links are sound"],
)


# %%
class SlowLink(Network):
    """A tenth of the rate from rank 1 to rank 2."""

    def bytes_per_s(self, source, to):
        return super().bytes_per_s(source, to) / np.where(source == 1, 10, 1)


shape, layout = sizes.Attention(1, 8, 8, 64, "float32", True), zigzag(4096, 4)
machine = hardware.hardware("laptop")
slow_link = SlowLink.uniform(4, machine.inside.bytes_per_s, machine.inside.latency_s)
sick = {
    "simulated, rank 2 is slow": simulate(shape, layout, machine, slow={2: 3.0}),
    "simulated, the link from 1 to 2 is slow": simulate(shape, layout, machine, network=slow_link),
}
for name, run in sick.items():
    own = [lanes.overlap(lanes.of_trace(run.trace()), rank).exposed_s for rank in range(4)]
    told = ", ".join(f"{seconds / run.makespan_s:.0%}" for seconds in own)
    print(f"{name}: ranks 0 to 3 copy exposed for {told} of the run")
    if name == "simulated, rank 2 is slow":
        most = [str(rank) for rank in range(4) if own[rank] > 0.99 * max(own) > 0]
ranks = " and ".join(most)
compare("13.blame", f"rank{'s' * (len(most) > 1)} {ranks}" if most else "none: links are sound")

# %% tags=["nbval-ignore-output"]
profiler_lanes.play({name: lanes.of_trace(run.trace()) for name, run in sick.items()})

# %% [markdown]
# **Both neighbours, equally.** Rank 3 waits for rank 2's block, and rank 1 waits until rank 2 takes its own (lesson 11). On
# a GPU, NCCL's kernel spins during this wait, so a profile shows it as busy. So one would call the network slow, although
# all links are sound. The rank at fault is the one whose copying is never exposed. In the lower half the ranks at the two
# ends of the slow link wait most.
#
# The rank is found most easily: its own seconds of computing contain no waiting at all. Under zig-zag all have equal work:

# %%
for name, run in sick.items():
    spans = [run.trace().computes(rank) for rank in range(4)]
    busy = [np.median([span.end - span.start for span in own]) for own in spans]
    told = ", ".join(f"rank {rank} {busy[rank] / busy[0]:.2f}" for rank in range(4))
    print(f"{name}: computations, in blocks of rank 0: {told}")

# %% [markdown]
# A link needs more care. A copy's bar begins when **its** rank posts, but nothing moves until the other end has posted
# too. Follow one hop of the upper half, the second one from rank 2 to rank 3:


# %%
def ends_of(trace, sender, number):
    """A hop as its sender and its receiver saw it."""
    return [list(trace.exchanges(rank))[number] for rank in (sender, (sender + 1) % 4)]


def bound_s(ends):
    """The seconds from the later post to the earlier done."""
    return min(end.done for end in ends) - max(end.posted for end in ends)


def follow(name, sender, number):
    ends = ends_of(sick[name].trace(), sender, number)
    for end in ends:
        posted, done = 1e3 * end.posted, 1e3 * end.done
        print(f"rank {end.rank} posts at {posted:4.1f} ms, done at {done:4.1f} ms", end="")
        print(f": a bar of {done - posted:.1f} ms")
    print(f"from the later post to the earlier done: {1e3 * bound_s(ends):.1f} ms")


follow("simulated, rank 2 is slow", 2, 1)

# %% [markdown]
# The message cannot have started before the *later* post, and it was there at the *earlier* done. So it took at most 2.1 ms,
# a fraction of both bars. Now a sound link of the lower half, the third hop from rank 3 to rank 0:

# %%
follow("simulated, the link from 1 to 2 is slow", 3, 2)

# %% [markdown]
# This message was as short as the other, but its bound is 20.4 ms: *both* ends waited for somebody else. A `wait` returns
# when the rank has its next block and has handed over its own. Rank 3 had no block from rank 2 yet, rank 0 could not hand
# its own to rank 1, and both were late because of the slow link. So a bound may be much too long. It is never too short:
# **of a link's P − 1 hops take the smallest bound.**

# %%
for name, run in sick.items():
    trace = run.trace()
    block, told = np.median([span.end - span.start for span in trace.computes(0)]), []
    for sender in range(4):
        least = min(bound_s(ends_of(trace, sender, number)) for number in range(3))
        told.append(f"{sender}→{(sender + 1) % 4} {least / block:.2f}")
    print(f"{name}: messages, in blocks of rank 0, at most: {', '.join(told)}")

# %% [markdown]
# 1→2 is the slow link: its smallest bound, 1.88, is more than a block could hide. 3→0 is sound, and yet shows 1.00, exactly
# one block: of a hidden message we only know that it was there when its `wait` asked for it. So if both ends post together,
# a bound can never be shorter than the block behind which the message hid.
#
# These bounds subtract times of *two* ranks. On two machines their clocks differ, so count each rank's time from a
# barrier first.
#
# ## 5 · Equal local, or equal global?
#
# "One GPU does 8k tokens in a time T. Eight GPUs with 8k tokens each take 8.5 T. So ring attention is slow."

# %% tags=["nbval-ignore-output"]
predict(
    "13.equal",
    "T on one GPU, 8.5 T on eight with as many tokens EACH. How near is this to a perfect split?",
    choices=["12% of it", "50% of it", "94% of it"],
)


# %%
def pairs(S):
    return S * (S + 1) // 2  # causal


efficiency = pairs(8 * 8192) / pairs(8192) / 8 / 8.5
compare("13.equal", f"{efficiency:.0%} of it")
print("work of one rank (one GPU = 1); hop time over block time (at 8,192 tokens per rank = 1)")
print("          the same sequence          as many tokens per rank")
print("  P   tokens   work  hop/block      tokens   work  hop/block")
for P in (1, 2, 4, 8, 16):
    kept, grown = (pairs(S) / P / pairs(8192) for S in (8192, 8192 * P))
    hops = (P, 1) if P > 1 else ("–", "–")  # alone, a rank has no hop
    print(f"{P:3} {8192 // P:8} {kept:6.2f} {hops[0]:>10} {8192:11} {grown:6.1f} {hops[1]:>10}")

# %% [markdown]
# Attention is quadratic: P times the tokens are P² times the pairs, and each of the P ranks has P times as many as the one
# process. **Equal tokens per rank are not equal work per rank.** The honest question is what *the same work* would take if
# it were split perfectly:
#
# $$\text{efficiency} = \frac{T_1 \cdot W_P / W_1}{P \cdot T_P},\qquad W = \text{visible pairs}.$$
#
# The ring of the anecdote has 64 times the pairs on 8 ranks, and 64 / (8 · 8.5) = 94%.
#
# On the left is **strong** scaling, which keeps the sequence: blocks shrink as 1/P², hops as 1/P, so hops stick out in the
# end, for every ring. On the right is **weak** scaling: it keeps the tokens per rank, and with them the ratio of hop to
# block. Efficiency is fair for both, but weak scaling never shows the point at which hops stick out. Measured on your
# machine, the two runs alternating:


# %%
def alternating(ring, c, rounds):
    """This rank's seconds, by round: one process with c tokens, then the ring with c per rank."""
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
measured = np.array(launch(alternating, RANKS, 2048, 9, transport=TRANSPORT, memory=False).results)
measured = measured[:, 4:]  # two rounds to warm up
one, ring_s = measured[0, ::2], measured[:, 1::2].max(axis=0)  # the slowest rank of each round
print(f"one process, 2,048 tokens: {1e3 * np.median(one):.1f} ms")
print(f"{RANKS} processes with 2,048 each: {1e3 * np.median(ring_s):.1f} ms")
ratio = np.median(one / ring_s)  # within a round, so that a drifting clock cancels
print("medians of the rounds' ratios, not the ratio of these medians:")
print(f"   time over time, as in the anecdote: {ratio:.0%}")
# RANKS² times the pairs on RANKS ranks: RANKS times as much work for each
print(f"   of a perfect split of the same work: {RANKS * ratio:.0%}")

# %% [markdown]
# Above, the one process used the *same block* as the ring, so the quality of the block cancels. But it ran while the other
# process waited. Cores share caches, memory and clock, so a process may be faster alone than beside a neighbour. So
# differences of a few percent are noise, and even more than 100% can come out. Lab L2 measures against another standard.
# On CPUs: torch's attention in one process with P threads. On GPUs: torch's attention on one device, its time divided by P.
# There a slow block counts against the ring. Its recorded run, forward and backward:

# %%
scaling = result.load(LABS / "l2-two-processes.json")
print(scaling["label"])
for case in (case for case in scaling["cases"] if case["pass"] == "forward_backward"):
    rows = [f"{name} {one['efficiency']:.2f}" for name, one in case["contenders"].items()]
    print(f"{case['scaling']}, {case['S']} tokens on {case['P']}: {', '.join(rows)}")

# %% [markdown]
# (Weak scaling is the lower one here, because this run has *half* the tokens of the strong one, so its blocks are small.)
# Contiguous is as slow as lesson 07 said: its slowest rank has (2P − 1)/P = 1.5 times the mean work, so its efficiency
# should be about 1/1.5 = 0.67.
#
# ## 6 · Counting FLOPs
#
# **MFU**, model FLOPs utilisation, divides the FLOP/s that the *model* needs by the peak of all devices. **HFU**, hardware
# FLOPs utilisation, adds what is computed a second time, by a convention: five products backward and visible pairs only,
# whatever the kernel really does. (ringlab's two backward kernels do seven, 14·D.) FLOPs per pair and head:
#
# | | forward | backward | usual in |
# |---|---|---|---|
# | model (MFU) | 4·D: two matrix products | 8·D: four | reports on training |
# | hardware (HFU) | 4·D | 10·D: five, the scores again | papers on kernels, our labs |
# | a masked pair | none | none | – |
#
# Suppose that the recorded ring had counted masked pairs, too:

# %%
rate = overlaps["cases"][-1]["flops_per_s"]  # of a block alone, without a mask, on one process
ring = scaling["cases"][0]["contenders"]["zigzag"]  # forward
once = ring["tflops_per_rank"] * 1e12 / rate
print(f"visible pairs: {once:.0%} of the rate of a block; all pairs: {2 * once:.0%}")
print(f"all pairs, against a peak three times as high: {2 * once / 3:.0%}")
print(f"forward and backward, HFU over MFU: {(4 + 10) / (4 + 8):.2f}")

# %% [markdown]
# **A utilisation above 100% is a counting mistake until you know better.** If the block itself reaches a third of the chip's
# peak, nothing looks wrong: 57% looks like a result. Two more such factors of two: a data sheet's peak "with sparsity" is
# twice what dense matrices can reach, and a link's rate is often the sum of both directions.
#
# ## 7 · Which number of many
#
# One hop of 4 KiB, timed eleven times, from lab L1's file of section 3:

# %%
bandwidth = next(case for case in overlaps["cases"] if case["case"] == "bandwidth")
times = sorted(1e3 * t for t in bandwidth["times_s"])
print("ms:", ", ".join(f"{t:.2f}" for t in times))
print(f"best {times[0]:.2f}, median {np.median(times):.2f}, mean {np.mean(times):.2f} ms")

# %% [markdown]
# Three rounds in which the machine did something else make the mean. The best one falls the longer you measure. The
# **median** stays. Five more habits:
#
# - **Warm up**: the first rounds load kernels, connect and allocate.
# - **Synchronise**: on a GPU, wait for it before you read a clock, or you time the launch. A barrier comes before
#   each round, and the *slowest rank* is the time of the round.
# - **Interleave**: one round of each contender in turn. If the clock falls as the chip gets warm, it falls for all.
# - **Lock the clocks, or record them** (`nvidia-smi -q -d CLOCK`); every result of `ringlab lab` holds them.
# - **Right first**: a ring that skips half of its blocks is fast. Labs L2 and L3 compare every result with float64.
#
# ## 8 · The lab sheet
#
# On a machine with several GPUs, with as many tokens as you train with; without GPUs, `ringlab lab l1` and
# `ringlab lab l2` alone will do:
#
# ```sh
# torchrun --nproc-per-node gpu -m ringlab lab l1 --transport nccl --dtype bfloat16 --heads 16 --head-dim 128 \
#     --lengths 1024,2048,4096,8192
# torchrun --nproc-per-node gpu -m ringlab lab l2 --transport nccl --dtype bfloat16 --heads 16 --head-dim 128 \
#     --tokens 131072 --per-rank 16384
# ringlab lab report results --output results/report.html
# ```
#
# L2's `--tokens` is the sequence of strong scaling, `--per-rank` each rank's share in weak scaling. Their defaults,
# 8,192 and 2,048, are meant for CPUs; on GPUs they would measure latency.
#
# | before the run, on paper | after it |
# |---|---|
# | tokens per rank that hide a hop (lesson 06) | L1: the tokens from which *at once* takes as long as the block |
# | hops that leave a machine | preflight: ranks per machine |
# | which layout wins; contiguous' factor (2P − 1)/P | L2: efficiencies, strong and weak |
# | bytes of a hop over the link's rate in one direction | L1: its bandwidth at that size |
#
# To read your own results in this notebook, give their paths to `result.load`. For the lanes, run
# `python -m ringlab.bench.profile lanes.json`, which records both orders on all GPUs of a machine, and read the file by
# `recorded(Path("lanes.json"))`. `docs/labs.md` helps when a run hangs.
#
# ## Recap
#
# - The launcher decides which hops are fast. RANK is a place in the ring, LOCAL_RANK a device.
# - Read a profile as lanes; take unions, never sums. Exposed: copying while nothing is computed.
# - `isend` is not overlap, and overlap gains nothing until a measurement with and without it says so.
# - A long bar of communication may be another rank's delay. Seconds per work find a slow rank; the least seconds
#   from the later post to the earlier done, a slow link.
# - Equal tokens per rank are P times the work per rank. Efficiency: on the same work. Strong and weak, both.
# - Visible pairs, MFU or HFU by name, dense peaks, one direction, medians of the slowest rank.
#
# ## Self-check
#
# 1. A rank's lanes: compute 0–6 and 8–10 ms, copy 5–9 ms. How much is exposed?
#    <details><summary>Answer</summary>2 ms, from 6 to 8; half is hidden.</details>
# 2. In a trace of 64 GPUs all NCCL kernels are long except those of rank 17. Which rank is slow?
#    <details><summary>Answer</summary>Rank 17: it comes last to every exchange.</details>
# 3. A causal run reports 70% MFU from 4·S²·D·H FLOPs forward. What is its MFU?
#    <details><summary>Answer</summary>35%: half of those pairs are masked.</details>
#
# Now build the tools: [exercise 13](../exercises/13_multi_gpu.ipynb), a check before the launch, lanes of a profile with
# several steps, honest seconds, a report, and a diagnosis of a ring that is held up.
