# expects: check=15.traffic:ulysses misconception=kv_come_back

def bytes_sent(layer, S, P, schedule, ulysses):
    H, K, U = layer["H"], layer["K"], ulysses
    if P % U or H % U or (K % U and U % K):
        return None
    head = layer["B"] * layer["D"] * layer["itemsize"] * (S // P)  # one head of a rank's tokens
    if schedule == "allgather":
        return (P - 1) * 2 * K * head
    heads = max(1, K // U)
    return (U - 1) * (2 * H // U + 4 * heads) * head + (P // U - 1) * 2 * heads * U * head
