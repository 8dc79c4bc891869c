# %% [markdown]
# # Exercise 13 · Multi-GPU ring attention
#
# **You build** the tools of a lab sheet: a check of the ranks before they start, the lanes of a profile, one honest
# number for many rounds, a report of it, and a diagnosis of a ring that is held up.
# **You need** [lesson 13](../notebooks/13_multi_gpu.ipynb). **Minutes** 60. No GPU: you get records and traces.
#
# | stage | function | what is checked |
# |---|---|---|
# | 13.launch | `preflight` | ranks, world size, meeting place, devices; hops that leave a machine |
# | 13.lanes | `lanes` | what the ranks do within the steps of a profile, and what is exposed |
# | 13.seconds | `seconds` | one number for all ranks and rounds |
# | 13.report | `report` | efficiency on the same work, MFU, share of a link, data sheets |
# | 13.straggler | `straggler` | slow ranks, slow steps, slow links, clocks that differ |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded.
#
# **Not allowed:** ringlab's labs, timings and formulas of cost, which do the same, and changing the arguments of a
# function.

# %%
import statistics

import numpy as np

from ringlab_course import check, hint

# %% [markdown]
# ## 13.launch · Before the first hop
#
# `processes` is a list of dicts, one for each process that has started, in any order: its `RANK`, `WORLD_SIZE`,
# `LOCAL_RANK` and `MASTER_PORT` (numbers), `MASTER_ADDR` and `host` (strings). Return `(problems, crossings)`.
#
# `problems` lists the names that apply, in any order:
#
# - `"rank"`: the RANKs of these n processes are not 0, 1, …, n − 1, each once.
# - `"world size"`: some WORLD_SIZE is not n.
# - `"rendezvous"`: the processes do not agree on address and port; or there are several hosts, and the address is
#   `localhost` or `127.0.0.1`.
# - `"device"`: two processes of one host have the same LOCAL_RANK.
#
# `crossings` is the number of hops of the ring that go to another host. Rank r sends to rank r + 1, and the last rank
# to rank 0. It is 0 if `"rank"` is among the problems.


# %% grade="13.launch"
def preflight(processes):
    """Return (problems, crossings)."""
    # BEGIN SOLUTION the problems and the hops
    count, problems = len(processes), []
    if sorted(p["RANK"] for p in processes) != list(range(count)):
        problems.append("rank")
    if any(p["WORLD_SIZE"] != count for p in processes):
        problems.append("world size")
    places = {(p["MASTER_ADDR"], p["MASTER_PORT"]) for p in processes}
    several = len({p["host"] for p in processes}) > 1
    local = any(name in ("localhost", "127.0.0.1") for name, _ in places)
    if len(places) > 1 or (several and local):
        problems.append("rendezvous")
    if len({(p["host"], p["LOCAL_RANK"]) for p in processes}) < count:
        problems.append("device")
    hosts = [p["host"] for p in sorted(processes, key=lambda p: p["RANK"])]
    crossings = sum(hosts[r] != hosts[(r + 1) % count] for r in range(count))
    return problems, 0 if "rank" in problems else crossings
    # END SOLUTION


# %%
check("13.launch")

# %% [markdown]
# Stuck? `hint("13.launch")` in a new cell shows a question, then a direction, then a line of mathematics.

# %% [markdown]
# ## 13.lanes · Lanes of a profile
#
# A profile also holds what happens before, between and after the steps that you want to measure: warming up, saving,
# reading data. So the profiler marks each step with a span of its own, and only time inside a step counts.
#
# `events` (n, 4), float64, has one row for each span of all ranks, in any order: rank, kind, begin and *duration* in
# microseconds. Kind 0 is computing, 1 copying, 2 a step. Computations may overlap or lie inside one another, and so may
# copies. The steps of a rank do not overlap. A computation or copy may begin before a step and end in it. Its part
# inside counts.
#
# Return `(computing, copying, exposed, overlap)` for `rank`, all within that rank's own steps: the seconds in which it
# computes, in which it copies, in which it copies and does not compute; and the share of the copying that is not
# exposed, 1 if nothing is copied.



# %% grade="13.lanes"
def lanes(events, rank):
    """Return (computing, copying, exposed, overlap); three in seconds."""
    # BEGIN SOLUTION the seconds inside the rank's steps
    own = events[events[:, 0] == rank]

    def spans(*kinds):
        rows = own[np.isin(own[:, 1], kinds), 2:].tolist()
        return [(begin, begin + length) for begin, length in rows]

    def inside(*kinds):
        pairs = [(max(a, c), min(b, d)) for a, b in spans(*kinds) for c, d in spans(2)]
        total, reached = 0.0, -np.inf
        for begin, end in sorted((begin, end) for begin, end in pairs if begin < end):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return total / 1e6

    computing, copying = inside(0), inside(1)
    exposed = inside(0, 1) - computing
    return computing, copying, exposed, 1 - exposed / copying if copying else 1.0
    # END SOLUTION


# %%
check("13.lanes")

# %% [markdown]
# Stuck? `hint("13.lanes")` in a new cell helps.

# %% [markdown]
# ## 13.seconds · Honest seconds
#
# `times_s` (rounds, P), float64, holds the seconds that each rank took in each round. All ranks begin a round together.
# The first `warmup` rounds do not count. Return the one number that belongs in a table.



# %% grade="13.seconds"
def seconds(times_s, warmup):
    """Return the seconds of a run."""
    # BEGIN SOLUTION one number for all ranks and rounds
    return statistics.median(times_s[warmup:].max(axis=1).tolist())
    # END SOLUTION


# %%
check("13.seconds")

# %% [markdown]
# Stuck? `hint("13.seconds")` in a new cell helps.

# %% [markdown]
# ## 13.report · An honest report
#
# `run` is a dict:
#
# - `tokens`, `seconds`: two numbers each, the first of one process with the same kernel, the second of the ring. `tokens`
#   counts a whole sequence, not a rank's share, and the batch is one sequence. The two sequences may differ in length.
#   `ranks`: P of the ring.
# - `heads`, `kv_heads`, `head_dim`, `element_bytes`; `causal`; `backward`: whether the seconds are those of forward and
#   backward, or of the forward only.
# - `hop_s`: seconds of one hop, measured alone: K and V of one rank, one way. All ranks hold the same number of tokens.
# - `peak_tflops` of one device, in 10¹² FLOP/s. `sparse` is True if the data sheet states it for matrices half of which
#   are zeros by construction.
# - `link_gb_per_s`, in 10⁹ bytes per second. `directions` is 2 if the data sheet adds up both.
#
# Return `(efficiency, mfu, link)`:
#
# - the time that P processes would take for *the ring's work* if they split it perfectly, over the ring's time;
# - the FLOP/s that the *model* needs, over the dense peak of all devices: 4·D FLOPs per visible pair and head forward,
#   8·D backward (recomputed scores do not count), so 12·D if `backward`;
# - the bytes per second of a hop, over the rate of the link in one direction.



# %% grade="13.report"
def report(run):
    """Return (efficiency, mfu, link)."""
    # BEGIN SOLUTION three ratios
    P, D = run["ranks"], run["head_dim"]
    one, ring = (S * (S + 1) / 2 if run["causal"] else S * S for S in run["tokens"])
    alone_s, ring_s = run["seconds"]
    efficiency = alone_s * ring / one / (P * ring_s)
    flops = ring * run["heads"] * D * (12 if run["backward"] else 4)
    peak = run["peak_tflops"] * 1e12 / (2 if run["sparse"] else 1)
    hop = 2 * run["tokens"][1] / P * run["kv_heads"] * D * run["element_bytes"]
    link = hop / run["hop_s"] / (run["link_gb_per_s"] * 1e9 / run["directions"])
    return efficiency, flops / ring_s / (P * peak), link
    # END SOLUTION


# %%
check("13.report")

# %% [markdown]
# Stuck? `hint("13.report")` in a new cell helps.

# %% [markdown]
# ## 13.straggler · Who holds the ring up
#
# `trace` is a dict of one run on P ranks: P steps, P − 1 hops, arrays by rank and step or hop. In each step a rank
# posts its exchange, computes, and waits.
#
# - `work` (P, P): pairs that are computed; `begin`, `end` (P, P): when. A rank may have no work in a step.
# - `posted` (P, P − 1): when the rank posted its exchange. `done`: when the `wait` returned. `arrived`: when the message
#   *from the previous rank* was there. A simulator knows it, and a profile does not. So here the bound of the lesson
#   becomes the time itself.
# - `hop_s`: the seconds of a message on a sound link, which begins at the later of its two posts.
# - `clock` (P,): each rank recorded its times by its own clock; `clock[r]` is what that clock showed when all ranks
#   started. `arrived[r]` is on the clock of r, the receiver.
#
# Return `(what, rank, step)`:
#
# | return | if |
# |---|---|
# | `("compute", r, t)` | rank r computes slowly in step t alone, even if no other of its steps has work |
# | `("compute", r, -1)` | rank r computes slowly in each of its steps with work, if it has at least two such steps |
# | `("link", r, -1)` | the link from rank r to the next one is slow, whether anybody waits for it or not |
# | `("sound", -1, -1)` | nothing is wrong |
#
# There is one fault at most, and it is in this table. Without a fault, the seconds of a step are proportional to its
# `work`, by the same factor on every rank. What is faulty takes at least 1.6 times as long as it should; noise is a few
# percent.



# %% grade="13.straggler"
def straggler(trace):
    """Return (what, rank, step)."""
    # BEGIN SOLUTION the fault, if there is one
    P, clock = len(trace["clock"]), trace["clock"][:, None]
    busy = trace["work"] > 0
    rate = np.where(busy, trace["end"] - trace["begin"], 0.0) / np.maximum(trace["work"], 1)
    slow = rate > 1.3 * np.median(rate[busy])
    if slow.any():
        rank = int(slow.sum(axis=1).argmax())
        always = slow[rank].sum() == busy[rank].sum() > 1
        return "compute", rank, -1 if always else int(rate[rank].argmax())
    posted, arrived = trace["posted"] - clock, trace["arrived"] - clock
    transfer = np.median(arrived - np.maximum(posted, np.roll(posted, 1, axis=0)), axis=1)
    if transfer.max() > 1.3 * trace["hop_s"]:
        return "link", int(transfer.argmax() - 1) % P, -1
    return "sound", -1, -1
    # END SOLUTION


# %%
check("13.straggler")

# %% [markdown]
# Stuck? `hint("13.straggler")` in a new cell helps.

# %% [markdown]
# ## On a run of yours
#
# When 13.lanes passes, run `on_recorded_lanes()` in a new cell: it measures the two recorded runs of lesson 13 by your
# function. Give it the path of a file that `python -m ringlab.bench.profile` wrote, to see another machine.


# %%
def on_recorded_lanes(path=None):
    """Print the share of copying that is hidden in each recorded run, by your lanes."""
    from ringlab.bench.profile import recorded

    record = recorded(path)
    print(record.label)
    for name, spans in record.runs.items():
        rows = [(s.rank, s.lane == "copy", 1e6 * s.start, 1e6 * (s.end - s.start)) for s in spans]
        rows += [(rank, 2, 0, 1e6) for rank in (0, 1)]  # one step that holds everything
        shares = [lanes(np.array(rows, dtype=float), rank)[3] for rank in (0, 1)]
        print(f"{name}: hidden {', '.join(f'{share:.0%}' for share in shares)}")


# %% tags=["solution-only"]
on_recorded_lanes()

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/13_multi_gpu.ipynb` runs the hidden ones, on inputs of its own.
