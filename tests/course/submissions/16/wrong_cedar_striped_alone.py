# expects: check=16.cedar:values misconception=striped_alone
import torch

from ringlab.course.clinic.bedside import attend, nothing_seen, sees


def cedar(ring, q, k, v, positions, causal=True):
    """Positions as the striped layout has them, whatever the layout."""
    P = ring.world_size
    positions = [torch.arange(len(own)) * P + rank for rank, own in enumerate(positions)]
    out, lse = nothing_seen(q)
    for step in range(P):
        work = None if step == P - 1 else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        out, lse = attend(q, k, v, visible, out, lse)
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse


def chart(patient):
    return {"fault": "masks by rank", "check": "masks", "case": {"ranks": 2, "tokens": 2, "layout": "striped"}, "matters": ["layout", "causal"]}
