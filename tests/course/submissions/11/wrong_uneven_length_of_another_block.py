# expects: check=11.uneven:ragged misconception=length_of_another_block
import math

import torch


def nothing_seen(q):
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    return out, out.new_full(q.shape[:-1], -math.inf)


def attend(q, k, v, out, lse):
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(out.dtype).repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.to(out.dtype) @ k.mT / math.sqrt(q.shape[-1])
    total = torch.logaddexp(lse, torch.logsumexp(scores, dim=-1))
    safe = total.masked_fill(total == -math.inf, 0.0)[..., None]
    return out * torch.exp(lse[..., None] - safe) + torch.exp(scores - safe) @ v, total


def uneven_ring(ring, q, k, v):
    lengths = [int(n) for n in ring.all_gather(torch.tensor(k.shape[-2]))]
    out, lse = nothing_seen(q)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = None if last else ring.post(k, v, length=lengths[ring.origin(step)])
        out, lse = ring.compute(f"attend {step}", attend, q, k, v, out, lse)
        if work is not None:
            k, v = work.wait()
    return out, lse
