# expects: check=16.fir:any misconception=assumes_equal_lengths
from ringlab.course.clinic.bedside import attend, nothing_seen, receive, sees, send


def fir(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse)."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if step == ring.world_size - 1:
            break
        length = k.shape[-2]
        if ring.rank % 2 == 0:
            send(ring, k)
            send(ring, v)
            k, v = receive(ring, k, length), receive(ring, v, length)
        else:
            next_k, next_v = receive(ring, k, length), receive(ring, v, length)
            send(ring, k)
            send(ring, v)
            k, v = next_k, next_v
    return out.to(q.dtype), lse


def chart(patient):
    return {"fault": "keys as values", "check": "forward", "case": {"ranks": 2, "tokens": 1, "causal": False}, "matters": ["causal"]}
