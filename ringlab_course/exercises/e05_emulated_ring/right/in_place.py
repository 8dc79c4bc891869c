"""In place, with the sigmoid form of the merge made safe."""


def ring_step(q, k, v, out, lse, mask=None):
    group = q.shape[1] // k.shape[1]
    dtype = out.dtype
    scores = torch.einsum("bkgid,bkjd->bkgij", q.to(dtype).unflatten(1, (-1, group)), k.to(dtype)).flatten(1, 2)
    scores *= q.shape[-1] ** -0.5
    if mask is not None:
        scores.masked_fill_(~mask, -math.inf)
    here = torch.logsumexp(scores, dim=-1)
    scores -= here.masked_fill(here == -math.inf, 0.0)[..., None]
    block = torch.einsum("bkgij,bkjd->bkgid", scores.exp_().unflatten(1, (-1, group)), v.to(dtype)).flatten(1, 2)
    share = torch.sigmoid(here - lse)  # NaN where neither has seen a key
    share.masked_fill_(here == -math.inf, 0.0)
    out += share[..., None] * (block - out)
    lse.copy_(torch.logaddexp(lse, here))
    return out, lse


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
