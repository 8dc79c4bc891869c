# expects: check=16.cedar:values misconception=not_diagnosed
from ringlab.course.clinic.bedside import attend, nothing_seen, sees


def cedar(ring, q, k, v, positions, causal=True):
    """A sound ring, whatever it was that ailed the patient."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse
