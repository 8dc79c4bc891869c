"""Bytes element by element, a report of namespaces and a stable sort, partial results gathered and folded."""

from types import SimpleNamespace


def bytes_sent(layer, S, P, schedule, ulysses):
    H, K, U = layer["H"], layer["K"], ulysses
    vector = layer["B"] * layer["D"] * layer["itemsize"]
    tokens = S // P
    if schedule == "ring" or schedule == "allgather":
        return sum(2 * K * tokens * vector for other in range(1, P))
    if P % U != 0:
        return None
    readers = {}
    for head in range(H):
        if H % U:
            return None
        readers.setdefault(head // (H // U), set()).add(head // (H // K))
    if K % U and U % K:
        return None
    sent = 0
    for member in range(1, U):  # whoever comes after this rank in its row
        sent += tokens * vector * (H // U + 2 * len(readers[member]))  # q, K and V
        sent += tokens * vector * (H // U)  # the output
    for _ in range(P // U - 1):
        sent += 2 * len(readers[0]) * U * tokens * vector
    return sent


def row_of(schedule, ulysses, sent):
    return SimpleNamespace(schedule=schedule, ulysses=ulysses, bytes=sent, exposed_s=None, reason="heads")


def choose(layer, S, P, machine):
    B, H, K, D, e = (layer[name] for name in ("B", "H", "K", "D", "itemsize"))
    F, rate, wait = (machine[name] for name in ("flops_per_s", "bytes_per_s", "latency_s"))
    L = S // P
    rows = []
    for U in [1, *(n for n in range(2, P + 1) if P % n == 0)]:
        name = "ring" if U == 1 else "ulysses" if U == P else "hybrid"
        row = row_of(name, U, bytes_sent(layer, S, P, name, U))
        rows.append(row)
        if row.bytes is None:
            continue
        h, hops = max(1, K // U), P // U - 1
        hop_bytes = B * D * e * 2 * h * U * L
        late = max(0.0, wait + hop_bytes / rate - 4 * B * (H // U) * D * (U * L) ** 2 / F / 2)
        row.exposed_s = late * hops
        held = B * D * e * L * (2 * H + 2 * K)
        if U > 1:
            row.exposed_s += 2 * wait + (row.bytes - hops * hop_bytes) / rate
            held += B * D * e * L * U * (2 * H // U + 2 * h)
        held += hop_bytes if hops > 0 else 0
        row.reason = "hidden" if row.exposed_s <= 0 else "exposed"
        if held > machine["memory_bytes"]:
            row.reason = "memory"
    gathered = row_of("allgather", 1, bytes_sent(layer, S, P, "allgather", 1))
    gathered.exposed_s = gathered.bytes / rate + wait + wait
    held = B * D * e * (2 * H * L + 2 * K * S)
    gathered.reason = "memory" if held > machine["memory_bytes"] else "exposed"
    rows.append(gathered)
    usable = sorted((r for r in rows if r.reason in ("hidden", "exposed")), key=lambda r: r.exposed_s)
    return [vars(r) for r in usable] + [vars(r) for r in rows if r.reason in ("memory", "heads")]


def decode_step(ring, q, k, v):
    B, H, _, D = q.shape
    group = H // k.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, values = (x.to(wide).repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q.to(wide), keys) * D**-0.5
    lse = scores.logsumexp(-1) if k.shape[2] else scores.new_full((B, H, 1), float("-inf"))
    own = (scores - lse[..., None]).exp() @ values if k.shape[2] else torch.zeros(B, H, 1, D, dtype=wide)
    out, total = None, None
    for part in ring.all_gather(torch.cat([own, lse[..., None]], dim=-1)):
        theirs, log = part[..., :-1], part[..., -1:]
        if out is None:
            out, total = theirs, log
            continue
        both = torch.logaddexp(total, log)
        one, other = ((x - both).exp().nan_to_num(0.0) for x in (total, log))
        out, total = out * one + theirs * other, both
    return out.to(q.dtype)
