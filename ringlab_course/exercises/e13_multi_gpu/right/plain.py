"""As the exercise suggests it."""

import statistics

import numpy as np


def preflight(processes):
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


def covered(spans):
    total, reached = 0.0, -np.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total / 1e6


def lanes(events, rank):
    own = events[events[:, 0] == rank]

    def spans(*kinds):
        rows = own[np.isin(own[:, 1], kinds), 2:].tolist()
        return [(begin, begin + length) for begin, length in rows]

    def inside(*kinds):
        pairs = [(max(a, c), min(b, d)) for a, b in spans(*kinds) for c, d in spans(2)]
        return covered([(begin, end) for begin, end in pairs if begin < end])

    computing, copying = inside(0), inside(1)
    exposed = inside(0, 1) - computing
    return computing, copying, exposed, 1 - exposed / copying if copying else 1.0


def seconds(times_s, warmup):
    return statistics.median(times_s[warmup:].max(axis=1).tolist())


def report(run):
    P, D = run["ranks"], run["head_dim"]
    one, ring = (S * (S + 1) / 2 if run["causal"] else S * S for S in run["tokens"])
    alone_s, ring_s = run["seconds"]
    efficiency = alone_s * ring / one / (P * ring_s)
    flops = ring * run["heads"] * D * (12 if run["backward"] else 4)
    peak = run["peak_tflops"] * 1e12 / (2 if run["sparse"] else 1)
    hop = 2 * run["tokens"][1] / P * run["kv_heads"] * D * run["element_bytes"]
    link = hop / run["hop_s"] / (run["link_gb_per_s"] * 1e9 / run["directions"])
    return efficiency, flops / ring_s / (P * peak), link


def straggler(trace):
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
