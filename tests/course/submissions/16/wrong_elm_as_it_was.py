# expects: check=16.elm:cost misconception=as_it_was
from ringlab.course.clinic.bedside import attend, nothing_seen, sees


def elm(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse): attend, shift, attend, shift."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if ring.world_size > 1:
            k, v = ring.shift(k, v, length=len(positions[ring.origin(step + 1)]))
    return out.to(q.dtype), lse


def chart(patient):
    return {"fault": "one hop too many", "check": "bytes", "case": {"ranks": 2, "tokens": 1}, "matters": []}
