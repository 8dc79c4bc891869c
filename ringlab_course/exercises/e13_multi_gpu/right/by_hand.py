"""Without NumPy's reductions: events at boundaries, loops over ranks, and link tests before those of computations."""

import bisect


def preflight(processes):
    seen = {}
    for process in processes:
        seen.setdefault(process["RANK"], []).append(process)
    count = len(processes)
    complete = all(len(seen.get(rank, ())) == 1 for rank in range(count))
    hosts = {process["host"] for process in processes}
    names = {process["MASTER_ADDR"] for process in processes}
    meeting = len(names) == 1 and len({process["MASTER_PORT"] for process in processes}) == 1
    if len(hosts) > 1 and names & {"localhost", "127.0.0.1"}:
        meeting = False
    taken = [f"{process['host']}/{process['LOCAL_RANK']}" for process in processes]
    found = {
        "rank": not complete,
        "world size": any(process["WORLD_SIZE"] != count for process in processes),
        "rendezvous": not meeting,
        "device": len(set(taken)) != len(taken),
    }
    hops = 0
    if complete:
        for rank in range(count):
            hops += seen[rank][0]["host"] != seen[(rank + 1) % count][0]["host"]
    return tuple(name for name, wrong in found.items() if wrong), hops


def lanes(events, rank):
    edges = []
    for owner, lane, begin, length in events.tolist():
        if owner == rank:
            edges += [(begin, 1, int(lane)), (begin + length, -1, int(lane))]
    edges.sort()
    open_, totals, before = [0, 0, 0], [0.0, 0.0, 0.0], 0.0
    for at, change, lane in edges:
        counted = at - before if open_[2] > 0 else 0.0
        for number in (0, 1):
            totals[number] += counted * (open_[number] > 0)
        totals[2] += counted * (open_[1] > 0 and open_[0] == 0)
        open_[lane] += change
        before = at
    computing, copying, exposed = (total * 1e-6 for total in totals)
    return computing, copying, exposed, (copying - exposed) / copying if copying > 0 else 1.0


def seconds(times_s, warmup):
    slowest = []
    for row in times_s[warmup:].tolist():
        bisect.insort(slowest, max(row))
    middle = len(slowest) // 2
    return slowest[middle] if len(slowest) % 2 else (slowest[middle - 1] + slowest[middle]) / 2


def report(run):
    pairs = [S * S / (2 if run["causal"] else 1) for S in run["tokens"]]
    perfect_s = run["seconds"][0] * pairs[1] / pairs[0] / run["ranks"]
    per_pair = 4 * run["head_dim"] * run["heads"] * (3 if run["backward"] else 1)
    per_rank = pairs[1] * per_pair / run["ranks"] / run["seconds"][1]
    dense = run["peak_tflops"] * 1e12 * (0.5 if run["sparse"] else 1)
    tokens = run["tokens"][1] / run["ranks"]
    moved = tokens * run["kv_heads"] * run["head_dim"] * run["element_bytes"] * 2
    one_way = run["link_gb_per_s"] * 1e9 / run["directions"]
    return perfect_s / run["seconds"][1], per_rank / dense, moved / one_way / run["hop_s"]


def straggler(trace):
    ranks = range(len(trace["clock"]))
    posted = [trace["posted"][r] - trace["clock"][r] for r in ranks]
    arrived = [trace["arrived"][r] - trace["clock"][r] for r in ranks]
    for r in ranks:
        late = [a - max(p, q) for a, p, q in zip(arrived[r], posted[r], posted[r - 1], strict=True)]
        if min(late) > 1.3 * trace["hop_s"]:
            return "link", ranks[r - 1], -1
    per_pair = {
        (r, t): (trace["end"][r, t] - trace["begin"][r, t]) / trace["work"][r, t]
        for r in ranks for t in ranks if trace["work"][r, t]
    }  # fmt: skip
    usual = sorted(per_pair.values())[len(per_pair) // 2]
    slow = [place for place, seconds in per_pair.items() if seconds > 1.4 * usual]
    if not slow:
        return "sound", -1, -1
    rank = slow[0][0]
    once = len(slow) == 1 and sum(r == rank for r, _ in per_pair) > 1
    return "compute", rank, slow[0][1] if once else -1
