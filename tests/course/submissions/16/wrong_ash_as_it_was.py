# expects: check=16.ash:values misconception=as_it_was
import torch

from ringlab.course.clinic.bedside import nothing_seen, scores_of, sees


def ash(ring, q, k, v, positions, causal=True):
    """Return this rank's (out, lse): the softmax of each block, merged by lse; hidden blocks are skipped."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        if visible.any():
            scores = scores_of(q, k, visible)
            top = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True)
            block_lse = (top + total.log())[..., 0]
            merged = torch.logaddexp(lse, block_lse)
            old, new = torch.exp(lse - merged)[..., None], torch.exp(block_lse - merged)[..., None]
            out, lse = out * old + weights @ v.to(out.dtype) / total * new, merged
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse


def chart(patient):
    return {"fault": "blind rows", "check": "blind rows", "case": {"ranks": 2, "tokens": 2, "layout": "striped"}, "matters": ["layout", "causal"]}
