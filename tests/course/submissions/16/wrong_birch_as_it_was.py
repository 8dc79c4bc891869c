# expects: check=16.birch:values misconception=as_it_was
import math

import torch

from ringlab.course.clinic.bedside import nothing_seen, scores_of, sees


def birch(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse): running maximum, running sum, and out normalised after every block."""
    out, top = nothing_seen(q)
    total = torch.zeros_like(top)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        if k.shape[-2]:
            scores = scores_of(q, k, sees(positions, ring.rank, ring.origin(step), causal))
            new_top = torch.maximum(top, scores.amax(-1))
            safe = new_top.masked_fill(new_top == -math.inf, 0.0)
            kept, weights = torch.exp(top - safe), torch.exp(scores - safe[..., None])
            total = total * kept + weights.sum(-1)
            out = out * kept[..., None] + weights @ v.to(out.dtype)
            out = out / total.masked_fill(total == 0, 1.0)[..., None]
            top = new_top
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), top + total.log()


def chart(patient):
    return {"fault": "lost sum", "check": "forward", "case": {"ranks": 3, "tokens": 1}, "matters": []}
