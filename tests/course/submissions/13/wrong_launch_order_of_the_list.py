# expects: check=13.launch:hops misconception=order_of_the_list

def preflight(processes):
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
    hosts = [p["host"] for p in processes]
    crossings = sum(hosts[r] != hosts[(r + 1) % count] for r in range(count))
    return problems, 0 if "rank" in problems else crossings
