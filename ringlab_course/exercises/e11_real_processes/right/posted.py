"""Blocks of ranks alternate by a colour; buffers are made by hand; the ring with losses posts first."""


def blocking_shift(ring, x):
    steps = (lambda: send(ring, x, ring.next), lambda: receive(ring, x, ring.previous))
    if ring.world_size == 1:
        return x
    first = (ring.world_size - 1 - ring.rank) % 2
    made = {order: steps[order]() for order in (first, 1 - first)}
    return made[1]


def uneven_ring(ring, q, k, v):
    told = [int(n) for n in ring.all_gather(torch.full((1,), k.shape[-2], dtype=torch.int32))]
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        work = None
        if step + 1 < ring.world_size:
            n = told[ring.origin(step + 1)]
            due = [torch.empty(*x.shape[:-2], n, x.shape[-1], dtype=x.dtype) for x in (k, v)]
            work = ring.comm.exchange(send=(k, v), to=ring.next, receive=due, source=ring.previous, tag="kv")
        out, lse = ring.compute("block", attend, q, k, v, out, lse)
        if work is not None:
            k, v = work.wait()
    return out, lse


def ring_with_losses(ring, q, k, v):
    (out, lse), seen = nothing_seen(q), []
    for step in range(ring.world_size):
        work = ring.post(k, v) if step < ring.world_size - 1 else None
        out, lse = ring.compute(f"block {step}", attend, q, k, v, out, lse)
        seen.append(torch.tensor(ring.origin(step)))
        try:
            if work is not None:
                k, v = work.wait()
        except PeerDiedError:
            break
    return out, lse, [int(rank) for rank in seen]
