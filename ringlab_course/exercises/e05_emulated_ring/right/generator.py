"""A step for each group of heads with einsum; the ring as a generator of blocks."""

from torch import inf


def ring_step(queries, keys, values, out, lse, mask=None):
    kind = out.dtype
    B, H, L, D = queries.shape
    K = keys.shape[1]
    grouped = queries.to(kind).view(B, K, H // K, L, D)
    scores = torch.einsum("bkgld,bksd->bkgls", grouped, keys.to(kind)).reshape(B, H, L, -1) / D**0.5
    if mask is not None:
        scores = torch.where(mask, scores, -inf)
    if scores.shape[-1] == 0:
        return out, lse
    best = torch.maximum(lse, scores.amax(-1)).clamp(min=torch.finfo(kind).min)
    old, new = torch.exp(lse - best), torch.exp(scores - best[..., None])
    total = old + new.sum(-1)
    gained = torch.einsum("bkgls,bksd->bkgld", new.view(B, K, H // K, L, -1), values.to(kind)).reshape(B, H, L, D)
    seen = total > 0
    out = torch.where(seen[..., None], (old[..., None] * out + gained) / total.where(seen, 1.0)[..., None], 0.0)
    return out, torch.where(seen, best + total.log(), -inf)


def visitors(ring, k, v, lengths):
    """Each block once, with its origin; the next one is asked for when this one has been used."""
    for step in range(ring.world_size):
        yield ring.origin(step), k, v
        if step + 1 < ring.world_size:
            k, v = ring.shift(k, v, length=lengths[ring.origin(step + 1)])


def ring_forward(ring, q, k, v):
    width = torch.float64 if q.dtype == torch.float64 else torch.float32
    state = torch.zeros_like(q, dtype=width), torch.zeros(q.shape[:3], dtype=width) - inf
    for _, keys, values in visitors(ring, k, v, [k.shape[2]] * ring.world_size):
        state = ring_step(q, keys, values, *state)
    return state


def ring_forward_causal(ring, q, k, v, positions):
    width = torch.float64 if q.dtype == torch.float64 else torch.float32
    state = torch.zeros_like(q, dtype=width), torch.zeros(q.shape[:3], dtype=width) - inf
    mine = positions[ring.rank]
    for origin, keys, values in visitors(ring, k, v, [x.numel() for x in positions]):
        theirs = positions[origin]
        if len(mine) and len(theirs) and mine.max() >= theirs.min():
            state = ring_step(q, keys, values, *state, mask=torch.ge(mine.unsqueeze(1), theirs.unsqueeze(0)))
    return state
