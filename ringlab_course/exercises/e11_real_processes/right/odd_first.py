"""Odd ranks send first; lengths go ahead of their block, one hop at a time; the block in hand is merged after the error."""


def blocking_shift(ring, x):
    if ring.world_size == 1:
        return x.clone()
    sends_first = ring.rank % 2 == 1
    if sends_first:
        send(ring, x, ring.next)
    arrived = receive(ring, x, ring.previous)
    if not sends_first:
        send(ring, x, ring.next)
    return arrived


def uneven_ring(ring, q, k, v):
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        work = None
        if step < ring.world_size - 1:
            coming = ring.shift(torch.tensor([k.shape[-2]]), tag="length").item()
            work = ring.post(k, v, length=coming)
        out, lse = ring.compute(f"block {step}", attend, q, k, v, out, lse)
        if work:
            k, v = work.wait()
    return out, lse


def ring_with_losses(ring, q, k, v):
    (out, lse), seen = nothing_seen(q), []
    for step in range(ring.world_size):
        alive, here = True, (k, v)
        if step < ring.world_size - 1:
            try:
                k, v = ring.shift(k, v)
            except PeerDiedError:
                alive = False
        out, lse = attend(q, *here, out, lse)
        seen.append(ring.origin(step))
        if not alive:
            break
    return out, lse, tuple(seen)
