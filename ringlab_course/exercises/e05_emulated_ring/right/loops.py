"""One key at a time, in loops."""


def ring_step(q, k, v, out, lse, mask=None):
    group = q.shape[1] // k.shape[1]
    new_out, new_lse = out.clone(), lse.clone()
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                for j in range(k.shape[2]):
                    if mask is None or mask[i, j]:
                        _add_key(new_out, new_lse, (b, h, i), q[b, h, i], k[b, h // group, j], v[b, h // group, j])
    return new_out, new_lse


def _add_key(out, lse, row, query, key, value):
    """Merge one key, whose partial is (value, score)."""
    score = (query.to(out.dtype) @ key.to(out.dtype)) / math.sqrt(len(query))
    total = torch.logaddexp(lse[row], score)
    out[row] = out[row] * torch.exp(lse[row] - total) + value.to(out.dtype) * torch.exp(score - total)
    lse[row] = total


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
