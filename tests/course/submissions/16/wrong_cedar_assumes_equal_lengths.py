# expects: check=16.cedar:any misconception=assumes_equal_lengths
from ringlab.course.clinic.bedside import attend, nothing_seen, sees


def cedar(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse)."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v)
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        if visible.any():
            out, lse = attend(q, k, v, visible, out, lse)
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse


def chart(patient):
    return {"fault": "masks by rank", "check": "masks", "case": {"ranks": 2, "tokens": 2, "layout": "striped"}, "matters": ["layout", "causal"]}
