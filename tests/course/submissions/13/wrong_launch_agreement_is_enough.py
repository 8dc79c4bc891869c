# expects: check=13.launch:quiet misconception=agreement_is_enough

def preflight(processes):
    count, problems = len(processes), []
    if sorted(p["RANK"] for p in processes) != list(range(count)):
        problems.append("rank")
    if len({p["WORLD_SIZE"] for p in processes}) > 1:
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
