# %% [markdown]
# # 13 · Multi-GPU ring attention
#
# **Afterwards you can** read a profile of a ring as lanes, say how much of its communication is exposed and who holds it up,
# report an efficiency that survives a second look, and say what a launch on one machine or many must give each process.
#
# **You need first** [lesson 06](06_what_it_costs.ipynb), what it costs; [lesson 11](11_real_processes.ipynb), real processes.
#
# **Minutes** 60 to read and run; the exercise takes another 60.
#
# A ring posts its messages, waits for them, and then computes. So none of its copying is hidden behind computing. Somebody lets it
# compute first and wait afterwards, and profiles it again. Now more than nine tenths of the copying is hidden, and the run takes as long
# as before. **So what does the hidden share measure?** Then come three more readings that mislead: the rank that a profile accuses, the
# efficiency in a table, and the utilisation in a report.
#
# All measurements here were recorded on gloo processes on CPUs: **no GPU took part**. Sections 4 and 5 are simulated.

# %%
import numpy as np

from ringlab import zigzag
from ringlab.bench.profile import recorded
from ringlab.checkout import find_checkout
from ringlab.cost import hardware, sizes
from ringlab.cost.simulate import Network, simulate
from ringlab.viz import lanes, style
from ringlab_course import compare, predict
from ringlab_course.figures import profiler_lanes, scaling_view
from ringlab_course.lab import result

LABS = find_checkout() / "benchmarks" / "results" / "lab"

# %% [markdown]
# ## 1 · A profile that looks good
#
# Here are the two runs, recorded on two processes. Each rank has two **lanes**. One shows when the rank computes. The
# other shows when it copies: a bar begins at the *post* that starts a message, and ends when the *wait* for it returns (lesson 11).
# Copying is **exposed** while the rank computes nothing.
#
# In each of three layers a rank computes two blocks, its own and the one that comes. So each layer has one hop, and in the second run
# the bar of the hop lasts at least as long as the first block.

# %% tags=["nbval-ignore-output"]
record = recorded()
titles = "Waiting first hides nothing", "Waiting last hides nine tenths, and is as late"
profiler_lanes.play(dict(zip(titles, record.runs.values(), strict=True)))

# %% tags=["nbval-ignore-output"]
predict(
    "13.exposed",
    "Rank 0 first hid none of its copying, then nine tenths. How much did its exposed time fall?",
    choices=["by nine tenths, too", "by two thirds", "not at all"],
)

# %%
print(record.label, record.machine, sep="\n")
bare = {}
for name, spans in record.runs.items():
    print(f"{name}: done after {1e3 * lanes.duration(spans):.0f} ms")
    for rank in (0, 1):
        own, done_s = lanes.overlap(spans, rank), max(s.end for s in spans if s.rank == rank)
        bare[name, rank], neither_s = own.exposed_s, done_s - own.compute_s - own.exposed_s
        told = (done_s, own.compute_s, neither_s, own.copy_s, own.exposed_s)
        done, computes, neither, copies, bared = (1e3 * seconds for seconds in told)
        print(f"   rank {rank} is done after {done:.0f} ms: computes {computes:.0f}", end=", ")
        print(f"neither {neither:.0f}, exposed {bared:.0f}", end="; ")
        print(f"copies {copies:.0f}, {own.fraction:.0%} hidden")
before, after = (bare[name, 0] for name in record.runs)
fell = 1 - after / before
compare("13.exposed", "by two thirds" if abs(fell - 2 / 3) < 0.1 else f"by {fell:.0%}")

# %% [markdown]
# **By two thirds**, from 18 to 6 ms. Yet the hidden share rose from 0% to 92%. It is hidden copying over all copying, and "all copying"
# itself grew from 18 to 75 ms, because a longer bar counts as more copying. If the wait comes after a block, the bar is at least as long
# as the block, however early the message arrives.
#
# So the hidden share flatters. **The exposed time flatters less, but the seconds of the run are the judge.** The run lasts until its last
# rank, and that is rank 0 in both orders. Rank 0 saves 12 ms of exposed time, but loses 7 to longer computing and 4 in neither lane: 1 ms
# is left. (In its second run, most of the time in neither lane is black in the picture, just before each post. We do not know the cause.)
# Rank 1 saves 19 ms: about 9 of exposed time, 8 of computing and 1 in neither lane. On both ranks, the change of 7 or 8 ms in computing
# may be noise. So this run cannot judge, and section 2 has a measurement of many rounds.
#
# ## 2 · What hiding is worth
#
# To find out what hiding saves, measure a block alone, a hop alone, and both at once. The **gain** is the time that doing both at once
# saves, as a share of the shorter of the two. It is 1 if the shorter one is free, 0 if nothing is saved, and negative if overlapping is
# slower. ringlab has ready-made measurements, its **labs**. This one is lab L1.

# %% tags=["nbval-ignore-output"]
predict(
    "13.saved",
    "2 processes on 2 cores. At how many of four lengths is doing both at once quicker than "
    "one after the other?",
    choices=["at all four", "at the longer ones", "at none"],
)

# %%
overlaps = result.load(LABS / "l1-two-processes.json")
print(overlaps["label"])
gains = []
for case in (case for case in overlaps["cases"] if case["case"] == "overlap"):
    block, hop, at_once = (1000 * case[f"{name}_s"] for name in ("compute", "exchange", "both"))
    gain = (block + hop - at_once) / min(block, hop)
    gains.append(gain)
    print(
        f"{case['tokens']:5} tokens: block {block:5.1f} ms, hop {hop:4.1f} ms; "
        f"one by one {block + hop:5.1f}, at once {at_once:5.1f} ms; gain {gain:.2f}"
    )
compare("13.saved", "at none" if max(gains) < 0 else "at all four" if min(gains) > 0 else "at some")

# %% [markdown]
# **At none.** The threads of gloo copy on the same cores that compute. So copying and computing probably take turns, and every switch
# between them costs something.
#
# This answers the first question. The hidden share measures how long a message was *outstanding* beside computing. It does not say when
# the message was copied, nor what the copying cost. On a GPU the cost is another one. A copy engine (lesson 11) takes memory bandwidth
# from computing, and NCCL's kernels also take multiprocessors. So measure the gain where you run.
#
# ## 3 · From events to lanes
#
# The profiler of PyTorch writes a list of events. PyTorch's operators on a CPU, and kernels on a GPU, go into the lane **compute**. The
# messages of gloo, or the kernels of NCCL, go into the lane **copy**. An event that only wraps others goes into neither.
#
# The spans of a lane overlap and contain one another, so their durations must not be added up. We want the time that they cover
# together, their **union**. The exposed time is what copying adds to the time that computing covers: the union of both lanes, less the
# union of the lane compute. The time that two lanes share follows from unions, too: $|X \cap Y| = |X| + |Y| - |X \cup Y|$.
#
# The profiler can mark each training step, which is not a step of the ring, with a span of its own. If Y holds the steps that you want to
# measure, the formula gives the part of X that lies inside them. X may be a lane, or both lanes together.


# %%
def covered(spans):
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def exposed(compute, copy):
    return covered([*compute, *copy]) - covered(compute)


for name, spans in record.runs.items():
    of_rank = [span for span in spans if span.rank == 0]
    compute = [(span.start, span.end) for span in of_rank if span.lane == "compute"]
    copy = [(span.start, span.end) for span in of_rank if span.lane == "copy"]
    same = abs(exposed(compute, copy) - bare[name, 0]) < 1e-9
    print(f"{name}: two unions give the exposed time of section 1: {same}")

# %% [markdown]
# ## 4 · Who is to blame?
#
# Now there are four ranks under zig-zag, and something is wrong with their ring. In one run, rank 2 takes three times as long for its
# blocks as the others. In another run, the link from rank 1 to rank 2 has a tenth of its rate. Both runs are *simulated*.

# %% tags=["nbval-ignore-output"]
predict(
    "13.blame",
    "Only the link from rank 1 to rank 2 is slow. Whose copying is exposed longest?",
    choices=["rank 1's, which sends", "rank 2's, which receives", "both, alike", "all four, alike"],
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
    "rank 2 is slow": simulate(shape, layout, machine, slow={2: 3.0}),
    "the link from 1 to 2 is slow": simulate(shape, layout, machine, network=slow_link),
}
traces = {name: run.trace() for name, run in sick.items()}
for (name, trace), run in zip(traces.items(), sick.values(), strict=True):
    own = [lanes.overlap(lanes.of_trace(trace), rank).exposed_s for rank in range(4)]
    told = ", ".join(f"{seconds / run.makespan_s:.0%}" for seconds in own)
    print(f"{name}: ranks 0 to 3 copy exposed for {told} of the run")
most = [rank for rank in range(4) if own[rank] > 0.99 * max(own)]
compare("13.blame", "both, alike" if most == [1, 2] else str(most))

# %% tags=["nbval-ignore-output"]
titles = "Slow rank 2 makes its neighbours wait", "The slow link from 1 to 2 makes both ends wait"
guilty = dict(zip(titles, [(2,), (1, 2)], strict=True))
profiler_lanes.play(dict(zip(titles, map(lanes.of_trace, traces.values()), strict=True)), guilty)

# %% [markdown]
# **Both, alike.** An exchange has two halves: a rank's `wait` returns when the rank has its next block *and* has handed over its own.
# So a slow link holds up its sender as long as its receiver. For the same reason both neighbours of a slow rank wait for it (upper half),
# while the slow rank itself never waits. On a GPU, NCCL's kernel runs during such a wait, so a profile blames the network, though all links
# are sound. (Step 0 takes longer than the others, because tiles on the diagonal are computed whole.)

# %% [markdown]
# Exposed copying therefore does not tell a slow rank from a slow link. When a rank is slow, the profile accuses its neighbours. A rank's own
# seconds of computing contain no waiting, so they show a slow **rank**. Under zig-zag all ranks have equal work. Under other layouts, divide the
# seconds by the pairs that were computed. Compare them with the fastest rank, not with rank 0, which may be the slow one. Look at single
# steps, too, because a rank may be slow in one of them only.

# %%
for name, trace in traces.items():
    spans = [trace.computes(rank) for rank in range(4)]
    busy = [np.median([span.end - span.start for span in own]) for own in spans]
    told = ", ".join(f"{each / min(busy):.2f}" for each in busy)
    print(f"{name}: seconds per block of ranks 0 to 3, relative to the fastest rank: {told}")

# %% [markdown]
# ## 5 · Which link is slow?
#
# In the second run all ranks compute alike, and yet a link is slow. To find it, look at both ends of a message. It cannot start until
# both ends have posted. It has arrived when the first of the two `wait`s returns. So the time **from the later post to the earlier done**
# is a bound: the message took at most that long. The picture shows a sound link and the slow one. Each frame is the bound of one hop.

# %%
def ends_of(trace, sender):
    """The hops of a link, each as its sender and its receiver saw it."""
    return list(zip(*(trace.exchanges(rank) for rank in (sender, (sender + 1) % 4)), strict=True))


by_rank, by_link = traces.values()
drawn = {
    "From rank 2 to 3, a sound link, while rank 2 is slow": ends_of(by_rank, 2),
    "From rank 1 to 2, the slow link": ends_of(by_link, 1),
}
block_s = min(span.end - span.start for span in by_link.computes(0))
style.show(profiler_lanes.bounds(drawn, block_s), profiler_lanes.describe_bounds(drawn))

# %% [markdown]
# On the sound link the bars are up to 38 ms long, and yet a message takes 2.15 ms at most. **Of the bounds of a link, keep the smallest.**
# Here are those of all links:

# %%
for name, trace in traces.items():
    told = []
    for sender in range(4):
        least = min(profiler_lanes.bound_s(pair) for pair in ends_of(trace, sender))
        told.append(f"{sender}→{(sender + 1) % 4} {1e3 * least:.3g}")
    print(f"{name}: messages take at most {', '.join(told)} ms")
print(f"a block takes {1e3 * block_s:.3g} ms")

# %% [markdown]
# In the second run, 1→2 shows 21 ms, and two others show 2.15: about ten times less, as we built it. But 3→0 shows 11.2 ms, although it is
# sound. Ranks 3 and 0 keep step: both post together and both wait only after their block. So nobody looks earlier, and the bound is a
# block.
#
# So a bound shows a slow link if three things hold, as they do for 1→2:
#
# - It is longer than the block that the hop hides behind. (That of step 0 takes 12.6 ms.)
# - No rank is slow. Between two slow ranks, the bound is one of their long blocks.
# - At most one link is slow, of three or more. A sound link between slow ones gets their bound, and with two ranks both directions get
#   the same.
#
# There is a blind spot: a slow link whose messages fit behind a block looks like 3→0.
#
# All this needs a transport that waits for both ends, as in our simulation. It also subtracts times of *two* ranks, and the clocks of two
# machines differ. A barrier helps, because all ranks leave it almost together. If two clocks then show 700 and 730 ms, one rank subtracts
# 700 from all its times, the other 730.
#
# ## 6 · Equal local, or equal global?
#
# Somebody reports: "One GPU does 8k tokens in a time T. Eight GPUs with 8k tokens each take 8.5 T. So ring attention is slow."

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

# %% [markdown]
# There are two ways to add ranks: **strong** scaling keeps the sequence, and **weak** scaling keeps the tokens per rank.

# %%
COUNTS = (1, 2, 4, 8, 16)
work = {
    "strong, the same sequence": [pairs(8192) / P / pairs(8192) for P in COUNTS],
    "weak, as many tokens per rank": [pairs(8192 * P) / P / pairs(8192) for P in COUNTS],
}
style.show(scaling_view.figure(COUNTS, work), scaling_view.describe(COUNTS, work))

# %% [markdown]
# **94%.** Attention is quadratic. Eight times the tokens are 64 times the pairs, and 8 ranks share them. So each rank has 8 times the pairs
# that the one GPU had, and a perfect split takes 8 T. The ring takes 8.5 T, and 8 / 8.5 = 94%. **With equal tokens per rank, the work
# per rank grows with P.** The honest question is how long *the same work* would take if it were split perfectly. One process does the
# pairs $W_1$ in the time $T_1$, so it would do the ring's pairs $W_P$ in $T_1 W_P / W_1$. A perfect split takes a P-th of that. The ring
# takes $T_P$:
#
# $$\text{efficiency} = \frac{T_1 \cdot W_P / W_1}{P \cdot T_P},\qquad W = \text{pairs that the mask leaves}.$$
#
# It is fair for both ways to add ranks, if pairs per second do not depend on the length. But the longest block of section 2 does about a
# quarter more pairs per ms than the shortest, so in weak scaling a short reference is a slow reference. And only strong scaling shows when hops
# become longer than blocks: blocks shrink as 1/P², and hops only as 1/P (lesson 06).
#
# Lab L2 measured efficiencies at two lengths, on two processes with one core each. Its reference is one process with *both* cores. The
# time of this process is already that of a split over two cores, so efficiency is simply its time over the ring's.

# %%
scaling = result.load(LABS / "l2-two-processes.json")
for case in (case for case in scaling["cases"] if case["pass"] == "forward"):
    of_perfect = {name: each["efficiency"] for name, each in case["contenders"].items()}
    told = ", ".join(f"{name} {each:.0%}" for name, each in of_perfect.items())
    print(f"{case['S']:,} tokens: {told} of a perfect split")

# %% [markdown]
# Contiguous gives one of the two ranks three quarters of the pairs (lesson 07). A perfect split would give it one half, so contiguous can
# reach at most (1/2) / (3/4) = 67%. But it shows 74% and 69%. So one process with two cores probably does not split perfectly either, and
# **a slow reference flatters every efficiency**. If so, the 100% of zigzag at 8,192 tokens is at most about 67/74 = 91%.
#
# ## 7 · Counting FLOPs
#
# The last reading is a **utilisation**: the FLOP/s of a run over the peak of the chip. Lab L1 recorded the FLOP/s of a block alone on one
# core, and lab L2 those of each rank in a causal ring of such blocks, also on one core. Suppose that the peak is three times the rate of
# the block.

# %% tags=["nbval-ignore-output"]
predict(
    "13.counted",
    "The block alone reaches a third of the peak. The ring reports 57%. Your view?",
    choices=["it overlaps well", "it is mediocre", "its FLOPs are counted wrongly"],
)

# %%
rate = overlaps["cases"][-1]["flops_per_s"]  # of a block alone, without a mask
ring = scaling["cases"][0]["contenders"]["zigzag"]  # visible pairs, forward
once = ring["tflops_per_rank"] * 1e12 / rate
for counted, share in {"all pairs": 2 * once, "visible pairs": once}.items():
    print(f"{counted} counted: {share / 3:.0%} of the peak, {share:.0%} of the block's rate")
compare("13.counted", "its FLOPs are counted wrongly" if 2 * once > 1 else "it is mediocre")

# %% [markdown]
# **Counted wrongly.** Somebody counts all S² pairs, masked ones too, and so reports twice the work. The rate of the block betrays it: a
# ring of such blocks can hardly reach 172% of it. (Their shapes differ. Take equal ones if you can.) **A utilisation above 100% is a
# counting mistake until you know better.** Against the peak the same mistake stays below 100%, and looks like a result. So divide by the
# rate of a block alone, too.
#
# Three rules make a number honest ([the labs](../docs/labs.md#before-you-trust-a-number) have more):
#
# - **Say which FLOPs you count.** **MFU**, model FLOPs utilisation, counts what the *model* needs. For each pair and head these are 4·D
# forward (two matrix products) and 8·D backward (four). **HFU**, hardware FLOPs utilisation, has 10·D backward: five products, because
# the scores are computed again. Reports on training have MFU, our labs have HFU. We count no masked pairs in either, but many published
# numbers do, so ask.
# - **Halve what data sheets double.** A peak "with sparsity" is twice what dense matrices can reach. The rate of a link is often the sum
#   of both directions.
# - **Warm up, take the slowest rank of each round, and report the median of many rounds.** The first rounds load kernels, connect and
#   allocate. A ring is done when its last rank is. The mean follows the few rounds in which the machine did something else.
#
# ## 8 · Launching it on your machines
#
# Four things must hold:
#
# - Each process has a RANK of its own.
# - All processes have the same WORLD_SIZE.
# - All meet at one address and port. With several machines, the address must not be `localhost`.
# - Each process has a device of its own.
#
# RANK is a place in the ring. LOCAL_RANK counts the processes of one machine, and chooses the device.
#
# Hops within a machine are fast, so the launcher decides *which hops are fast*. torchrun ([lesson 11](11_real_processes.ipynb)) deals out
# ranks machine by machine. Cluster schedulers can also deal them out like cards, one to each machine in turn (SLURM's
# `--distribution=cyclic`).

# %% tags=["nbval-ignore-output"]
predict(
    "13.crossings",
    "16 ranks are dealt like cards to two machines. How many of the 16 hops leave a machine?",
    choices=["2", "8", "16"],
)


# %%
def hops_between(machines):
    """How many hops of the ring leave a machine; `machines[r]` is that of rank r."""
    following = [*machines[1:], machines[0]]
    return sum(here != after for here, after in zip(machines, following, strict=True))


for name, machines in {"machine by machine": [0] * 8 + [1] * 8, "like cards": [0, 1] * 8}.items():
    leave = hops_between(machines)
    print(f"{name}: {leave} of 16 hops leave a machine")
compare("13.crossings", str(leave))

# %% [markdown]
# **All of them.** A ring is as fast as its slowest hop. With a link for each hop, 2 slow hops would cost as much as 16. But the eight
# GPUs of a machine often share one network adapter. Then eight hops that leave it at the same time take up to eight times as long as one.
#
# [Labs on several GPUs](../docs/labs.md) has the commands for your cluster, and what to do when a run hangs.
#
# ## Recap
#
# - Take unions of the spans of a lane, never sums.
# - The hidden share flatters, because a hidden copy has a longer bar. Measure with and without overlap.
# - A long bar of communication may be another rank's delay. A rank's own seconds of computing, for equal work, show that it is slow. The
# least time from the later post to the earlier done shows a slow link if it exceeds the block that hides the hop, no rank and no other
# link is slow, and there are at least three ranks.
# - Equal tokens per rank are P times the work per rank. So compare the same work.
# - Count visible pairs, and say whether it is MFU or HFU.
# - The launcher decides which hops are fast.
#
# ## Self-check
#
# 1. A rank's lanes: compute 0–6 and 8–10 ms, copy 5–9 ms. How much is exposed?
#    <details><summary>Answer</summary>2 ms: both together cover 10 ms, and computing covers 8. The other half is hidden.</details>
# 2. In a trace of many steps on 64 GPUs, all NCCL kernels are long except those of rank 17. Which rank is slow?
#    <details><summary>Answer</summary>Rank 17: it comes last to every exchange, and so it need not wait. Its neighbours wait for it, and over
#    many steps the waiting spreads to all.</details>
# 3. A causal run reports 70% MFU from 4·S²·D·H FLOPs forward. What is its MFU by our count?
#    <details><summary>Answer</summary>35%: half of those pairs are masked.</details>
#
# Now build the tools: [exercise 13](../exercises/13_multi_gpu.ipynb), a check before the launch, lanes of a profile with
# several steps, honest seconds, a report, and a diagnosis of a ring that is held up.
