# expects: check=16.fir:values misconception=all_send_first
from ringlab.course.clinic.bedside import attend, nothing_seen, receive, sees, send


def fir(ring, q, k, v, positions, causal=True):
    """All ranks send K, then V, then receive in that order."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if step < ring.world_size - 1:
            length = len(positions[ring.origin(step + 1)])
            send(ring, k)
            send(ring, v)
            k, v = receive(ring, k, length), receive(ring, v, length)
    return out.to(q.dtype), lse


def chart(patient):
    return {"fault": "keys as values", "check": "forward", "case": {"ranks": 2, "tokens": 1, "causal": False}, "matters": ["causal"]}
