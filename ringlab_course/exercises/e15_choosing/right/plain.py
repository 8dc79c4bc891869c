"""As the exercise suggests it."""

import math

import torch


def bytes_sent(layer, S, P, schedule, ulysses):
    H, K, U = layer["H"], layer["K"], ulysses
    if P % U or H % U or (K % U and U % K):
        return None
    head = layer["B"] * layer["D"] * layer["itemsize"] * (S // P)  # one head of a rank's tokens
    if schedule == "allgather":
        return (P - 1) * 2 * K * head
    heads = max(1, K // U)
    return (U - 1) * (2 * H // U + 2 * heads) * head + (P // U - 1) * 2 * heads * U * head


def choose(layer, S, P, machine):
    options = [("ring", 1), ("allgather", 1), ("ulysses", P)]
    options += [("hybrid", U) for U in range(2, P) if P % U == 0]
    report = []
    for schedule, U in options:
        row = {"schedule": schedule, "ulysses": U, "bytes": bytes_sent(layer, S, P, schedule, U)}
        if row["bytes"] is None:
            report.append(row | {"exposed_s": None, "reason": "heads"})
            continue
        seconds, held = weigh(layer, S // P, P, schedule, U, row["bytes"], machine)
        reason = "hidden" if seconds == 0 else "exposed"
        if held > machine["memory_bytes"]:
            reason = "memory"
        report.append(row | {"exposed_s": seconds, "reason": reason})
    return sorted(report, key=lambda row: (row["reason"] in ("memory", "heads"), row["exposed_s"] or 0.0))


def weigh(layer, L, P, schedule, U, sent, machine):
    B, latency = machine["bytes_per_s"], machine["latency_s"]
    head = layer["B"] * layer["D"] * layer["itemsize"] * L
    H, K = layer["H"], layer["K"]
    own = 2 * (H + K) * head
    if schedule == "allgather":
        return sent / B + 2 * latency, own + (P - 1) * 2 * K * head
    heads, hops = max(1, K // U), P // U - 1
    visitor = 2 * heads * U * head
    hop = visitor / B + latency
    block = 2 * layer["B"] * (H // U) * layer["D"] * (U * L) ** 2 / machine["flops_per_s"]
    seconds, held = hops * max(0.0, hop - block), own + (visitor if hops else 0)
    if U > 1:
        seconds += (sent - hops * visitor) / B + 2 * latency
        held += 2 * (H // U + heads) * U * head
    return seconds, held


def decode_step(ring, q, k, v):
    dtype = torch.promote_types(q.dtype, torch.float32)
    B, H, _, D = q.shape
    K, L = k.shape[1], k.shape[2]
    rows = q.to(dtype).view(B, K, H // K, D)  # query heads that share a K/V head, side by side
    scores = rows @ k.to(dtype).mT / math.sqrt(D)
    own = scores.amax(-1, keepdim=True) if L else scores.new_full((B, K, H // K, 1), -math.inf)
    top = ring.all_reduce(own, op="max")
    weights = (scores - top).exp()
    sums = torch.cat([weights @ v.to(dtype), weights.sum(-1, keepdim=True)], dim=-1)
    sums = ring.all_reduce(sums)
    return (sums[..., :-1] / sums[..., -1:]).view(B, H, 1, D).to(q.dtype)
