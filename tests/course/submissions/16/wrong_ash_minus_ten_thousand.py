# expects: check=16.ash:any misconception=minus_ten_thousand
import torch

from ringlab.course.clinic.bedside import nothing_seen, scores_of, sees


def ash(ring, q, k, v, positions, causal=True):
    """−10,000 in place of −∞: no NaN, and wrong where true scores are lower."""
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=len(positions[ring.origin(step + 1)]))
        visible = sees(positions, ring.rank, ring.origin(step), causal)
        if visible.any():
            scores = scores_of(q, k, visible).masked_fill(~visible, -1e4)
            block_lse = torch.logsumexp(scores, -1)
            merged = torch.logaddexp(lse, block_lse)
            out = out * torch.exp(lse - merged)[..., None] + torch.exp(scores - merged[..., None]) @ v.to(
                out.dtype
            )
            lse = merged
        if work is not None:
            k, v = work.wait()
    return out.to(q.dtype), lse
