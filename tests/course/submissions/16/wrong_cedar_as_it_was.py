# expects: check=16.cedar:values misconception=as_it_was
import torch

from ringlab.course.clinic.bedside import attend, nothing_seen


def cedar(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse): own block triangular, blocks of earlier ranks full, later ones skipped."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last, origin = step == ring.world_size - 1, ring.origin(step)
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
        if causal and origin == ring.rank:
            visible = visible.tril()
        if origin <= ring.rank or not causal:
            out, lse = attend(q, k, v, visible, out, lse)
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse


def chart(patient):
    return {"fault": "masks by rank", "check": "masks", "case": {"ranks": 2, "tokens": 2, "layout": "striped"}, "matters": ["layout", "causal"]}
