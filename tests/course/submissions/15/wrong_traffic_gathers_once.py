# expects: check=15.traffic:ring misconception=gathers_once

def bytes_sent(layer, S, P, schedule, ulysses):
    H, K, U = layer["H"], layer["K"], ulysses
    if P % U or H % U or (K % U and U % K):
        return None
    head = layer["B"] * layer["D"] * layer["itemsize"] * (S // P)  # one head of a rank's tokens
    if schedule == "allgather":
        return 2 * K * head
    heads = max(1, K // U)
    return (U - 1) * (2 * H // U + 2 * heads) * head + (P // U - 1) * 2 * heads * U * head
