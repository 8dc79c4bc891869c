# %% [markdown]
# # Exercise 13 · Multi-GPU ring attention
#
# **You build** the tools of a lab sheet: a look at the ranks before they start, the lanes of a profile, honest seconds, an honest report of them, and a
# diagnosis of a ring that is held up.
# **You need** [lesson 13](../notebooks/13_multi_gpu.ipynb). **Minutes** 60. No GPU: records and traces are handed to you.
#
# | stage | function | what is looked at |
# |---|---|---|
# | 13.launch | `preflight` | ranks, world size, meeting place, devices; hops that leave a machine |
# | 13.lanes | `lanes` | spans that overlap, nest and come in any order; what is exposed |
# | 13.seconds | `seconds` | which rank, which rounds, which average |
# | 13.report | `report` | efficiency on the same work, FLOPs of visible pairs, bytes and data sheets |
# | 13.straggler | `straggler` | slow ranks, slow steps, slow links, clocks that differ |
#
# `check` runs the visible checks here, in seconds. Some checks stay hidden until you are graded.

# %%
import statistics

import numpy as np

from ringlab_course import check, hint

# %% [markdown]
# ## 13.launch · Before the first hop
#
# `processes` is a list with a dict for every process that came: its `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `MASTER_PORT` (numbers), `MASTER_ADDR` and `host`
# (texts). Return `(problems, crossings)`.
#
# `problems` is a list of those of these names that apply, in any order:
#
# - `"rank"`: the RANKs are not 0, 1, … up to the number of processes, each once.
# - `"world size"`: not everybody's WORLD_SIZE is the number of processes that came.
# - `"rendezvous"`: they do not agree on address and port; or there are several hosts, and the address is `localhost` or `127.0.0.1`.
# - `"device"`: two processes of one host have the same LOCAL_RANK.
#
# `crossings` is how many hops of the ring, rank r to r + 1 and the last to rank 0, go to another host; 0 where `"rank"` is among the problems.


# %% grade="13.launch"
def preflight(processes):
    """Return (problems, crossings)."""
    # BEGIN SOLUTION four comparisons, and once around the ring
    count, problems = len(processes), []
    if sorted(p["RANK"] for p in processes) != list(range(count)):
        problems.append("rank")
    if any(p["WORLD_SIZE"] != count for p in processes):
        problems.append("world size")
    places = {(p["MASTER_ADDR"], p["MASTER_PORT"]) for p in processes}
    several = len({p["host"] for p in processes}) > 1
    if len(places) > 1 or (several and any(name in ("localhost", "127.0.0.1") for name, _ in places)):
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
# `events` (n, 4), float64, has a row for every span that the profilers of all ranks wrote, in any order: rank, lane (0 is computing, 1 copying), beginning and
# *duration* in microseconds. Spans of a lane may overlap, and lie inside one another. Return for `rank`
# `(computing, copying, exposed, overlap)`: the seconds in which it computes, in which something of its is on its way, in which it copies and does not compute;
# and the share of copying that is not exposed, 1 where nothing is copied.


# %% grade="13.lanes"
def lanes(events, rank):
    """Return (computing, copying, exposed, overlap); three in seconds."""
    # BEGIN SOLUTION three unions: of each lane, and of both together

    def covered(spans):
        total, reached = 0.0, -np.inf
        for start, length in sorted(spans.tolist()):
            total += max(0.0, start + length - max(start, reached))
            reached = max(reached, start + length)
        return total / 1e6

    own = events[events[:, 0] == rank]
    computing, copying = (covered(own[own[:, 1] == lane, 2:]) for lane in (0, 1))
    exposed = covered(own[:, 2:]) - computing
    return computing, copying, exposed, 1 - exposed / copying if copying else 1.0
    # END SOLUTION


# %%
check("13.lanes")

# %% [markdown]
# Stuck? `hint("13.lanes")` in a new cell helps.

# %% [markdown]
# ## 13.seconds · Honest seconds
#
# `times_s` (rounds, P), float64, are the seconds of each rank in each round, which all ranks began together; the first `warmup` rounds do not count. Return
# the one number that you would put into a table.


# %% grade="13.seconds"
def seconds(times_s, warmup):
    """Return the honest seconds of a run."""
    # BEGIN SOLUTION the slowest rank of each round, then the median
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
# - `tokens`, `seconds`: pairs (of one process with the same block, of the ring); sequences may differ. `ranks`: P of the ring.
# - `heads`, `kv_heads`, `head_dim`, `element_bytes`; `causal`; `backward`, whether the time is that of forward and backward.
# - `hop_s`: seconds of one hop, measured alone: K and V of one rank, one way. (All ranks hold as many tokens.)
# - `peak_tflops` of one device, in 10¹² FLOP/s, with `sparse` True where the data sheet means matrices half of which are zeros by construction;
#   `link_gb_per_s`, in 10⁹ bytes, with `directions` 2 where it adds up both.
#
# Return `(efficiency, mfu, link)`: the time of a perfect split of *the ring's work* over the ring's time; the FLOP/s of visible pairs over the dense peak of all
# devices, with 4·D FLOPs per pair and head forward, 10·D backward; the bytes per second of a hop over what the link has in one direction.


# %% grade="13.report"
def report(run):
    """Return (efficiency, mfu, link)."""
    # BEGIN SOLUTION pairs of both sequences, FLOPs of the ring's, bytes of a hop
    P, D = run["ranks"], run["head_dim"]
    one, ring = (S * (S + 1) / 2 if run["causal"] else S * S for S in run["tokens"])
    alone_s, ring_s = run["seconds"]
    efficiency = alone_s * ring / one / (P * ring_s)
    flops = ring * run["heads"] * D * (14 if run["backward"] else 4)
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
# `trace` is a dict of one run on P ranks, P steps, P − 1 hops, by rank and step or hop. Each rank posts its exchange, computes, waits.
#
# - `work` (P, P): pairs that are computed; `begin`, `end` (P, P): when. A rank may have no work in a step.
# - `posted` (P, P − 1): when the rank posted its exchange. `arrived`: when the message *from the previous rank* was there. `done`: when its `wait` was over.
# - `hop_s`: what a message takes on a sound link. `clock` (P,): what each rank's clock, which wrote its times, showed when all began.
#
# Return `(what, rank, step)`:
#
# - `("compute", r, t)`: rank r computes slowly in step t; with t = −1, in all of its steps, those in which it has work (two at least).
# - `("link", r, -1)`: the link from rank r to the next one is slow, whether anybody waits for it or not.
# - `("sound", -1, -1)`: nothing is wrong.
#
# There is one fault at most. A fault takes at least 1.6 times as long as it should; noise is a few percent.


# %% grade="13.straggler"
def straggler(trace):
    """Return (what, rank, step)."""
    # BEGIN SOLUTION seconds per pair; then messages, from when both ends were posted
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
# When 13.lanes holds, run `on_recorded_lanes()` in a new cell: your lanes of the two recorded runs of lesson 13. `recorded(path)` reads what
# `ringlab.bench.profile` wrote on another machine.


# %%
def on_recorded_lanes(path=None):
    """Print the share of copying that is hidden in each recorded run, by your lanes."""
    from ringlab.bench.profile import recorded

    record = recorded(path)
    print(record.label)
    for name, spans in record.runs.items():
        rows = [(s.rank, s.lane == "copy", 1e6 * s.start, 1e6 * (s.end - s.start)) for s in spans]
        shares = [lanes(np.array(rows, dtype=float), rank)[3] for rank in (0, 1)]
        print(f"{name}: hidden {', '.join(f'{share:.0%}' for share in shares)}")


# %% tags=["solution-only"]
on_recorded_lanes()

# %% [markdown]
# The visible checks are not all: `ringlab grade exercises/13_multi_gpu.ipynb` runs the hidden ones, on inputs of its own.
