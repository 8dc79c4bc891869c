"""The plainest: attend, then shift."""


def ring_step(q, k, v, out, lse, mask=None):
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.to(out.dtype) for x in (q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    total = torch.logaddexp(lse, torch.logsumexp(scores, dim=-1))
    safe = total.masked_fill(total == -math.inf, 0.0)[..., None]
    return out * torch.exp(lse[..., None] - safe) + torch.exp(scores - safe) @ v, total


def nothing_yet(q):
    out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    return out, out.new_full(q.shape[:-1], -math.inf)


def ring_forward(ring, q, k, v):
    out, lse = nothing_yet(q)
    for step in range(ring.world_size):
        out, lse = ring_step(q, k, v, out, lse)
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v)
    return out, lse


def ring_forward_causal(ring, q, k, v, positions):
    mine = positions[ring.rank]
    out, lse = nothing_yet(q)
    for step in range(ring.world_size):
        mask = mine[:, None] >= positions[ring.origin(step)]
        out, lse = ring_step(q, k, v, out, lse, mask)
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v, length=len(positions[ring.origin(step + 1)]))
    return out, lse
