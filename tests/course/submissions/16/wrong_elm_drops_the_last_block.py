# expects: check=16.elm:values misconception=drops_the_last_block
from ringlab.course.clinic.bedside import attend, nothing_seen, sees


def elm(ring, q, k, v, positions, causal=True):
    """One turn fewer of the whole loop: the last block is not attended to."""
    out, lse = nothing_seen(q)
    for step in range(max(1, ring.world_size - 1)):
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if ring.world_size > 1:
            k, v = ring.shift(k, v, length=len(positions[ring.origin(step + 1)]))
    return out.to(q.dtype), lse


def chart(patient):
    return {"fault": "one hop too many", "check": "bytes", "case": {"ranks": 2, "tokens": 1}, "matters": []}
