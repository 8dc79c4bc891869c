"""The prefixes composed in line, in place of A and B."""


def enter(ring, A, B):
    P, rank, distance = ring.world_size, ring.rank, 1
    before = None
    while distance < P:
        halves = {}
        if rank + distance < P:
            halves |= {"send": (A, B), "to": rank + distance}
        if rank >= distance:
            halves |= {"receive": (torch.empty_like(A), torch.empty_like(B)), "source": rank - distance}
        if halves:
            arrived = ring.comm.exchange(**halves).wait()
        if rank >= distance:
            A_0, B_0 = arrived
            before = (A_0, B_0) if before is None else (before[0] @ A_0, before[0] @ B_0 + before[1])
            A, B = A @ A_0, A @ B_0 + B
        distance *= 2
    return torch.zeros_like(B) if before is None else before[1]
